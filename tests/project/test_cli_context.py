"""`context, forget, recall, pin, unpin` on real files; `ask` says what the model does not see."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeing import SeeingEngine  # pyright: ignore

from chatkv.events import Delta, ForgetEvent, Summarizing
from sessions.chat import Chats
from sessions.store import ChatStore


def talk(data: Path, *prompts: str, limit: int = 400, ref: str = "") -> str:
    """A chat that was told these; returns its id."""
    store = ChatStore(data / "chat.db")
    settings = {"model": "seeing", "sampling": {"max_tokens": 20}}
    chats = Chats(store, SeeingEngine(limit), settings=settings, policy="turns")
    chat = chats.open(ref) if ref else chats.new("ada")
    for prompt in prompts:
        list(chat.send(prompt))
    store.close()
    return chat.id


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


def test_context_lists_each_turn(chatkv, data):
    talk(data, "first", "second", "third")
    assert chatkv("pin", "ada", "2", "--json").json["pinned"] == [2]
    assert chatkv("forget", "ada", "1").err.startswith("From the next turn on the model does not")
    talk(data, "fourth", ref="ada")
    shown = chatkv("context", "ada")
    assert shown.code == 0
    assert "tokens in sight, 4 of them system prompt; limit 400, 20 kept for the reply" in shown.out
    rows = [line.split() for line in shown.out.splitlines()[2:6]]
    assert [row[2:-1] for row in rows] == [
        ["forgotten", "(user)"],
        ["yes,", "pinned"],
        ["yes"],
        ["yes"],
    ]
    found = chatkv("context", "ada", "--json").json
    assert found["missing"] == [1]
    assert found["why"] == {"1": "user"}
    assert found["limit"] == 400
    assert [turn["state"] for turn in found["turns"]] == ["forgotten", "live", "live", "live"]
    assert found["turns"][1]["pinned"]


def test_forget_and_recall_wait_for_the_next_turn(chatkv, data):
    talk(data, "first", "second", "third", "fourth")
    assert chatkv("forget", "ada", "--before", "3", "--json").json["forgotten"] == [1, 2]
    assert chatkv("context", "ada", "--json").json["forget"] == [1, 2]
    assert "With the next turn these go: 1-2" in chatkv("context", "ada").out
    assert chatkv("recall", "ada", "2").code == 0
    talk(data, "fifth", ref="ada")
    assert chatkv("context", "ada", "--json").json["missing"] == [1]
    back = chatkv("recall", "ada", "--all", "--json").json
    assert back["recalled"] == [1]
    assert back["context"]["recall"] == [1]
    kept, again = back["context"]["kept"], back["context"]["recomputed"]
    assert kept + again == back["context"]["used_next"]
    assert again == sum(
        turn["tokens"] for turn in back["context"]["turns"][4:]
    )  # from the fifth on
    chatkv("forget", "ada", "1")
    said = f"{kept} tokens before them are found again where their pages are; {again} are computed"
    assert said in chatkv("recall", "ada", "1").err
    assert said in chatkv("context", "ada").out
    talk(data, "sixth", ref="ada")
    assert chatkv("context", "ada", "--json").json["missing"] == []
    assert "Nothing is out of its sight" in chatkv("recall", "ada", "--all").err
    assert chatkv("unpin", "ada", "-1").code == 0


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("forget", "ada"), 2, "Name either turns or --before N"),
        (("forget", "ada", "9"), 3, "no turn 9"),
        (("recall", "ada", "1"), 2, "Turn 1 is in sight"),
        (("recall", "ada", "1", "--all"), 2, "Name either turns or --all"),
        (("pin", "ada", "x"), 2, "'x' is no turn"),
        (("context", "nobody"), 3, "no conversation 'nobody'"),
    ],
)
def test_bad_wishes_are_named(chatkv, data, args, code, says):
    talk(data, "first", "second")
    ran = chatkv(*args)
    assert (ran.code, says in ran.err) == (code, True), ran.err


def test_pins_that_hold_too_much_are_warned_of(chatkv, data):
    talk(data, "x" * 100, "y" * 100)
    assert "pinned turns hold" in chatkv("pin", "ada", "1-2").err


def test_a_recall_that_does_not_fit_has_the_exit_status_of_the_context(chatkv, data):
    talk(data, *["x" * 60] * 9)
    ran = chatkv("recall", "ada", "--all")
    assert ran.code == 5
    assert "400 tokens" in ran.err


FORGET = ForgetEvent("turns", "limit", (1,), (), 10, 4000, 3990, 4096, {"turns": [1]})


def forgetting(chat, text):
    chat.missing = (1,)
    yield FORGET
    yield Delta("ok", (1,))


def test_ask_says_on_stderr_what_left_and_later_what_is_missing(chatkv, chats):
    chats.script = forgetting
    ran = chatkv("ask", "hi")
    assert ran.out.strip() == "ok"
    assert "turn 1 left the model's context (10 tokens, policy turns" in ran.err
    assert "4,000 to 3,990 of 4,096 in sight" in ran.err
    chats.script = lambda chat, text: iter([Delta("ok", (1,))])
    assert "The model does not see turn 1 (10 tokens)." in chatkv("ask", "-c", "more").err
    assert "does not see" not in chatkv("ask", "-c", "more", "-q").err


def test_ask_json_lists_what_is_missing(chatkv, chats):
    chats.script = forgetting
    found = chatkv("ask", "hi", "--json")
    assert found.json["context"]["missing"] == [1]
    assert found.json["context"]["why"] == {"1": "turns"}
    assert found.err == ""
    lines = chatkv("ask", "hi", "--jsonl").lines
    (event,) = [line for line in lines if line["type"] == "forget"]
    assert (event["turns"], event["live_before"], event["live_after"]) == ([1], 4000, 3990)


def test_ask_says_that_a_summary_is_written(chatkv, chats):
    made = ForgetEvent("summarize", "limit", (1,), (), 90, 4000, 3930, 4096, {"turns": [1]})
    chats.script = lambda chat, text: iter(
        [Summarizing((1,), 0, 22), Summarizing((1,), 9, 22), made, Delta("ok", (1,))]
    )
    flags = ("ask", "hi", "--on-overflow", "summarize:ask=no")
    ran = chatkv(*flags)
    assert ran.err.count("Summing up turn 1 in at most 22 tokens") == 1
    assert "(90 tokens, a summary stands for them; 4,000 to 3,930" in ran.err
    lines = chatkv(*flags, "--jsonl").lines
    kinds = [line["type"] for line in lines if line["type"] != "prefill"]
    assert kinds == ["start", "summarizing", "summarizing", "forget", "delta", "done"]
    assert chatkv(*flags, "--json").err == ""


def test_a_chat_that_asks_first_is_not_answered_for(chatkv, chats):
    chatkv("ask", "hi")
    chats.rows[-1].policy = "summarize"
    assert chatkv("ask", "-c", "short").code == 0  # it fits
    ran = chatkv("ask", "-c", "x" * 50)
    assert (ran.code, "needs a screen" in ran.err) == (2, True)


def test_the_policy_comes_from_the_flag_and_stays_with_the_chat(chatkv, chats):
    assert chatkv("ask", "hi", "--on-overflow", "turns").code == 0
    assert chats.rows[-1].policy == "turns"
    assert chatkv("ask", "hi", "--on-overflow", "oldest:drop_tokens=1000").code == 0
    assert chats.rows[-1].policy == "oldest:drop_tokens=1000"


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("forget-me", "unknown forget policy 'forget-me'"),
        ("oldest:drop_tokens=5", "drop_tokens is 5"),
        ("turns:high=1", "no parameter 'high'"),
        ("ask", "needs a screen"),
        ("summarize", "or summarize:ask=no"),
        ("summarize:force=perhaps", "not yes or no"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(chatkv, chats, policy, says):
    ran = chatkv("ask", "hi", "--on-overflow", policy)
    assert (ran.code, says in ran.err) == (2, True), ran.err


def test_the_library_and_ask_refuse_and_the_chat_forgets(chatkv, chats, monkeypatch):
    from tui import wiring

    asked = []
    inner = wiring.open_workspace

    def note(settings, **options):
        asked.append(options.get("policy", "error"))
        return inner(settings, **options)

    monkeypatch.setattr(wiring, "open_workspace", note)
    chatkv("ask", "hi")
    chatkv("chat", "--plain", stdin=b"hi\n")
    assert asked == ["error", "turns"]


def test_plain_chat_asks_or_stops_before_it_forgets(chatkv, chats):
    ran = chatkv("chat", "--plain", "--on-overflow", "stop", stdin=b"short\n" + b"x" * 50 + b"\n")
    assert ran.code == 2
    assert "turn 1 would leave the model's context (10 tokens; 4,000 to 3,990 of 4,096)" in ran.err
    assert len(chats.rows[-1].told) == 1
