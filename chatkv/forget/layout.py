"""A path as policies see it: turns, what was forgotten, and what it has to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chatkv.kv.ops import Op, Range, joined, live_ranges, num_live, size_of, without

SINK_TOKENS = 4
"""Attention rests on the first ids: without them the text falls apart. They are never dropped."""
RESERVE_TOKENS = 1024
"""Kept free for a reply when nobody says: this or a quarter of the context, the less of both."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One turn of the path, in places."""

    number: int
    """Depth; 0 is the system prompt, which is always there and may be empty."""
    start: int
    stop: int
    pinned: bool = False
    tools: bool = False
    """Holds tool calls or their results: it goes wholly or not at all."""
    tail: int = 0
    """Ids at its end that close its reply: they are computed with the turn behind it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A path: its turns without gaps from 0 on, the one just typed last, and what was forgotten."""

    turns: tuple[TurnSpan, ...]
    ops: tuple[Op, ...] = ()

    @property
    def current(self) -> TurnSpan:
        """The turn that was just typed."""
        return self.turns[-1]

    @property
    def pending(self) -> int:
        """Place of the first id that is computed together with the current turn: an op there costs
        no pass of its own."""
        return self.current.start - (self.turns[-2].tail if len(self.turns) > 1 else 0)

    @property
    def num_live(self) -> int:
        """Tokens in sight, those of the current turn too."""
        return num_live(self.ops, self.current.stop)

    def live(self, turn: TurnSpan) -> list[Range]:
        """What the model sees of a turn."""
        dropped = sorted(pair for op in self.ops for pair in op.drop)
        return without([(turn.start, turn.stop)], dropped) if turn.start < turn.stop else []

    def state(self, turn: TurnSpan) -> str:
        """`live`, `partly` or `forgotten`."""
        left = size_of(self.live(turn))
        if left == turn.stop - turn.start:
            return "live"
        return "partly" if left else "forgotten"

    def with_op(self, op: Op) -> Layout:
        """The same path with one op more."""
        return replace(self, ops=(*self.ops, op))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a path has to fit."""

    context: int
    """Tokens the model may see."""
    reserve: int
    """Of these, tokens kept free for the reply and what closes it."""
    trained: int
    """Positions the model was trained for."""
    page_tokens: int
    no_rebase: str = ""
    """What about the model forbids to move positions; empty if nothing does."""
    parameters: int = 0
    """Weights of the model, about; 0 where nobody said."""
    closing: int = 0
    """Ids that close a reply: they come when the next turn begins, before it can forget."""

    def room(self, live: int, position: int) -> int:
        """How many ids fit behind `live` in sight, the next one at that position."""
        return min(self.context - live, self.trained - position) - self.closing


def tail_of(sampled: Sequence[bool]) -> int:
    """The `tail` of a turn, by which of its ids the model chose."""
    for count, chosen in enumerate(reversed(sampled)):
        if chosen:
            return count
    return 0


def reserve_tokens(context: int, max_tokens: int | None = None) -> int:
    """Tokens kept free for a reply."""
    return max_tokens or min(RESERVE_TOKENS, max(1, context // 4))


def flatten(
    tokens: Sequence[int], sampled: Sequence[bool], ops: Sequence[Op]
) -> tuple[list[int], list[bool], list[Op]]:
    """The path as the engine takes it: what the last restart left, then all behind it.

    Without a restart it is the path itself. Ops behind one count places of the shorter path.
    """
    last = max((index for index, op in enumerate(ops) if op.restart), default=-1)
    if last < 0:
        return list(tokens), list(sampled), list(ops)
    at = ops[last].at
    live = joined([*live_ranges(ops[: last + 1], at), (at, len(tokens))])

    def place(old: int) -> int:
        return sum(max(0, min(old, stop) - start) for start, stop in live)

    rest = [
        Op(place(op.at), tuple((place(a), place(b)) for a, b in op.drop), op.rebase)
        for op in ops[last + 1 :]
    ]
    return (
        [token for start, stop in live for token in tokens[start:stop]],
        [flag for start, stop in live for flag in sampled[start:stop]],
        rest,
    )
