"""What each policy puts out of sight: numbers only, no model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chatkv.errors import ConfigError, ContextFull, UsageError
from chatkv.forget import (
    Layout,
    Limits,
    Slide,
    TurnSpan,
    WindowPolicy,
    check_policy,
    flatten,
    parse_policy,
    pin_warning,
    plan,
    plan_user,
    policy_text,
)
from chatkv.kv.layout import stages
from chatkv.kv.ops import Op, check_ops, live_ranges, next_position, num_live

LIMITS = Limits(context=1024, reserve=256, trained=4096, page_tokens=16)


def path(*sizes: int, pins: tuple[int, ...] = (), ops: tuple[Op, ...] = ()) -> Layout:
    turns, at = [], 0
    for number, size in enumerate(sizes):
        turns.append(TurnSpan(number, at, at + size, pinned=number in pins))
        at += size
    return Layout(tuple(turns), ops)


def test_turns_goes_down_to_low_water_and_no_further() -> None:
    (made,) = plan(parse_policy("turns"), path(30, *[100] * 8), LIMITS)
    # 830 + 256 > 1024: down to 768 live, so one turn.
    assert made.op == Op(730, ((30, 130),))
    assert (made.turns, made.partly, made.num_tokens) == ((1,), (), 100)
    assert (made.live_before, made.live_after) == (830, 730)
    assert plan(parse_policy("turns"), path(30, *[100] * 7), LIMITS) == []


def test_oldest_counts_and_rounds() -> None:
    lay = path(30, *[100] * 9)
    policy = parse_policy("oldest:limit_tokens=1000,drop_tokens=150")
    (made,) = plan(
        policy, lay, LIMITS
    )  # 930 + 256 is 186 over: two times 150, then to the turn's end
    assert (made.op.drop, made.turns) == (((30, 330),), (1, 2, 3))
    exact = parse_policy("oldest:limit_tokens=1000,drop_tokens=125,edge=token")
    (made,) = plan(exact, lay, LIMITS)
    assert (made.op.drop, made.turns, made.partly) == (((30, 280),), (1, 2), (3,))
    tools = Layout(
        tuple(TurnSpan(t.number, t.start, t.stop, tools=True) for t in lay.turns), lay.ops
    )
    assert plan(exact, tools, LIMITS)[0].op.drop == ((30, 330),)


def test_pins_and_the_last_turns_stay() -> None:
    (made,) = plan(parse_policy("turns"), path(30, *[100] * 8, pins=(1, 3)), LIMITS)
    assert made.turns == (2,)
    with pytest.raises(
        ContextFull, match=r"930 tokens \(930 of them protected\).*101 more"
    ) as full:
        plan(parse_policy("turns"), path(30, *[100] * 10, pins=tuple(range(1, 10))), LIMITS)
    assert full.value.protected == 930


def test_a_prompt_larger_than_the_context_is_refused_by_all() -> None:
    for text in ("error", "turns", "oldest", "window", "summarize"):
        with pytest.raises(ContextFull):
            plan(parse_policy(text), path(30, 100, 100, 1200), LIMITS)


def test_what_only_just_fits_goes_ahead() -> None:
    lay = path(30, 200, 200, 500, pins=(1, 2))
    assert plan(parse_policy("turns"), lay, LIMITS) == []
    assert plan(parse_policy("error"), path(30, 993), LIMITS) == []
    with pytest.raises(ContextFull):
        plan(parse_policy("error"), path(30, 994), LIMITS)


def test_positions_that_run_out() -> None:
    short = Limits(context=1024, reserve=256, trained=1024, page_tokens=16)
    (made,) = plan(parse_policy("turns"), path(30, *[100] * 8), short)
    assert made.op.rebase
    assert not made.op.restart
    (made,) = plan(
        parse_policy("turns"),
        path(30, *[100] * 8),
        Limits(1024, 256, 1024, 16, no_rebase="sliding-window layers"),
    )
    assert made.op.restart
    gap = path(30, *[100] * 8, ops=(Op(430, ((30, 230),)),))
    (made,) = plan(parse_policy("error"), gap, short)
    assert (made.policy, made.reason, made.op) == ("rebase", "position", Op(730, (), rebase=True))
    assert made.num_tokens == 0


def test_window_keeps_pages_pins_and_a_bound() -> None:
    policy = parse_policy("window:window_tokens=256")
    (made,) = plan(policy, path(20, *[100] * 8, pins=(2,)), LIMITS)
    # 820 live, 272 may be. The system prompt reaches into the second page.
    assert made.live_after <= 272
    left = live_ranges([made.op], 720)
    assert left[0] == (0, 20)
    assert (120, 220) in left
    with pytest.raises(ContextFull):
        plan(policy, path(20, *[100] * 8, pins=(2, 3)), LIMITS)
    check_policy(policy, LIMITS)
    with pytest.raises(ConfigError, match="sliding-window layers"):
        check_policy(policy, Limits(1024, 256, 4096, 16, no_rebase="sliding-window layers"))
    with pytest.raises(ConfigError, match="1024 tokens"):
        check_policy(parse_policy("window:window_tokens=1020"), LIMITS)


@settings(max_examples=40)
@given(st.integers(1, 400), st.integers(64, 300), st.integers(0, 3))
def test_a_sliding_window_is_bounded(start: int, window: int, pin: int) -> None:
    """Id after id: never more in sight than the window and the sinks, and never one step twice."""
    limits = Limits(context=512, reserve=64, trained=600, page_tokens=16)
    lay = path(10, 40, 5, start, pins=(pin,) if pin else ())
    policy = WindowPolicy(window_tokens=window)
    try:
        ops = [made.op for made in plan(policy, lay, limits)]
    except ContextFull as full:
        assume(full.needed + 16 <= full.limit - (full.protected or 0))
        raise
    slide = Slide.of(policy, lay, limits)
    stage, length = stages(ops, 16)[-1], lay.current.stop
    gone = [op.at for op in ops]
    while length < 1000:
        room = slide.room(num_live(ops, length), next_position(ops, length))
        if room <= 0:
            op = slide.next(ops, length, stage.filled(length, 16)).op
            assert op.at == length
            ops.append(op)
            gone.append(length)
            stage = stage.after(op, 16)
            room = slide.room(num_live(ops, length), next_position(ops, length))
        assert room > 0
        length += room
        assert num_live(ops, length) <= slide.bound
        assert next_position(ops, length) <= limits.trained
        assert live_ranges(ops, length)[0][0] == 0
    check_ops(ops, length)
    assert len(gone) == len(set(gone))
    assert len(gone) > 1


def test_the_user_may_forget_what_policies_may_not() -> None:
    lay = path(30, 100, 100, 100, 10, pins=(2,))
    made = plan_user(lay, [2, 1], LIMITS)
    assert (made.policy, made.reason, made.turns) == ("user", "user", (1, 2))
    assert made.op == Op(330, ((30, 230),))
    for numbers, words in (([4], "typing"), ([0], "system"), ([9], "no turn 9"), ([], "No turn")):
        with pytest.raises(UsageError, match=words):
            plan_user(lay, numbers, LIMITS)
    with pytest.raises(UsageError, match="already"):
        plan_user(lay.with_op(made.op), [1], LIMITS)
    with pytest.raises(UsageError, match="first tokens"):
        plan_user(path(0, 100, 10), [1], LIMITS)


def test_pins_over_half_the_context() -> None:
    assert pin_warning(path(30, 400, 100, pins=(1,)), LIMITS) == ""
    assert "530 of 1024" in pin_warning(path(30, 500, 100, pins=(1,)), LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        "error",
        "turns",
        "turns:low=0.5",
        "oldest:edge=token",
        "window:sink_pages=2",
        "summarize",
        "summarize:ask=no,force=yes",
    ],
)
def test_policies_are_written_as_they_are_read(text: str) -> None:
    assert policy_text(parse_policy(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fifo", "fifo"),
        ("oldest:count=1", "count"),
        ("error:low=1", "low"),
        ("oldest:drop_tokens=12", "drop_tokens is 12"),
        ("oldest:drop_tokens=many", "many"),
        ("turns:low=0", "low is 0"),
        ("turns:low=", "''"),
        ("window:sink_pages=0", "sink_pages is 0"),
        ("oldest:edge=word", "edge is word"),
        ("summarize:shrink=1", "shrink is 1"),
        ("summarize:ask=maybe", "ask is 'maybe', not yes or no"),
        ("summarize:low=2", "low is 2"),
    ],
)
def test_policies_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_policy(text)


def test_a_restart_is_a_path_of_its_own() -> None:
    ops = [Op(50, ((10, 20),)), Op(70, ((30, 40),), restart=True), Op(90, ((0, 10), (60, 75)))]
    tokens, sampled, rest = flatten(range(100), [i % 3 == 0 for i in range(100)], ops)
    assert tokens == [*range(10), *range(20, 30), *range(40, 100)]
    assert sampled == [i % 3 == 0 for i in tokens]
    assert rest == [Op(70, ((0, 10), (40, 55)))]
    left = [tokens[i] for a, b in live_ranges(rest, 80) for i in range(a, b)]
    assert left == [i for a, b in live_ranges(ops, 100) for i in range(a, b)]
    plain = flatten([1, 2], [True, False], ops[:1])
    assert plain == ([1, 2], [True, False], ops[:1])


def test_a_context_too_small_for_a_first_turn_is_told_the_smallest_that_works() -> None:
    small = Limits(context=5, reserve=2, trained=2048, page_tokens=16, closing=2)
    for text in ("error", "turns", "oldest", "summarize"):
        with pytest.raises(
            ContextFull, match=r"system prompt holds 21 tokens.* is 5 tokens"
        ) as full:
            plan(parse_policy(text), path(21, 10), small)
        assert full.value.hint == "Use --context 34 or more, or shorten the prompt."
        assert plan(parse_policy(text), path(21, 10), replace(small, context=34)) is not None


def test_a_prompt_longer_than_the_model_can_see_is_told_no_context() -> None:
    limits = Limits(context=1024, reserve=256, trained=1024, page_tokens=16)
    with pytest.raises(ContextFull) as full:
        plan(parse_policy("error"), path(30, 1200), limits)
    assert full.value.hint == "Shorten the prompt."
