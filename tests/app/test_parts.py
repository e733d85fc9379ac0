"""What needs no screen: reducer, commands, window, cuts, fork tree, words."""

from __future__ import annotations

from typing import Any

import pytest
from app.fake_engine import FakeEngine
from app.fakes import AT_MS, FakeChats
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.errors import ConfigError, ContextFull, EngineLost, UsageError, plural
from chatkv.events import Delta, Done, Failed, Prefill, Rendered, Usage
from sessions.port import ChatRow, TreeTurn
from tui import slash
from tui.actions import ACTIONS, COMMANDS, by_id, key_name
from tui.reply import Reply
from tui.safe_text import safe_text
from tui.screens.chat import ChatScreen
from tui.screens.chats import ChatsScreen, tree
from tui.screens.tree import TreeScreen
from tui.turn_tree import tree_lines
from tui.widgets.turn_view import PART_WEIGHT, Card, folded, split_reply, weigh
from tui.widgets.window import MAX_TURNS, MAX_WEIGHT, Window
from tui.wording import bar, clip, clock, count, reply_end, usage_rows

EVENTS = st.one_of(
    st.just(Rendered(())),
    st.builds(Prefill, st.just(1), st.integers(0, 9), st.just(9)),
    st.builds(Delta, st.text("ab ", max_size=3), st.just((1, 2))),
    st.builds(Done, st.just("stop"), st.text("ab", max_size=5), st.just(()), st.just(())),
    st.just(Failed("context_full", 5, "It does not fit.")),
)


def _reply() -> Reply:
    chats = FakeChats()
    return Reply(chats.add("a"), "send", "hello")


@given(st.lists(st.one_of(EVENTS, st.sampled_from(["stop", "end", "lost", "take"])), max_size=12))
def test_every_reply_ends_and_an_end_is_final(steps: list[Any]) -> None:
    reply = _reply()
    ended_as = None
    for step in steps:
        if step == "stop":
            reply.stop()
        elif step == "end":
            reply.end()
        elif step == "lost":
            reply.end(EngineLost("gone"))
        elif step == "take":
            reply.take()
        else:
            reply.apply(step)
        if ended_as is not None:
            assert (reply.phase, reply.text, reply.error) == ended_as
        elif reply.ended:
            ended_as = (reply.phase, reply.text, reply.error)
    reply.end()
    assert reply.ended
    assert reply.word == "sending" or ended_as


def test_deltas_after_a_stop_are_dropped_until_done_says_the_text() -> None:
    reply = _reply()
    reply.apply(Delta("one ", (1,)))
    assert reply.take() == "one "
    reply.apply(Delta("two ", (2,)))
    assert reply.stop()
    assert not reply.stop()
    reply.apply(Delta("three", (3,)))
    assert reply.take() == ""
    assert reply.word == "stopping"
    reply.apply(Done("cancelled", "one two ", (), ()))
    assert reply.text == "one two "


def test_failed_event_is_an_error_with_its_own_code() -> None:
    reply = _reply()
    reply.apply(Failed("context_full", 5, "Too long.", "Fork."))
    assert reply.error is not None
    assert (reply.error.code, reply.error.exit_code, reply.error.hint) == (
        "context_full",
        5,
        "Fork.",
    )
    assert not reply.heard


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("hello", "hello"),
        ("//etc/hosts", "/etc/hosts"),
        ("a /fork", "a /fork"),
        ("/new", slash.Slash("new", "")),
        ("/fork 3 my fork", slash.Slash("fork", "3 my fork")),
        ("/quit", slash.Slash("exit", "")),
    ],
)
def test_what_a_line_means(text: str, meaning: object) -> None:
    assert slash.parse(text) == meaning


@pytest.mark.parametrize("text", ["/frok", "/etc/passwd is what?", "/", "/Fork", "/fork\nx"])
def test_an_unknown_command_is_never_text(text: str) -> None:
    with pytest.raises(UsageError) as error:
        slash.parse(text)
    assert "//" in error.value.hint
    assert "\n" not in error.value.message


def test_unknown_command_offers_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        slash.parse("/frok")
    assert "/fork" in error.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("/temperature 0.5", "Did you mean /set temperature 0.5?"),
        ("/tempratur", "Did you mean /set temperature?"),
        ("/xyzzy", "/help lists them."),
    ],
)
def test_unknown_command_offers_the_way_to_what_was_meant(text, hint) -> None:
    with pytest.raises(UsageError) as error:
        slash.parse(text)
    assert error.value.hint.startswith(f"{hint} ")


def test_help_is_about_commands_that_there_are() -> None:
    assert slash.topic(slash.Slash("help", "")) == ""
    assert slash.topic(slash.Slash("help", "/quit")) == "exit"
    with pytest.raises(UsageError, match="no command /foork"):
        slash.topic(slash.Slash("help", "foork"))


def test_completion_goes_as_far_as_it_is_clear() -> None:
    assert slash.complete("/fo") == "/for"
    assert slash.complete("/fork") == "/fork "
    assert slash.complete("/forg") == "/forget "
    assert slash.complete("/re") == "/re"
    assert slash.complete("/ed") == "/edit "
    assert slash.complete("hello") is None
    assert slash.complete("/fork 3") is None


def test_setting_values_are_json_or_text() -> None:
    assert slash.setting(slash.Slash("set", "temperature 0.5")) == ("temperature", 0.5)
    assert slash.setting(slash.Slash("set", "stop END")) == ("stop", ("END",))
    assert slash.setting(slash.Slash("set", 'stop ["a b", "\\n"]')) == ("stop", ("a b", "\n"))
    assert slash.setting(slash.Slash("set", "seed null")) == ("seed", None)
    with pytest.raises(ConfigError, match="temperature is '99', but must be 0"):
        slash.setting(slash.Slash("set", "temperature 99"))
    with pytest.raises(ConfigError) as unknown:
        slash.setting(slash.Slash("set", "temprature 0.5"))
    assert unknown.value.hint == "Did you mean temperature?"
    with pytest.raises(UsageError):
        slash.setting(slash.Slash("set", "temperature"))
    assert slash.turn_and_name(slash.Slash("fork", "3 a b")) == (3, "a b")
    assert slash.turn_and_name(slash.Slash("fork", "ideas")) == (None, "ideas")


def test_every_action_has_one_id_a_method_and_words() -> None:
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    for action in ACTIONS:
        assert action.help
        if action.run.startswith("screen."):
            name = action.run.removeprefix("screen.").partition("(")[0]
            screen = {"chats": ChatsScreen, "tree": TreeScreen}.get(action.where, ChatScreen)
            assert hasattr(screen, f"action_{name}"), action.id
    assert key_name("ctrl+r") == "Ctrl+R"
    assert key_name("ctrl+r", short=True) == "^R"
    assert by_id("turn.copy_code").keys == "C"
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)


LINES = st.sampled_from(
    [
        "text",
        "- item",
        "1. item",
        "  - nested",
        "> quote",
        "",
        "# head",
        "| a | b |",
        "```",
        "    x",
    ]
)


@settings(max_examples=50)
@given(st.lists(LINES, max_size=400))
def test_parts_join_to_the_whole_and_stay_small(lines: list[str]) -> None:
    text = safe_text("\n".join(lines))
    parts = split_reply(text)
    assert "".join(parts) == text
    assert all(parts[:-1])
    assert all(weigh(part) <= 2 * PART_WEIGHT + 10 for part in parts)


@settings(max_examples=50)
@given(st.lists(LINES, min_size=50, max_size=300), st.data())
def test_a_cut_never_falls_into_what_is_shown(lines: list[str], data: st.DataObject) -> None:
    text = safe_text("\n".join(lines))
    shown = data.draw(st.integers(0, len(text)))
    parts = split_reply(text, not_before=shown)
    assert "".join(parts) == text
    assert len(parts) == 1 or len(parts[0]) >= shown


def test_a_fence_is_never_cut() -> None:
    text = safe_text("- a\n" * 70 + "\n```python\n" + "x = 1\n\n- y\n" * 200 + "```\n\nafter")
    for part in split_reply(text):
        assert part.count("```") in (0, 2)


def test_a_long_prompt_is_folded_on_the_screen_only() -> None:
    assert folded("short") == "short"
    shown = folded("line\n" * 5_000)
    assert shown.count("\n") <= 41
    assert "more characters" in shown


@settings(max_examples=50)
@given(st.lists(st.integers(1, 180), max_size=40), st.data())
def test_window_keeps_its_bounds(parts: list[int], data: st.DataObject) -> None:
    window = Window()
    window.lay_out([[4, weight] for weight in parts])
    for start, stop in (
        window.tail(),
        window.from_turn(data.draw(st.integers(0, len(parts) - 1)) if parts else 0)
        if parts
        else (0, 0),
    ):
        assert 0 <= start <= stop <= len(window.parts)
        assert stop - start <= 1 or window.fits(start, stop)
        assert stop > start or not parts
        assert sum(window.weights[start:stop]) <= max(MAX_WEIGHT, *window.weights, 0)
        turns = {turn for turn, _ in window.parts[start:stop]}
        assert len(turns) <= MAX_TURNS


def test_window_counts_turns_outside() -> None:
    window = Window()
    window.lay_out([[4, 2]] * 10)
    window.start, window.stop = window.tail()
    assert (window.turns_above, window.turns_below, window.at_end) == (6, 0, True)
    window.start, window.stop = window.from_turn(0)
    assert (window.turns_above, window.turns_below, window.at_end) == (0, 6, False)


def _row(chat_id: str, parent: str | None = None) -> ChatRow:
    return ChatRow(chat_id, chat_id, "main", 1, 1, AT_MS, forked_from=parent)


def test_fork_tree_hangs_forks_under_their_origin() -> None:
    rows = [_row("d", "b"), _row("c", "a"), _row("b", "a"), _row("a"), _row("x", "gone")]
    assert [(line.lead, line.row.id) for line in tree(rows)] == [
        ("", "a"), ("├─ ", "c"), ("└─ ", "b"), ("   └─ ", "d"), ("", "x"),
    ]  # fmt: skip


def test_fork_tree_survives_a_circle() -> None:
    rows = [_row("a", "b"), _row("b", "a"), _row("c", "c")]
    assert sorted(line.row.id for line in tree(rows)) == ["a", "b", "c"]


def _turn(turn_id: int, parent: int | None, *, on_path: bool = False) -> TreeTurn:
    return TreeTurn(turn_id, parent, 1, "chat", f"p{turn_id}", "done", on_path)


def test_a_tree_of_turns_indents_only_where_it_parts() -> None:
    parents = {1: None, 2: 1, 3: 2, 4: 2, 5: 4, 6: 1, 7: 6, 8: 6}
    path = {1, 2, 3}
    turns = [_turn(one, parent, on_path=one in path) for one, parent in parents.items()]
    assert [(line.lead, line.turn.id) for line in tree_lines(turns)] == [
        ("", 1), ("├─ ", 6), ("│  ├─ ", 7), ("│  ", 8), ("", 2), ("├─ ", 4), ("│  ", 5), ("", 3),
    ]  # fmt: skip
    assert tree_lines(turns)[0].words() == "● 1 p1"
    assert tree_lines([]) == []


@given(st.lists(st.integers(0, 30), max_size=30), st.sets(st.integers(0, 29)))
def test_a_tree_of_turns_shows_each_once_below_its_parent(
    parents: list[int], path: set[int]
) -> None:
    turns = [
        _turn(one, None if one == 0 else parent % one, on_path=one in path)
        for one, parent in enumerate(parents)
    ]
    shown = [line.turn.id for line in tree_lines(turns)]
    assert sorted(shown) == list(range(len(turns)))
    for turn in turns:
        assert turn.parent_id is None or shown.index(turn.parent_id) < shown.index(turn.id)


def test_a_reason_that_came_with_a_file_is_harmless() -> None:
    rows = dict(usage_rows(Usage(reuse_reason="\x1b[2J\u202e")))
    assert rows[safe_text("reused")] == "0 tokens (␛[2J‹U+202E›)"


def test_words_for_numbers() -> None:
    assert [count(n) for n in (0, 950, 2_700, 31_000, 1_200_000)] == [
        "0", "950", "2.7k", "31k", "1.2M",
    ]  # fmt: skip
    assert bar(1, 4096, 10) == "█░░░░░░░░░"
    assert bar(0, 0, 4) == "░░░░"
    assert clip(safe_text("한국어 text"), 6) == "한국.."
    now = AT_MS / 1000
    assert clock(AT_MS, now + 60).count(":") == 1
    assert len(clock(AT_MS, now + 2 * 86_400)) == 3
    assert clock(AT_MS, now + 400 * 86_400).endswith("2024")
    assert reply_end("interrupted", "cancelled", None) == "interrupted"
    assert reply_end("done", "length", None) == "cut at max_tokens"


def test_card_weights_follow_its_parts() -> None:
    card = Card(1, safe_text("p"), split_reply(safe_text("- a\n" * 100)))
    assert len(card.weights) == 1 + len(card.reply)
    assert card.text == "- a\n" * 100


def test_fakes_raise_what_they_are_told() -> None:
    engine = FakeEngine(ready=False)
    engine.failure = ContextFull(used=1, needed=2, limit=3)
    with pytest.raises(ContextFull):
        engine.wait_ready()


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "turn", "1 turn"),
        (0, "turn", "0 turns"),
        (3000, "token", "3,000 tokens"),
        (2, "other reply", "2 other replies"),
        (2, "match", "2 matches"),
    ],
)
def test_counts_are_told_in_words(number, noun, words):
    assert plural(number, noun) == words
