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

from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.spec.heads import grow_triton as kernels
from chatkv.spec.heads.grow import DEEPER, Growth, Vocabulary
from chatkv.spec.heads.modules import Head, RecurrentHead

HeadT = TypeVar("HeadT", bound=Head)
ROWS = 16
"""A depth has no more nodes."""
LONGEST = 2048
"""Inputs that a product takes with no loop."""
REGISTERS = 128
"""Of a thread at most."""
MOST_BLOCKS = 128
"""Of draft ids, if they are of the usual size."""
NOISE = 64
"""Draft ids whose noise a warp draws."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is cut."""

    n: int
    """Draft ids of a program; or parts of a window."""
    k: int = 0
    """Inputs of a turn, if there are turns."""
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Launches:
    """Read off an H200 for the default model's heads; any other gives the same tree."""

    pairs: int = 2
    """Rows of gate and of up that a program of an eagle head's feed-forward part takes."""
    lines: int = 4
    """Rows that are stored at once, each by a warp."""
    score: Launch = Launch(64, 64)
    attend: Launch = Launch(8, warps=2)


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
        self.shape, self._gamma = shape, head.gamma
        self.vocabulary, self.growth = vocabulary, growth
        self.launches = launches or Launches()
        width = max(growth.width, 1)
        count = len(vocabulary.draft_ids)
        assert width <= ROWS, f"{width} nodes of a depth, {ROWS} rows"
        # The blocks' best ids are looked through by one program: not too many of them.
        self.block = self.launches.score.n * (
            1 if count <= MOST_BLOCKS * self.launches.score.n else 2
        )
        assert growth.children <= min(count, self.block)
        self._ids = vocabulary.draft_ids.int()
        self.blocks = triton.next_power_of_2(triton.cdiv(count, self.block))
        self.nodes = triton.next_power_of_2(width)
        nodes = growth.children * (1 + (growth.depth - 1) * width)
        self.all = triton.next_power_of_2(1 + nodes)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        # Line d is what the nodes of depth d are made from; line 0 is that of the root, all zeros.
        lines = (growth.depth + 1, ROWS)
        self._states = torch.zeros(*lines, shape.hidden, **floats)
        self._paths = torch.zeros(lines, **floats)
        self._numbers = torch.zeros(lines, **ints)
        self._parents = torch.zeros(lines, **ints)
        self._tokens = torch.zeros(lines, **ints)
        self._places = torch.zeros(lines, **ints)
        self._act = torch.zeros(ROWS, shape.inner, **floats)
        self._guess = vocabulary.draft_rows.new_zeros(ROWS, shape.hidden)
        self._noise = torch.zeros(growth.depth, count, **floats)
        self._scores = torch.zeros(self.nodes, count, **floats)
        # Blocks that are padding have nothing to give.
        best = (self.nodes, self.blocks, growth.children)
        self._best = torch.full(best, -torch.inf, **floats)
        self._found = torch.zeros(best, **ints)
        self._parts = torch.zeros(self.nodes, 2, self.blocks, **floats)
        self._parts[:, 0] = -torch.inf
        self._node_places = torch.zeros(self.all, **ints)
        self._node_logs = torch.zeros(self.all, **floats)
        self._node_above = torch.zeros(self.all, **ints)

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

    def _add(
        self, states: Tensor, parents: Tensor, x: Tensor, weight: Tensor, out: Tensor, nodes: int,
        *, norm: Tensor | None = None, guesses: bool = False,
    ) -> None:  # fmt: skip
        hidden, inputs = weight.shape
        kernels.add_nodes[(hidden // 2,)](
            states, parents, x, weight, states if norm is None else norm, self._gamma, out,
            self._guess, nodes, self.shape.eps, HIDDEN=hidden, NORMED=norm is not None,
            GUESSES=guesses, STATE_CHUNK=turns(hidden)["CHUNK"], INPUTS=inputs,
            **self._product(nodes, inputs),
        )  # fmt: skip

    def _score(self, start: Carried, depth: int, nodes: int) -> None:
        cut, hidden, count = self.launches.score, self.shape.hidden, len(self._ids)
        kernels.score_ids[(triton.cdiv(count, self.block),)](
            self._states[depth + 1], self._guess, self.vocabulary.draft_rows, self._noise,
            start.inverse_t, self._scores, self._best, self._found, self._parts, nodes, count,
            depth, hidden, self.shape.eps, HIDDEN=hidden, NODES=self.nodes,
            NODES_PAD=max(8, self.nodes), CHILDREN=self.growth.children, BLOCKS=self.blocks,
            BLOCK_N=self.block, BLOCK_K=turn(hidden, cut.k), CHUNK=turns(hidden)["CHUNK"],
            **self._options(max(self.nodes, cut.warps), num_stages=cut.stages),
        )  # fmt: skip

    def _choose(
        self, start: Carried, depth: int, nodes: int, first: int, out: Tensor, rows: TreeRows
    ) -> None:
        growth, last = self.growth, depth + 1 == self.growth.depth
        kernels.choose_nodes[(1,)](
            self._best, self._found, self._parts, self._ids, self._paths[depth],
            self._numbers[depth], self._paths[depth + 1], self._numbers[depth + 1],
            self._parents[depth + 1], self._tokens[depth + 1], self._places[depth + 1],
            self._node_places, self._node_logs, self._node_above, start.root, start.position, out,
            rows.tokens, rows.positions, rows.ancestors, nodes, first,
            0 if last else self._nodes_of(depth + 1), DEEPER,
            NODES=self.nodes, CHILDREN=growth.children, BLOCKS=self.blocks,
            WIDTH=growth.width, ALL=self.all, TREE=growth.rows, DEPTHS=growth.depth, LAST=last,
            **self._options(self.nodes),
        )  # fmt: skip

    def _noise_cut(self, warps: int) -> dict[str, int]:
        """Programs that draw the noise of a depth, and their size."""
        size = NOISE * warps
        return {"BLOCK": size, "BLOCKS": triton.cdiv(len(self._ids), size)}

    def _product(self, nodes: int, inputs: int) -> dict[str, Any]:
        """Of a kernel in which each node has a warp."""
        nodes = triton.next_power_of_2(nodes)
        return {"NODES": nodes, **turns(inputs), **self._options(nodes)}

    def _options(self, warps: int, **more: int) -> dict[str, Any]:
        # Told nothing, the compiler saves registers and waits for every few of a warp's loads.
        return {"num_warps": warps, "maxnreg": REGISTERS, **more}


class FusedGrower(TreeGrower[RecurrentHead]):
    """A recurrent head's trees, four kernels a depth."""

    def __init__(
        self, head: RecurrentHead, vocabulary: Vocabulary, growth: Growth, **options: Any
    ) -> None:
        super().__init__(head, vocabulary, growth, **options)
        self._head = head

    def grow(self, start: Carried, out: Tensor, rows: TreeRows) -> None:
        """Launch everything; see `_grow`."""
        hidden, noise = self.shape.hidden, self._noise_cut(1)
        kernels.fuse_taps[(hidden // 2 + self.growth.depth * noise["BLOCKS"],)](
            start.taps, self._head.fuse, self._states, start.seed, start.position, self._ids,
            self._noise, len(self._ids), HIDDEN=hidden, TAPS=len(self.shape.taps),
            **turns(hidden), **noise, **self._options(1),
        )  # fmt: skip
        self._grow(start, out, rows)

    def _advance(self, start: Carried, depth: int, nodes: int) -> None:
        head, shape = self._head, self.shape
        tokens = self._tokens[depth] if depth else start.root
        parents, states = self._parents[depth], self._states[depth]
        kernels.gate_nodes[(shape.inner,)](
            states, parents, tokens, self.vocabulary.embedding, head.gate, head.up, self._act,
            nodes, HIDDEN=shape.hidden, INNER=shape.inner,
            **self._product(nodes, shape.hidden),
        )  # fmt: skip
        out = self._states[depth + 1]
        self._add(states, parents, self._act, head.down, out, nodes, guesses=True)


def turns(inputs: int) -> dict[str, int]:
    """How an inner dimension is taken: so many numbers at once, and so many a turn."""
    chunk = min(128, inputs & -inputs)
    chunks = inputs // chunk
    turn = next(n for n in range(min(chunks, LONGEST // chunk), 0, -1) if chunks % n == 0)
    return {"CHUNK": chunk, "TURN": turn * chunk}


def turn(inputs: int, most: int) -> int:
    """The longest turn up to `most` that divides the inner dimension."""
    return next(k for k in (256, 128, 64, 32, 16) if k <= most and inputs % k == 0)
