"""The tree of guesses. Knows rows, parents and chances; no drafter, no model, no sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
MaskArray: TypeAlias = npt.NDArray[np.int64]

MAX_ROWS = 63
"""Rows of one tree, root included: an int64 ancestor word stays non-negative."""

MAX_DEPTH = 15
"""Guesses on one path: a backend takes paths of sixteen rows, root included."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Guesses below the last chosen token. Row 0 is that token; parents come before children.

    The constructor is the one place that checks a tree; what it lets through is safe to run.

    Args:
        tokens: [R] int32, 1 <= R <= 63, none negative. Children of one row differ in token.
        parents: [R] int32, `parents[i] < i`; row 0 is its own parent.
        chance: [R] float32, chance that the whole path down to the row is right: 1 for row 0,
            never above that of the parent.
        bins: [R, len(sources)] uint8, score bin 1..8 by drafter; 0 = not proposed by it.
        sources: Names of the drafters, one for each column of `bins`.

    Raises:
        ValueError: The arrays are not such a tree.
    """

    tokens: IntArray
    parents: IntArray
    chance: FloatArray
    bins: ByteArray
    sources: tuple[str, ...] = ()
    _children: dict[tuple[int, int], int] = field(init=False, repr=False)
    _depths: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"a tree has 1 to {MAX_ROWS} rows, not {rows}")
        if not self.tokens.shape == self.parents.shape == self.chance.shape == (rows,):
            raise ValueError("tokens, parents and chance differ in shape")
        if self.tokens.dtype != np.int32 or self.parents.dtype != np.int32:
            raise ValueError("tokens and parents must be int32")
        if self.chance.dtype != np.float32 or self.bins.dtype != np.uint8:
            raise ValueError("chance must be float32, bins uint8")
        if set(map(type, self.sources)) - {str}:  # they are sorted and counted
            raise ValueError(f"sources are names, not {self.sources!r:.100}")
        if self.bins.shape != (rows, len(self.sources)):
            raise ValueError(f"bins is {self.bins.shape}, not {(rows, len(self.sources))}")
        tokens: list[int] = self.tokens.tolist()
        parents: list[int] = self.parents.tolist()
        chance: list[float] = self.chance.tolist()
        if parents[0] != 0 or chance[0] != 1.0 or tokens[0] < 0:
            raise ValueError("row 0 must be its own parent, with chance 1 and a real token")
        children: dict[tuple[int, int], int] = {}
        depths = [0]
        for row in range(1, rows):
            token, parent = tokens[row], parents[row]
            if not 0 <= parent < row:
                raise ValueError(f"row {row} has parent {parent}; parents come first")
            if token < 0 or (parent, token) in children:
                raise ValueError(f"row {row}: token {token} is negative or guessed twice")
            if not 0.0 <= chance[row] <= chance[parent]:
                raise ValueError(f"row {row}: chance {chance[row]} is above that of its parent")
            if depths[parent] == MAX_DEPTH:
                raise ValueError(f"row {row} is deeper than {MAX_DEPTH}")
            depths.append(depths[parent] + 1)
            children[parent, token] = row
        object.__setattr__(self, "_children", children)
        object.__setattr__(self, "_depths", tuple(depths))
        for array in (self.tokens, self.parents, self.chance, self.bins):
            array.setflags(write=False)

    @staticmethod
    def of(
        tokens: Sequence[int],
        parents: Sequence[int],
        chance: Sequence[float] | None = None,
        bins: Sequence[int] | None = None,
        source: str = "",
    ) -> DraftTree:
        """A tree of one drafter from plain sequences.

        `chance` defaults to one half a depth, `bins` (one number a row) to 1.
        """
        if chance is None:
            chance = [1.0]
            for parent in parents[1:]:
                chance.append(chance[parent] / 2)
        if bins is None:
            bins = [0] + [1] * (len(tokens) - 1)
        return DraftTree(
            tokens=np.array(tokens, dtype=np.int32),
            parents=np.array(parents, dtype=np.int32),
            chance=np.array(chance, dtype=np.float32),
            bins=np.array(bins, dtype=np.uint8).reshape(-1, 1),
            sources=(source,),
        )

    @staticmethod
    @lru_cache(maxsize=4096)
    def root(token: int) -> DraftTree:
        """No guesses: a plain step."""
        return DraftTree(
            tokens=np.array([token], dtype=np.int32),
            parents=np.zeros(1, dtype=np.int32),
            chance=np.ones(1, dtype=np.float32),
            bins=np.zeros((1, 0), dtype=np.uint8),
        )

    def __len__(self) -> int:
        """Rows, the root included."""
        return len(self._depths)

    def __eq__(self, other: object) -> bool:
        """Same rows in the same order, with the same chances and origins."""
        if not isinstance(other, DraftTree):
            return NotImplemented
        return (
            self.sources == other.sources
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.parents, other.parents)
            and np.array_equal(self.chance, other.chance)
            and np.array_equal(self.bins, other.bins)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def depths(self) -> tuple[int, ...]:
        """Guesses above and including each row: 0 for the root."""
        return self._depths

    def child(self, row: int, token: int) -> int | None:
        """The row that guesses `token` right after `row`, if there is one."""
        return self._children.get((row, token))

    def children(self, row: int) -> list[int]:
        """The rows right below `row`, ascending."""
        return [below for (above, _), below in self._children.items() if above == row]

    def path(self, row: int) -> tuple[int, ...]:
        """The guessed tokens from below the root down to `row`; empty for the root."""
        tokens: list[int] = []
        while row:
            tokens.append(int(self.tokens[row]))
            row = int(self.parents[row])
        return tuple(reversed(tokens))

    def ancestors(self, shift: int = 0) -> MaskArray:
        """[R] int64 as AttentionCall takes them: bit j is set when the row may see row j.

        Args:
            shift: Rows of another tree between the root and the others, [shift + R] then: nobody
                of this one sees them, and theirs are left at 0.
        """
        masks = [1]
        parents: list[int] = self.parents.tolist()
        for row, parent in enumerate(parents[1:], start=1):
            masks.append(masks[parent] | 1 << row + shift)
        return np.array([masks[0], *[0] * shift, *masks[1:]], dtype=np.int64)

    def with_chance(self, chance: Sequence[float]) -> DraftTree:
        """The same rows with other chances."""
        values = np.array(chance, dtype=np.float32)
        return DraftTree(self.tokens, self.parents, values, self.bins, self.sources)

    def best(self, max_rows: int, chance: Sequence[float] | None = None) -> DraftTree:
        """The rooted subtree of at most `max_rows` rows with the largest sum of chances.

        A chance never rises along a path and parents come first, so the most probable rows, the
        earlier row first among equals, are such a subtree.

        Args:
            chance: [R] of the rows, if somebody knows better than the tree itself.
        """
        if max_rows >= len(self):
            return self
        known: Sequence[float] = self.chance.tolist() if chance is None else chance
        return self.subset(sorted(_likeliest(range(len(self)), known, max(max_rows, 1))))

    def chain(self, max_rows: int) -> DraftTree:
        """The most probable child again and again: one path of at most `max_rows` rows."""
        rows = [0]
        while len(rows) < max_rows:
            below = self.children(rows[-1])
            if not below:
                break
            rows.append(max(below, key=lambda row: (float(self.chance[row]), -row)))
        return self.subset(rows)

    def subset(self, rows: Sequence[int]) -> DraftTree:
        """These rows only. `rows` ascends, starts with 0 and holds the parent of each of them."""
        if len(rows) == 1:
            return DraftTree.root(int(self.tokens[0]))
        new = {row: index for index, row in enumerate(rows)}
        parents = self.parents.tolist()
        index = np.array(rows, dtype=np.intp)
        return DraftTree(
            tokens=self.tokens[index],
            parents=np.array([new[parents[row]] for row in rows], dtype=np.int32),
            chance=self.chance[index],
            bins=self.bins[index],
            sources=self.sources,
        )

    @staticmethod
    def merge(trees: Iterable[DraftTree], max_rows: int = MAX_ROWS) -> DraftTree:
        """The union at the root: one row for each path, the largest chance, the bins of all.

        Rows are ordered by depth, then path, so the result does not depend on the order of the
        trees. Of more than `max_rows` rows the most probable stay.
        """
        several = list(trees)
        root = int(several[0].tokens[0])
        if any(int(tree.tokens[0]) != root for tree in several):
            raise ValueError("only trees with the same root can be merged")
        sources = tuple(sorted({name for tree in several for name in tree.sources}))
        none = [0] * len(sources)
        known: list[dict[int, int]] = [{}]  # token -> node, by the node above
        above, tokens, chances, bins = [0], [root], [1.0], [none]
        for tree in several:
            columns = [sources.index(name) for name in tree.sources]
            nodes: list[int] = [0]
            rows = zip(
                tree.tokens.tolist(), tree.parents.tolist(), tree.chance.tolist(),
                tree.bins.tolist(), strict=True,
            )  # fmt: skip
            next(rows)
            for token, parent, chance, scores in rows:
                parent: int = nodes[parent]
                node = known[parent].get(token)
                if node is None:
                    node = known[parent][token] = len(tokens)
                    known.append({})
                    above.append(parent)
                    tokens.append(token)
                    chances.append(chance)
                    bins.append(none.copy())
                elif chance > chances[node]:
                    chances[node] = chance
                nodes.append(node)
                cells = bins[node]
                for column, score in zip(columns, scores, strict=True):
                    if score > cells[column]:
                        cells[column] = score
        order, level = [0], [0]
        while level:  # by depth, then path
            level = [known[node][token] for node in level for token in sorted(known[node])]
            order += level
        if len(order) > max_rows:
            kept = set(_likeliest(order, chances, max_rows))
            order = [node for node in order if node in kept]
        places = {node: row for row, node in enumerate(order)}
        return DraftTree(
            tokens=np.array([tokens[node] for node in order], dtype=np.int32),
            parents=np.array([places[above[node]] for node in order], dtype=np.int32),
            chance=np.array([chances[node] for node in order], dtype=np.float32),
            bins=np.array([bins[node] for node in order], dtype=np.uint8).reshape(len(order), -1),
            sources=sources,
        )


def _likeliest(rows: Sequence[int], chance: Sequence[float], count: int) -> list[int]:
    """The most probable of these rows, the earlier ones first among equals."""
    return sorted(rows, key=lambda row: -chance[row])[:count]


def sanitize(proposal: object, *, root: int, vocab_size: int, max_rows: int) -> DraftTree:
    """What a drafter returned, made safe to run: tokens of the vocabulary, at most `max_rows`.

    The rest of the checks is the constructor of `DraftTree`, which nobody can go around. Tokens
    outside the vocabulary go with all below them: a draft model may know padding ids.

    Raises:
        ValueError: It is no tree, or one for another root.
    """
    if not isinstance(proposal, DraftTree):
        raise ValueError(f"returned {type(proposal).__name__} instead of a DraftTree")
    if int(proposal.tokens[0]) != root:
        raise ValueError(f"guessed below token {int(proposal.tokens[0])}, not {root}")
    if len(proposal) == 1:
        return proposal
    if int(proposal.tokens.max()) >= vocab_size:
        kept = [0]
        for row in range(1, len(proposal)):
            if int(proposal.parents[row]) in kept and int(proposal.tokens[row]) < vocab_size:
                kept.append(row)
        proposal = proposal.subset(kept)
    return proposal.best(max_rows)
