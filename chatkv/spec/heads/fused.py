"""A tree of guesses in few launches: buffers, and the order of the kernels; and a recurrent head's.

Knows tensors of one sequence; no graph, no sequence and no `DraftTree`. `grow.grow` is the plain
version: the same nodes, but for guesses of nearly equal chance.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: basic, reportArgumentType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor

from chatkv.models.launch_options import EXACT
from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.spec.heads import grow_triton as kernels
from chatkv.spec.heads.grow import DEEPER, Growth, Vocabulary
from chatkv.spec.heads.modules import Head, RecurrentHead

HeadT = TypeVar("HeadT", bound=Head)
ROWS = 16
"""Rows of a product at least: a depth has no more nodes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is cut."""

    n: int
    k: int = 0
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Launches:
    """Read off an H200 for the default model's heads; any other gives the same tree."""

    fuse: Launch = Launch(4)
    gate: Launch = Launch(8, 64, warps=2)
    down: Launch = Launch(16, 64)
    score: Launch = Launch(64, 64)
    choose: Launch = Launch(0, warps=4)
    fuse_rows: Launch = Launch(16, warps=8, stages=1)
    heads: Launch = Launch(8, warps=8, stages=1)
    attend: Launch = Launch(512, warps=8, stages=1)
    add: Launch = Launch(8, warps=8, stages=1)
    feed: Launch = Launch(16, warps=8, stages=1)


class TreeGrower(ABC, Generic[HeadT]):
    """Grows trees of one shape from one head, whatever its states are made of.

    Args:
        head: On the device.
        vocabulary: Of its target.
        growth: At most `ROWS` wide.
    """

    def __init__(
        self,
        head: HeadT,
        vocabulary: Vocabulary,
        growth: Growth,
        *,
        launches: Launches | None = None,
    ) -> None:
        shape, device = head.shape, vocabulary.draft_rows.device
        self.head = head
        self.vocabulary, self.growth = vocabulary, growth
        self.launches = launches or Launches()
        width = max(growth.width, 1)
        count = len(vocabulary.draft_ids)
        assert width <= ROWS, f"{width} nodes of a depth, {ROWS} rows"
        assert growth.children <= min(count, self.launches.score.n)
        self._ids = vocabulary.draft_ids.int()
        self.blocks = triton.next_power_of_2(triton.cdiv(count, self.launches.score.n))
        self.nodes = triton.next_power_of_2(width)
        nodes = growth.children * (1 + (growth.depth - 1) * width)
        self.all = triton.next_power_of_2(1 + nodes)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
        # Line d is what the nodes of depth d are made from; line 0 is that of the root, all zeros.
        lines = (growth.depth + 1, ROWS)
        self._states = torch.zeros(*lines, shape.hidden, **floats)
        self._paths = torch.zeros(lines, **floats)
        self._places = torch.zeros(lines, **ints)
        self._parents = torch.zeros(lines, **ints)
        self._tokens = torch.zeros(lines, **ints)
        self._act = torch.zeros(ROWS, shape.inner, dtype=vocabulary.draft_rows.dtype, device=device)
        self._scores = torch.zeros(self.nodes, count, **floats)
        best = (self.nodes, self.blocks, growth.children)
        self._keys = torch.full(best, -(1 << 63), **longs)
        self._parts = torch.zeros(self.nodes, 2, self.blocks, **floats)
        # Blocks that are padding have nothing to give.
        self._parts[:, 0] = -torch.inf
        self._node_tokens = torch.zeros(self.all, **ints)
        self._node_logs = torch.zeros(self.all, **floats)
        self._node_above = torch.zeros(self.all, **ints)
        self._row_of = torch.zeros(self.all, **ints)

    @abstractmethod
    def _advance(self, start: Carried, depth: int, nodes: int) -> None:
        """Fill line `depth + 1` of the states."""

    def _grow(self, start: Carried, out: Tensor, rows: TreeRows) -> None:
        """Every depth. Nothing is read back.

        Args:
            out: [3, R] int32: tokens, parents, and the bits of the float32 chances.
            rows: Filled as well.
        """
        first = 1
        for depth in range(self.growth.depth):
            nodes = self._nodes_of(depth)
            self._advance(start, depth, nodes)
            self._score(start, depth, nodes)
            self._choose(start, depth, nodes, first, out, rows)
            first += nodes * self.growth.children

    def _nodes_of(self, depth: int) -> int:
        return (
            min(self.growth.width, self.growth.children)
            if depth == 1
            else (self.growth.width if depth else 1)
        )

    def _down(self, states: Tensor, parents: Tensor, down: Tensor, depth: int, nodes: int) -> None:
        cut, shape = self.launches.down, self.head.shape
        kernels.down_nodes[(triton.cdiv(shape.hidden, cut.n),)](
            states, parents, self._act, down, self._states[depth + 1], nodes, shape.hidden,
            shape.inner, BLOCK_N=cut.n, BLOCK_K=turn(shape.inner, cut.k),
            **self._options(cut),
        )  # fmt: skip

    def _score(self, start: Carried, depth: int, nodes: int) -> None:
        cut, hidden, count = self.launches.score, self.head.shape.hidden, len(self._ids)
        kernels.score_ids[(triton.cdiv(count, cut.n),)](
            self._states[depth + 1], self.head.gamma, self.vocabulary.draft_rows, self._ids,
            start.seed, start.position, start.inverse_t, self._scores, self._keys, self._parts,
            nodes, hidden, count, depth, self.head.shape.eps, NODES=self.nodes if depth else 1,
            CHILDREN=self.growth.children, BLOCKS=self.blocks, BLOCK_N=cut.n,
            BLOCK_K=turn(hidden, cut.k), **self._options(cut),
        )  # fmt: skip

    def _choose(
        self, start: Carried, depth: int, nodes: int, first: int, out: Tensor, rows: TreeRows
    ) -> None:
        growth, last = self.growth, depth + 1 == self.growth.depth
        kernels.choose_nodes[(1,)](
            self._keys, self._parts, self._ids, self._paths[depth], self._places[depth],
            self._paths[depth + 1], self._places[depth + 1], self._parents[depth + 1],
            self._tokens[depth + 1], self._node_tokens, self._node_logs, self._node_above,
            self._row_of, start.root, start.position, out, rows.tokens, rows.positions,
            rows.ancestors, nodes, first, 0 if last else self._nodes_of(depth + 1), DEEPER,
            NODES=self.nodes if depth else 1, CHILDREN=growth.children, BLOCKS=self.blocks,
            WIDTH=growth.width, ALL=self.all, TREE=growth.rows, DEPTHS=growth.depth, LAST=last,
            **self._options(self.launches.choose),
        )  # fmt: skip

    def _options(self, cut: Launch) -> dict[str, Any]:
        return {"num_warps": cut.warps, "num_stages": cut.stages, **EXACT}


class FusedGrower(TreeGrower[RecurrentHead]):
    """A recurrent head's trees, four kernels a depth."""

    def grow(self, start: Carried, out: Tensor, rows: TreeRows) -> None:
        """Launch everything; see `_grow`."""
        head, hidden = self.head, self.head.shape.hidden
        cut = self.launches.fuse
        kernels.fuse_taps[(triton.cdiv(hidden, cut.n),)](
            start.taps, head.fuse, self._states, hidden, TAPS=len(head.shape.taps),
            WIDE=triton.next_power_of_2(hidden), BLOCK_N=cut.n, **self._options(cut),
        )  # fmt: skip
        self._grow(start, out, rows)

    def _advance(self, start: Carried, depth: int, nodes: int) -> None:
        head, shape, cut = self.head, self.head.shape, self.launches.gate
        tokens = self._tokens[depth] if depth else start.root
        parents, states = self._parents[depth], self._states[depth]
        kernels.gate_nodes[(triton.cdiv(shape.inner, cut.n),)](
            states, parents, tokens, self.vocabulary.embedding, head.gate, head.up, self._act,
            nodes, shape.hidden, shape.inner, BLOCK_N=cut.n, BLOCK_K=turn(shape.hidden, cut.k),
            **self._options(cut),
        )  # fmt: skip
        self._down(states, parents, head.down, depth, nodes)


def wide(inputs: int, cut: Launch) -> int:
    """Inputs of a part, one part a warp."""
    return min(256, max(16, triton.next_power_of_2(triton.cdiv(inputs, cut.warps))))


def turn(inputs: int, most: int) -> int:
    """The longest turn up to `most` that divides the inner dimension."""
    return next(k for k in (256, 128, 64, 32, 16) if k <= most and inputs % k == 0)
