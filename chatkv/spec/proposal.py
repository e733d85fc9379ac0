"""A tree that is still being grown where the model runs: it can be run before anyone has seen it.

Knows its size and its root; what it guesses comes to the host when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted, Pick, verify

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows


class StaleTree(Exception):
    """What was run is not a tree for this sequence: the step has to run again without it."""


class GrownTree:
    """A whole tree of a fixed number of rows, and maybe rows of others behind them.

    Two trees below one root: a step goes down both, and the longer path counts.

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
        self.runs_beside = False
        """Whether it is run all the same: its rows but the root behind those of this tree."""
        self._size = len(rows.tokens)
        self._read = read
        self._tree: DraftTree | None = None

    def __len__(self) -> int:
        """Rows that are run, the root included."""
        return self._size + (len(self.others) - 1 if self.others is not None else 0)

    @property
    def size(self) -> int:
        """Rows of the tree itself."""
        return self._size

    @property
    def others(self) -> DraftTree | None:
        """What is run beside it."""
        return self.beside if self.runs_beside else None

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


def ran(tree: Proposal) -> DraftTree:
    """All that a step ran, as one tree; rows that two trees have in common count once."""
    if isinstance(tree, GrownTree) and tree.others is not None:
        return DraftTree.merge([tree.settle(), tree.others])
    return settled(tree)


def walked(tree: Proposal, pick: Pick) -> Accepted:
    """What the model picks down a tree, or down two of them."""
    own = verify(settled(tree), pick)
    if not isinstance(tree, GrownTree) or tree.others is None:
        return own
    behind = tree.size - 1
    other = verify(tree.others, lambda row, path: pick(row + behind if row else 0, path))
    picks = (*own.picks, *other.picks[1:])
    if len(other.tokens) <= len(own.tokens):
        return replace(own, picks=picks)
    return replace(other, rows=tuple(row + behind if row else 0 for row in other.rows), picks=picks)


def settled(tree: Proposal) -> DraftTree:
    """The tree, here."""
    return tree.settle() if isinstance(tree, GrownTree) else tree
