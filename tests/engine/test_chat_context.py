"""What a chat lets the model see: forget, recall, pin, policies, from the key press to the ids."""

from __future__ import annotations

from typing import Any

import pytest
from seeing import SeeingEngine

from chatkv.errors import ContextFull, UnknownSession, UsageError
from chatkv.events import Done, Failed, ForgetEvent, RecallEvent
from sessions.chat import Chats
from sessions.store import ChatStore


def begin(limit: int = 400, policy: str = "turns", **engine) -> tuple[Any, Any]:
    chats = Chats(
        ChatStore(":memory:"),
        SeeingEngine(limit, **engine),
        settings={"model": "seeing", "sampling": {"temperature": 0.0, "max_tokens": 20}},
        policy=policy,
    )
    return chats, chats.new("ada")


def say(chat, text: str):
    events = list(chat.send(text))
    assert isinstance(events[-1], Done), events[-1]
    return events


def sight(chats) -> str:
    """The text the model was shown last."""
    return chats.engine.tokenizer.decode(chats.engine.seen[-1])


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_forgotten_turns_are_out_of_sight_and_still_in_history():
    chats, chat = begin()
    for text in ("first", "second", "third"):
        say(chat, text)
    chat.forget([1, 2])
    assert chat.context().forget == (1, 2)
    assert [turn.seen for turn in chat.turns()] == ["live"] * 3  # it waits for the next turn
    (event,) = of(say(chat, "fourth"), ForgetEvent)
    assert (event.policy, event.turns, event.live_before - event.live_after) == (
        "user", (1, 2), event.num_tokens,
    )  # fmt: skip
    shown = sight(chats)
    assert "first" not in shown
    assert "second" not in shown
    assert "third" in shown
    assert "sys" in shown
    assert [turn.seen for turn in chat.turns()] == ["forgotten", "forgotten", "live", "live"]
    assert [turn.prompt for turn in chat.turns()] == ["first", "second", "third", "fourth"]
    view = chat.context()
    assert view.missing == (1, 2)
    assert view.why == {1: "user", 2: "user"}
    (moment,) = chat.turns()[3].moments
    assert (moment.turns, moment.num_tokens, moment.back) == ((1, 2), event.num_tokens, False)


def test_recall_brings_one_back_and_says_so():
    chats, chat = begin()
    for text in ("first", "second", "third"):
        say(chat, text)
    chat.forget([1, 2])
    say(chat, "fourth")
    chat.recall([2])
    assert chat.context().recall == (2,)
    events = say(chat, "fifth")
    (event,) = of(events, RecallEvent)
    assert event.turns == (2,)
    assert event.live_after - event.live_before == event.num_tokens > 0
    assert not of(events, ForgetEvent)
    assert "first" not in sight(chats)
    assert "second" in sight(chats)
    assert chat.context().why == {1: "user"}
    assert [m.back for m in chat.turns()[4].moments] == [True]
    chat.recall([1])
    say(chat, "sixth")
    assert "first" in sight(chats)
    assert chat.context().missing == ()


def test_what_waits_is_free_to_take_back():
    _, chat = begin()
    say(chat, "first")
    say(chat, "second")
    chat.forget([1])
    chat.recall([1])
    assert chat.context().forget == ()
    assert not of(say(chat, "third"), ForgetEvent)
    chat.forget([1])
    say(chat, "fourth")
    chat.recall([1])
    chat.forget([1])
    assert chat.context().recall == ()


def test_a_sibling_reply_forgets_what_its_twin_did():
    chats, chat = begin()
    say(chat, "first")
    say(chat, "second")
    chat.forget([1])
    say(chat, "third")
    list(chat.again())
    assert "first" not in sight(chats)
    list(chat.edit(chat.turns()[2].id, "another third"))
    assert "first" not in sight(chats)
    assert chat.context().missing == (1,)
    # A turn before it stands on a path that forgot nothing.
    list(chat.edit(chat.turns()[1].id, "another second"))
    assert "first" in sight(chats)
    assert chat.context().missing == ()


def test_a_fork_inherits_what_was_forgotten_and_goes_its_own_way():
    chats, chat = begin()
    say(chat, "first")
    say(chat, "second")
    chat.forget([1])
    say(chat, "third")
    side = chat.fork(name="side")
    side.recall([1])
    say(side, "here")
    assert "first" in sight(chats)
    say(chat, "there")
    assert "first" not in sight(chats)


def test_the_policy_makes_room_and_keeps_pins_and_the_newest():
    chats, chat = begin(limit=300)
    for number in range(4):
        say(chat, f"turn {number} " + "x" * 40)
    assert chat.pin([1]) == ""
    for number in range(4, 12):
        say(chat, f"turn {number} " + "x" * 40)
        shown = sight(chats)
        assert "turn 0" in shown
        assert f"turn {number}" in shown
        assert f"turn {number - 1}" in shown
        assert len(chats.engine.seen[-1]) + 20 <= 300
    turns = chat.turns()
    assert turns[0].pinned
    assert [turn.seen for turn in turns[1:5]] == ["forgotten"] * 4
    assert set(chat.context().why.values()) == {"turns"}
    chat.pin([1], pinned=False)
    say(chat, "turn 12 " + "x" * 40)
    say(chat, "turn 13 " + "x" * 40)
    assert "turn 0" not in sight(chats)


def test_the_next_turn_is_foretold():
    _, chat = begin(limit=300)
    for _ in range(40):
        if chat.context().plans:
            break
        say(chat, "y")
    (planned,) = chat.context().plans
    (event,) = of(say(chat, "y"), ForgetEvent)
    assert event.turns == planned.turns
    assert (planned.num_tokens, planned.policy) == (event.num_tokens, "turns")


def test_plan_says_what_a_text_would_do_and_does_nothing():
    chats, chat = begin(limit=300, policy="ask")
    for _ in range(3):
        say(chat, "z" * 40)
    assert chat.plan("short") == []
    (planned,) = chat.plan("z" * 140)
    assert planned.turns == (1,)
    assert len(chats.engine.seen) == 3
    with pytest.raises(Exception, match="the context is 300 tokens"):
        chat.plan("z" * 400)
    (event,) = of(say(chat, "z" * 140), ForgetEvent)  # the screen has asked by now
    assert event.turns == planned.turns


def test_without_a_policy_it_is_refused_with_the_numbers_and_nothing_changes():
    _, chat = begin(limit=200, policy="error")
    say(chat, "a" * 60)
    chat.forget([1])
    (*_, failed) = chat.send("b" * 300)
    assert isinstance(failed, Failed)
    assert failed.code == "context_full"
    assert "200 tokens" in failed.message
    assert len(chat.turns()) == 1
    assert chat.context().forget == (1,)  # it waits for the next one


def test_records_survive_a_reopening():
    chats, chat = begin(limit=300)
    for _ in range(9):
        say(chat, "w" * 40)
    chat.forget([8])
    again = chats.open(chat.id)
    assert again.turns() == chat.turns()
    assert again.context() == chat.context()
    say(again, "more")
    assert again.turns()[7].seen == "forgotten"


def test_a_redacted_turn_leaves_the_other_records_in_force():
    chats, chat = begin()
    for text in ("first", "second", "third"):
        say(chat, text)
    chat.forget([1])
    say(chat, "fourth")
    chat.redact([chat.turns()[1].id], purge=True)
    say(chat, "fifth")
    shown = sight(chats)
    assert "first" not in shown
    assert "second" not in shown
    assert "third" in shown
    assert [turn.seen for turn in chat.turns()][:3] == ["forgotten", "redacted", "live"]
    with pytest.raises(UsageError, match="nothing brings it back"):
        chat.recall([2])


def test_window_cuts_turns_and_says_which():
    chats, chat = begin(limit=200, policy="window:window_tokens=120")
    for number in range(8):
        say(chat, f"turn {number} " + "v" * 30)
    assert len(chats.engine.seen[-1]) <= 136
    states = [turn.seen for turn in chat.turns()]
    assert "forgotten" in states
    assert states[-1] == "live"
    assert set(chat.context().why.values()) == {"window"}


def test_bad_wishes_are_one_sentence_and_change_nothing():
    _, chat = begin()
    with pytest.raises(UnknownSession, match="no turn 1"):
        chat.forget([1])
    say(chat, "first")
    say(chat, "second")
    for wish, number, words in (
        (chat.forget, 9, "There is no turn 9"),
        (chat.recall, 9, "There is no turn 9"),
        (chat.recall, 2, "Turn 2 is in sight"),
        (chat.pin, 9, "There is no turn 9"),
    ):
        with pytest.raises((UsageError, UnknownSession), match=words):
            wish([number])
    chat.forget([2])
    with pytest.raises(UsageError, match="out of sight already"):
        chat.forget([2])
    events = chat.send("third")
    next(events)
    with pytest.raises(UsageError, match="being answered"):
        chat.forget([3])
    events.close()
    assert chat.context().missing == (2,)


def test_a_recall_that_does_not_fit_is_refused_with_the_numbers():
    _, chat = begin(limit=300)
    for _ in range(8):
        say(chat, "u" * 40)
    gone = chat.context().missing
    with pytest.raises(ContextFull, match="300 tokens"):
        chat.recall(gone)
    assert chat.context().recall == ()


def test_pinning_too_much_is_warned_of_and_then_refused_by_numbers():
    _, chat = begin(limit=300)
    for _ in range(3):
        say(chat, "p" * 50)
    assert "pinned turns hold" in chat.pin([1, 2, 3])
    (*_, failed) = chat.send("p" * 150)
    assert isinstance(failed, Failed)
    assert "300 tokens" in failed.message
    assert "Unpin" in failed.hint


def test_positions_that_run_out_are_moved_and_recorded():
    chats, chat = begin(limit=300, trained=400)
    for _ in range(12):
        say(chat, "q" * 40)
    rows = [row for turn in chats.store.path(chat.id) for row in turn.forgets]
    assert any(row.op.get("rebase") for row in rows)
    chats, chat = begin(limit=300, trained=400, no_rebase="sliding-window layers")
    for _ in range(12):
        say(chat, "q" * 40)
    rows = [row for turn in chats.store.path(chat.id) for row in turn.forgets]
    assert any(row.op.get("restart") for row in rows)
