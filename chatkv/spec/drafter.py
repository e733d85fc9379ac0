"""What a drafter is, and what it may look at. Knows ids and trees; no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from chatkv.models.logits import Features
from chatkv.sampling import Sampler
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may look at for one sequence."""

    seq_id: int
    tokens: Sequence[int]
    """All ids so far, user text included; read only. The last one is the root."""
    sampler: Sampler
    """Settings and noise: a drafter with a distribution ranks by score, not by logit."""


class Drafter(Protocol):
    """Guesses what comes next. It may be wrong; it can never change the text.

    One that has a true `wants_picks` is shown the tree that was run and the pick at each row. One
    that has `taps` is a `Reader`. One that has `guess_ms` takes so long for each guess of a chain.
    """

    name: str

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """A sequence is new, resumed, forked or changed: these are its ids now."""
        ...

    def propose(
        self, contexts: Sequence[DraftContext], max_rows: Sequence[int]
    ) -> Sequence[DraftTree]:
        """One tree for each context, root included in its `max_rows`."""
        ...

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """What the step gained, after every step, plain ones included."""
        ...

    def drop(self, seq_id: int) -> None:
        """The sequence is gone."""
        ...


class Reader(Drafter, Protocol):
    """A drafter that reads what layers of the target computed."""

    taps: tuple[int, ...]
    """Those layers, counted from 1."""
    tap_rows: int
    """How many of the newest rows it makes use of."""
    reads_late: bool
    """Whether rows in place are read once more in idle time (`owed`), and not for a guess."""

    def read(self, seq_id: int, start: int, features: Features) -> None:
        """Rows of the sequence from place `start` on: of its prompt, before `follow`, and then of
        each step, before `observe`."""
        ...

    def missing(self, seq_id: int) -> tuple[int, int] | None:
        """Rows [start, stop) it would like to read although they are in place; said once."""
        ...

    def catch_up(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Use the rows that were read so far, if there are many: a step follows that may ask."""
        ...

    def owed(self, seq_id: int, start: int, stop: int) -> tuple[int, int] | None:
        """A few rows of [start, stop), all in place, that it would like to read now that nobody
        waits; asked for again once they are read."""
        ...

    def pass_by(self, seq_id: int, *, soon: bool) -> None:
        """A step runs that it was not asked for. Rows that are still held then are copied.

        Args:
            soon: Whether it may be asked for one of the next steps.
        """
        ...

    def clear(self) -> None:
        """Let go of what is kept of sequences that were dropped."""
        ...


@runtime_checkable
class AheadReader(Reader, Protocol):
    """A reader that may begin the next tree of a single sequence before the host knows what the
    step that runs has given. Such a tree is safe to run as it is."""

    def ahead(self, seq_id: int) -> Callable[[], None] | None:
        """What begins it, when all launches of the step are made; None if it cannot be."""
        ...

    def grown(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        """That tree, if it was begun and fits the sequence now. Once."""
        ...

    def begun(self, seq_id: int) -> TreeRows | None:
        """Where it will lie, while the step in front of it runs."""
        ...

    def void(self, seq_id: int) -> None:
        """What was begun does not fit the sequence any more."""
        ...

    def has_read(self, seq_id: int) -> bool:
        """Whether it has the rows that the step keeps without being handed them."""
        ...
