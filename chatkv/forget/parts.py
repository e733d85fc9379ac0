"""What plans are made of: which turns may go, and the op that drops them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from chatkv.events import ForgetPlanned
from chatkv.forget.layout import SINK_TOKENS, Layout, Limits, TurnSpan
from chatkv.kv.ops import Op, Range, joined, next_position, num_live, size_of


@dataclass(frozen=True, slots=True)
class ForgetPlan(ForgetPlanned):
    """One op, and what it means. Nothing has changed yet."""

    op: Op

    def to_json(self) -> dict[str, Any]:
        """Its fields, the op as JSON."""
        return {**asdict(self), "op": self.op.to_json()}


def sinks(layout: Layout) -> list[TurnSpan]:
    """The turns without which the first ids would go."""
    return [turn for turn in layout.turns if turn.start < SINK_TOKENS and turn.start < turn.stop]


def protected(layout: Layout, keep_last: int) -> list[TurnSpan]:
    """Turns before the current one that no policy may touch."""
    before = layout.turns[:-1]
    last = {turn.number for turn in before[len(before) - keep_last :]} if keep_last else set[int]()
    first = sinks(layout)
    return [
        turn
        for turn in before
        if turn.number == 0 or turn.pinned or turn.number in last or turn in first
    ]


def _candidates(layout: Layout, kept: Sequence[TurnSpan]) -> list[tuple[TurnSpan, list[Range]]]:
    """Turns that may go, the oldest first, with what is in sight of each."""
    free = [turn for turn in layout.turns[:-1] if turn not in kept]
    return [(turn, live) for turn in free if (live := layout.live(turn))]


def whole_turns(layout: Layout, kept: Sequence[TurnSpan], wanted: int) -> list[Range]:
    drop: list[Range] = []
    for _, live in _candidates(layout, kept):
        if size_of(drop) >= wanted:
            break
        drop += live
    return joined(drop)


def oldest(layout: Layout, kept: Sequence[TurnSpan], wanted: int, *, exact: bool) -> list[Range]:
    drop: list[Range] = []
    for turn, live in _candidates(layout, kept):
        left = wanted - size_of(drop)
        if left <= 0:
            break
        if exact and not turn.tools and size_of(live) > left:
            drop += _first(live, left)
        else:
            drop += live
    return joined(drop)


def _first(ranges: Sequence[Range], count: int) -> list[Range]:
    """The first `count` ids of ranges."""
    result: list[Range] = []
    for start, stop in ranges:
        stop = min(stop, start + count)
        if start < stop:
            result.append((start, stop))
            count -= stop - start
    return result


def place_of(layout: Layout, drop: Sequence[Range]) -> int:
    """Where an op takes effect: as soon as something is computed, but behind all that it drops."""
    last = max(layout.ops[-1].at if layout.ops else 0, drop[-1][1] if drop else 0)
    return layout.pending if layout.pending >= last else layout.current.start


def placed(layout: Layout, drop: list[Range], coming: int, limits: Limits) -> Op | None:
    """The op that drops these; one that moves positions too if `coming` ids would pass the last
    one. None if neither is needed."""
    at = place_of(layout, drop)
    op = Op(at, tuple(drop))
    ops = (*layout.ops, op)
    position = next_position(ops, at)
    coming += layout.current.start - at
    if position + coming > limits.trained and position > num_live(ops, at):
        moves = {"restart": True} if limits.no_rebase else {"rebase": True}
        return replace(op, **moves)
    return op if drop else None


def plan_of(policy: str, reason: str, layout: Layout, op: Op, limits: Limits) -> ForgetPlan:
    after = layout.with_op(op)
    touched = [
        turn
        for turn in layout.turns
        if any(start < turn.stop and turn.start < stop for start, stop in op.drop)
    ]
    total = layout.current.stop
    restarts = [index for index, one in enumerate(after.ops) if one.restart]
    head = after.ops[: restarts[-1] + 1] if restarts else ()
    return ForgetPlan(
        policy=policy,
        reason="position" if policy == "rebase" else reason,
        op=op,
        turns=tuple(turn.number for turn in touched if after.state(turn) == "forgotten"),
        partly=tuple(turn.number for turn in touched if after.state(turn) == "partly"),
        num_tokens=op.num_tokens,
        live_before=layout.num_live,
        live_after=after.num_live,
        limit=limits.context,
        replay_tokens=total - sum(one.num_tokens for one in head),
        restart_tokens=after.num_live,
    )
