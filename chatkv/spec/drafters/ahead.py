"""A tree that is begun before the host knows what its step gave: whose it is, and whether it fits.

Knows one tree at a time; how it grows is in `chatkv/spec/heads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from chatkv.spec.drafter import DraftContext
from chatkv.spec.heads.grown import tree_of
from chatkv.spec.proposal import GrownTree

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows


class AheadGrower(Protocol):
    """A head whose tree grows where the model runs, and can be run there before it is seen here."""

    depth: int
    """Guesses on a path at most."""

    @property
    def rows(self) -> TreeRows:
        """The tree as rows of a step."""
        ...

    def read(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of the tree that was launched last, its root first."""
        ...


class Ahead:
    """The tree that was begun last.

    Args:
        grower: Grows it; None never begins one.
    """

    def __init__(self, grower: AheadGrower | None) -> None:
        self._grower = grower
        self._size = 0 if grower is None else len(grower.rows.tokens)
        self._launched: int | None = None
        """The sequence whose next tree is being grown, its step not yet observed."""
        self._growing: int | None = None
        """The sequence whose next tree is being grown, or is there."""

    def begin(self, seq_id: int, launch: Callable[[], None]) -> None:
        """Begin the next tree of a sequence; returns at once."""
        self.replace()
        launch()
        self._launched = seq_id

    def replace(self) -> None:
        """What was begun is gone: another tree takes its place."""
        self._launched = self._growing = None

    def take(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        """The tree, if it is the one for these ids. Once."""
        growing, self._growing = self._growing, None
        grower = self._grower
        if grower is None or growing != context.seq_id or max_rows < self._size:
            return None
        root = int(context.tokens[-1])
        return GrownTree(root, grower.depth, grower.rows, lambda: tree_of(*grower.read()))

    def is_launched(self, seq_id: int) -> bool:
        """Whether a tree is begun behind the step of a sequence that runs."""
        return self._launched == seq_id

    def begun(self, seq_id: int) -> TreeRows | None:
        """Where the tree lies that grows behind the step of a sequence that runs, if one does."""
        if self._grower is None or self._launched != seq_id:
            return None
        return self._grower.rows

    def void(self, seq_id: int) -> None:
        """What was begun is for other rows."""
        if self._growing == seq_id:
            self._growing = None

    def observe(self, seq_id: int) -> bool:
        """A step is through: what was begun behind it fits the sequence now, if anything was."""
        self.void(seq_id)
        if self._launched != seq_id:
            return False
        self._launched, self._growing = None, seq_id
        return True
