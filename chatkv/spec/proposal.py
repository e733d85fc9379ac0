"""A tree that is still being grown where the model runs: it can be run before anyone has seen it.

Knows its size and its root; what it guesses comes to the host when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from chatkv.spec.tree import DraftTree

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows


class StaleTree(Exception):
    """What was run is not a tree for this sequence: the step has to run again without it."""


class GrownTree:
    """A whole tree of a fixed number of rows.

    Args:
        root: Token of row 0.
        depth: Guesses on a path at most.
        rows: All of it, as rows of a step where the model runs.
        read: Waits for the tree and gives it.
    """

    def __init__(
        self, root: int, depth: int, rows: TreeRows, read: Callable[[], DraftTree]
    ) -> None:
        self.root, self.depth, self.rows = root, depth, rows
        self.beside: DraftTree | None = None
        """What others guessed and was not joined with it."""
        self._size = len(rows.tokens)
        self._read = read
        self._tree: DraftTree | None = None

    def __len__(self) -> int:
        """Rows, the root included."""
        return self._size

    def settle(self) -> DraftTree:
        """The tree itself. Good until the next one is grown, and from the first call on.

        Raises:
            StaleTree: It is no tree, or one below another token.
        """
        if self._tree is None:
            try:
                tree = self._read()
            except Exception as error:  # whatever it is, nothing may be kept of a step that ran it
                raise StaleTree(str(error)) from error
            if int(tree.tokens[0]) != self.root:
                raise StaleTree(f"grown below {tree.tokens[0]}, not {self.root}")
            self._tree = tree
        return self._tree


Proposal: TypeAlias = DraftTree | GrownTree


def settled(tree: Proposal) -> DraftTree:
    """The tree, here."""
    return tree.settle() if isinstance(tree, GrownTree) else tree
