"""Guesses of an eagle head, which reads every row and keeps keys and values of its own.

Knows rows, ids and which rows are stored; how a head computes is in `chatkv/spec/heads`. Invariant:
a memory holds rows of the sequence's chosen ids, each with the id behind it, and no guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from chatkv.models.logits import Features
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.ahead import Ahead, AheadGrower
from chatkv.spec.heads.grown import tree_of
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows

AT_ONCE = 8
"""Rows that are stored as part of a guess."""
REMEMBERED = 8
"""Sequences that ended and are still known: a chat's next turn goes on from one of them."""
IN_IDLE_TIME = 8
"""Rows that are read at once while nobody waits: a request that comes then waits for them."""


class LaunchedEagle(AheadGrower, Protocol):
    """One that can begin from what the walk behind a step leaves."""

    def launch(self, memory: Any, rows: tuple[int, int]) -> None:
        """Keep the rows that the walk keeps, behind the rows [first, stop) that are stored, and
        grow; returns at once."""
        ...


class EagleGrower(Protocol):
    """How an eagle head runs on one kind of device."""

    window: int
    """Rows it looks back on."""
    reads_again: bool
    """Whether rows in place that it was never shown are computed once more for it."""

    def new_memory(self) -> Any:
        """Room for the keys and values of one sequence. It has a `copy`."""
        ...

    def store(self, memory: Any, start: int, features: Features, tokens: Sequence[int]) -> None:
        """Keep rows from place `start` on; `tokens` are the ids behind each of them."""
        ...

    def grow(
        self,
        memory: Any,
        rows: tuple[int, int],
        root: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of a tree below the root that the last stored row chose."""
        ...


@dataclass(slots=True)
class Held:
    """What is known of one sequence."""

    memory: Any
    first: int = 0
    stop: int = 0
    """Rows [first, stop) are stored, or were until newer ones took their place."""
    ids: Sequence[int] = ()
    """All ids of the sequence, read only; it may still grow."""
    waiting: list[tuple[int, Features]] = field(default_factory=list[tuple[int, Features]])
    """Rows that were read and are not stored yet, by their first place."""
    followed: int = 0
    """The place from which on rows are those of steps."""
    asked: bool = False
    """Whether rows that are missing have been asked for."""

    @property
    def end(self) -> int:
        """The place behind the newest row, stored or waiting."""
        if not self.waiting:
            return self.stop
        start, features = self.waiting[-1]
        return start + len(features)

    def reaches(self, place: int) -> bool:
        """Whether what is stored goes on with that place."""
        return self.first <= place <= self.stop

    def begin(self, last: int) -> int:
        """The first of the parts that wait and follow on each other up to the one at `last`."""
        while last:
            start, features = self.waiting[last - 1]
            if start + len(features) < self.waiting[last][0]:
                break
            last -= 1
        return last


class EagleDrafter:
    """A tree from an eagle head.

    Rows are stored when a guess is asked for, so plain decoding pays nothing for them.

    Args:
        grower: The head, on the target's device.
        taps: The layers it reads.
        ahead: The same head, if it can begin before the host knows what a step gave.
    """

    name = "heads"

    def __init__(
        self, grower: EagleGrower, taps: tuple[int, ...], ahead: LaunchedEagle | None = None
    ) -> None:
        self.grower = grower
        self._launcher, self._ahead = ahead, Ahead(ahead)
        self.taps = taps
        self.tap_rows = grower.window
        self.reads_late = not grower.reads_again
        self.held: dict[int, Held] = {}
        self.left: list[Held] = []
        """Sequences that ended, the newest last."""

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Go on from what is known of a sequence that begins with the same ids."""
        self.void(seq_id)
        own = self._held(seq_id)
        if own.stop:
            own.waiting.clear()  # it was followed before, and has changed
        found, known = own, _usable(own, tokens)
        for other in reversed(self.left):  # of those that reach equally far the newest
            if (usable := _usable(other, tokens)) > known:
                found, known = other, usable
        if found is not own:
            own.memory, own.first = found.memory.copy(), found.first
            new = own.waiting[0][0] if own.waiting else known
            own.waiting[:0] = [
                (start, features)
                for start, features in found.waiting
                if start < new and start + len(features) <= known
            ]
        known = min(known, found.stop)
        own.stop = known if known > own.first else 0
        own.first = own.first if own.stop else 0
        own.ids, own.asked, own.followed = tokens, False, len(tokens) - 1

    def read(self, seq_id: int, start: int, features: Features) -> None:
        """Keep rows until a guess is asked for."""
        waiting = self._held(seq_id).waiting
        place = len(waiting)
        while place and waiting[place - 1][0] > start:
            place -= 1
        waiting.insert(place, (start, features))
        oldest = self._window(waiting)
        while waiting[0][0] + len(waiting[0][1]) <= oldest:
            del waiting[0]

    def missing(self, seq_id: int) -> tuple[int, int] | None:
        """Rows of the window between what is known from before and what was read."""
        held = self.held.get(seq_id)
        if held is None or held.asked or not held.waiting:
            return None
        held.asked = True
        start, waiting = self._window(held.waiting), held.waiting
        place = held.begin(len(waiting) - 1)
        stop = waiting[place][0]
        if place:
            left = held.begin(place - 1)
            begun, ended = waiting[left][0], waiting[place - 1][0] + len(waiting[place - 1][1])
            begun = held.first if left == 0 and held.reaches(begun) else begun
        else:
            begun, ended = held.first, held.stop
        if begun <= start <= ended and (ended == stop or self.grower.reads_again):
            start = ended
        else:
            del waiting[:place]  # what lies before a gap is of no use
        return (start, stop) if start < stop and self.grower.reads_again else None

    def catch_up(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Store the rows of a prompt, or of many plain steps."""
        held = self.held.get(seq_id)
        if held is not None and held.waiting:
            start, newest = held.waiting[-1]
            if start + len(newest) - held.waiting[0][0] > AT_ONCE:
                self._store(held, tokens)

    def owed(self, seq_id: int, start: int, stop: int) -> tuple[int, int] | None:
        """Rows of the window that ends at `stop`, the newest first: what there was time for is of
        use. Those that were read since the last call are stored.

        So the features a memory ends with may be those of an older row. Nothing is guessed from
        them: the last row of a prompt is always computed, and stored, before its first guess.
        """
        held = self._held(seq_id)
        older = [part for part in held.waiting if part[0] < held.first]
        del held.waiting[: len(older)]
        for place, features in older:
            end = place + len(features)
            self.grower.store(held.memory, place, features, held.ids[place + 1 : end + 1])
        if older:
            held.first = older[0][0]
        self._store(held, held.ids)
        if held.stop < stop:
            held.first = held.stop = stop
        start = max(start, held.stop - self.grower.window)
        return (max(start, held.first - IN_IDLE_TIME), held.first) if start < held.first else None

    def pass_by(self, seq_id: int, *, soon: bool) -> None:
        """Where rows can be had again, those of plain steps are not copied one by one: they are
        computed together when a guess is wanted."""
        held = self.held.get(seq_id)
        if soon or held is None or not held.waiting or not self.grower.reads_again:
            return
        if held.waiting[-1][0] >= held.followed:
            del held.waiting[-1]
            held.asked = False

    def clear(self) -> None:
        """Forget the sequences that ended."""
        self.left.clear()

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def ahead(self, seq_id: int) -> Callable[[], None] | None:
        """Has the rows that the running step keeps stored, and the next tree grown behind them."""
        launcher, held = self._launcher, self.held.get(seq_id)
        if launcher is None or held is None or held.end != len(held.ids) - 1:
            return None

        def launch() -> None:
            self._store(held, held.ids)
            launcher.launch(held.memory, (held.first, held.stop))

        return lambda: self._ahead.begin(seq_id, launch)

    def grown(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        """The tree that was begun ahead, if it is the one for these ids."""
        return self._ahead.take(context, max_rows)

    def begun(self, seq_id: int) -> TreeRows | None:
        """Where the tree that was begun behind the running step will lie."""
        return self._ahead.begun(seq_id)

    def void(self, seq_id: int) -> None:
        """What was begun is for other rows."""
        self._ahead.void(seq_id)

    def has_read(self, seq_id: int) -> bool:
        """Whether the rows of the step are stored behind it, where they are."""
        return self._ahead.is_launched(seq_id)

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """A step is through. What it was read from is stored already if a tree was begun behind
        it: the device may have kept more rows than the stop machine, and those are nobody's."""
        if self._ahead.observe(seq_id):
            held = self.held[seq_id]
            held.stop += len(accepted.rows)
            held.first = max(held.first, held.stop - self.grower.window)

    def drop(self, seq_id: int) -> None:
        """Remember the sequence for a while."""
        self.void(seq_id)
        held = self.held.pop(seq_id, None)
        if held is not None and held.end > held.first:
            rest = [other for other in self.left if not _covers(held, other)]
            self.left = [*rest, held][-REMEMBERED:]

    def _window(self, waiting: Sequence[tuple[int, Features]]) -> int:
        """First row of the window that ends with the newest row read."""
        start, newest = waiting[-1]
        return max(0, start + len(newest) - self.grower.window)

    def _held(self, seq_id: int) -> Held:
        if seq_id not in self.held:
            self.held[seq_id] = Held(self.grower.new_memory())
        return self.held[seq_id]

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        tokens, root = context.tokens, int(context.tokens[-1])
        held = self.held.get(context.seq_id)
        if held is None or max_rows < 2:
            return DraftTree.root(root)
        self._store(held, tokens)
        if not held.stop or held.stop != len(tokens) - 1:
            return DraftTree.root(root)
        params = context.sampler.params
        self._ahead.replace()
        grown = self.grower.grow(
            held.memory,
            (held.first, held.stop),
            root,
            temperature=params.temperature,
            seed=params.seed,
            max_rows=max_rows,
        )
        return tree_of(*grown).best(max_rows)

    def _store(self, held: Held, tokens: Sequence[int]) -> None:
        """Store the rows that wait."""
        for start, features in held.waiting:
            if not held.reaches(start):
                held.first = start  # what lies before a gap is of no use
            stop = start + len(features)
            self.grower.store(held.memory, start, features, tokens[start + 1 : stop + 1])
            held.stop = stop
            held.first = max(held.first, stop - self.grower.window)
        held.waiting.clear()


def _usable(held: Held, tokens: Sequence[int]) -> int:
    """Up to which place rows of `held` are rows of `tokens`: each needs the id behind it."""
    same, stop = 0, min(held.end + 1, len(held.ids), len(tokens)) if held.end else 0
    while same < stop:  # halves: to compare lists is far quicker than a look at each id
        middle = (same + stop + 1) // 2
        if list(held.ids[same:middle]) == list(tokens[same:middle]):
            same = middle
        else:
            stop = middle - 1
    return max(0, same - 1)


def _covers(held: Held, other: Held) -> bool:
    """Whether all rows of `other` are stored with `held`."""
    if held.waiting or held.first > other.first:
        return False
    return _usable(held, other.ids) >= other.end
