"""A tree of guesses from an eagle head in few launches: its memory, and the order of the kernels.

Knows tensors of one sequence; no graph, no sequence and no `DraftTree`. `grow.grow` over a
`grow.EagleCell` is the plain version.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: basic, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
import triton
from torch import Tensor

from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.models.walk_triton import LONGEST_PATH
from chatkv.spec.heads import eagle_triton as kernels
from chatkv.spec.heads.fused import ROWS, TreeGrower, turns
from chatkv.spec.heads.grow import Growth, Vocabulary
from chatkv.spec.heads.modules import EagleHead, product, rms
from chatkv.spec.heads.shape import HeadShape

KEYS = 65536
"""Numbers of keys that a program looks at together, and of values: they share its fast memory."""
SPARE = LONGEST_PATH
"""Slots behind a window: rows that a walk stored and the host then cut cost none that is seen."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows of a sequence that are not stored yet, where the device has them."""

    tapped: Tensor
    """[taps, T, H] float32, of more rows."""
    path: Tensor
    """[N] int32, which of the T they are, in order."""
    behind: Tensor
    """[T] int32, the id that came behind each."""
    count: Tensor
    """[1] int32, how many of the N there are; with none, `behind` the first is the root."""
    span: Tensor
    """[2] int32: rows [first, stop) are stored."""


class EagleMemory:
    """What one sequence's rows left: keys and values [R, HK, D], and their features [R, H].

    Row p is in slot p % R, R being the window and some spare slots.
    """

    def __init__(self, keys: Tensor, values: Tensor, states: Tensor) -> None:
        self.keys, self.values, self.states = keys, values, states

    @classmethod
    def empty(cls, shape: HeadShape, window: int, like: Tensor) -> EagleMemory:
        """Of no rows; keys and values in the dtype of `like` and on its device."""
        size = (window + SPARE, shape.num_kv_heads, shape.head_dim)
        states = like.new_zeros((size[0], shape.hidden), dtype=torch.float32)
        return cls(like.new_zeros(size), like.new_zeros(size), states)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is held."""
        return self.keys, self.values, self.states


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """An eagle head's matrices, the weights of norms multiplied into the products behind them."""

    fuse: Tensor
    qkv: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    residual_norm: Tensor | None
    """[H] float32, of a layer that adds to the normed state."""

    @classmethod
    @torch.no_grad()
    def of(cls, head: EagleHead, dtype: torch.dtype) -> EagleWeights:
        """In that dtype."""
        norm = torch.cat([head.token_norm, head.state_norm]).float()
        feed = head.feed_norm.float()
        return cls(
            fuse=head.fuse.to(dtype),
            qkv=(head.qkv * norm).to(dtype),
            o=head.o.to(dtype),
            gate=(head.gate * feed).to(dtype),
            up=(head.up * feed).to(dtype),
            down=head.down.to(dtype),
            residual_norm=head.state_norm.float() if head.shape.norms_residual else None,
        )


class FusedEagleGrower(TreeGrower[EagleHead]):
    """An eagle head's trees, six or seven kernels a depth.

    Args:
        head: On the device.
        window: Rows it looks back on.
    """

    def __init__(
        self,
        head: EagleHead,
        vocabulary: Vocabulary,
        growth: Growth,
        window: int,
        **options: Any,
    ) -> None:
        super().__init__(head, vocabulary, growth, **options)
        self.window = window
        shape, weight = head.shape, vocabulary.draft_rows
        device = weight.device
        self._weights = EagleWeights.of(head, weight.dtype)
        self._turns = _turns_of(shape, device)
        places = max(window, ROWS) + growth.depth + 1
        self._turned = torch.zeros(places, 2, shape.head_dim // 2, device=device)
        self._table = token_table(self._weights, vocabulary, shape.eps)
        self._q = weight.new_zeros(ROWS, shape.num_heads, shape.head_dim)
        self._mixed = torch.zeros(self._q.shape, device=device)
        parts, units = self.launches.attend.n, (ROWS, shape.num_heads)
        self._mixes = torch.zeros(2 * parts, *self._q.shape, device=device)
        self._sums = torch.zeros(2 * parts, 2, *units, device=device)
        self._arrived = torch.zeros(units, dtype=torch.int32, device=device)
        levels = (max(1, growth.depth - 1), max(1, growth.width))
        sizes = (*levels, shape.num_kv_heads, shape.head_dim)
        self._node_keys, self._node_values = weight.new_zeros(sizes), weight.new_zeros(sizes)
        self._middle = torch.zeros_like(self._states[0])
        self._nothing = torch.zeros(1, dtype=torch.int64, device=device)
        self._same = torch.arange(ROWS, dtype=torch.int32, device=device)

    def store(self, memory: EagleMemory, new: NewRows, start: Carried | None = None) -> None:
        """Keep new rows, any number up to the window. A row's bits are its own.

        Args:
            start: Of a tree that will be grown: its noise is drawn beside.
        """
        w, shape, lines = self._weights, self.shape, self.launches.lines
        blocks, half, hidden = triton.cdiv(len(new.path), ROWS), shape.head_dim // 2, shape.hidden
        places = len(new.path) + self.growth.depth + 1
        assert places <= len(self._turned), f"{len(new.path)} rows, a window of {self.window}"
        drawn = (self._nothing, new.count) if start is None else (start.seed, start.position)
        turn_blocks, noise = triton.cdiv(places * half, 256), self._noise_cut(lines)
        ahead = turn_blocks + (0 if start is None else self.growth.depth * noise["BLOCKS"])
        kernels.fuse_rows[(hidden // 2 + ahead, blocks)](
            new.tapped, new.path, new.span, new.count, w.fuse, memory.states, new.tapped.shape[1],
            len(memory.states), self._turns, self._turned, places, turn_blocks, *drawn, self._ids,
            self._noise, len(self._ids), HIDDEN=hidden, TAPS=len(shape.taps),
            NORMED=shape.source == "chatkv", LINES=lines, HALF=half, **turns(hidden), **noise,
            **self._options(lines),
        )  # fmt: skip
        kernels.store_rows[((shape.num_heads + 2 * shape.num_kv_heads) * half, blocks)](
            memory.states, new.path, new.behind, new.span, new.count, self.vocabulary.embedding,
            w.qkv, self._turned, memory.keys, memory.values, self._q, self._parents[0], shape.eps,
            shape.head_dim**-0.5, len(memory.states),
            LINES=lines, **self._heads, **turns(hidden), **self._options(lines),
        )  # fmt: skip

    def grow(
        self, start: Carried, memory: EagleMemory, new: NewRows, out: Tensor, rows: TreeRows
    ) -> None:
        """Keep new rows, and grow a tree behind the last one; see `_grow`. Its taps are not read.

        Args:
            new: At most a path's.
        """
        self._memory, self._new = memory, new
        self.store(memory, new, start)
        self._grow(start, out, rows)

    def _advance(self, start: Carried, depth: int, nodes: int) -> None:
        w, shape, memory, new = self._weights, self.shape, self._memory, self._new
        states, parents = self._states[depth] if depth else memory.states, self._parents[depth]
        product = self._product(nodes, shape.hidden)
        if depth:
            heads = shape.num_heads + 2 * shape.num_kv_heads
            kernels.node_heads[(heads * (shape.head_dim // 2),)](
                states, parents, self._places[depth], new.count, self._table,
                w.qkv, self._turned, self._node_keys[depth - 1], self._node_values[depth - 1],
                self._q, nodes, depth, shape.eps, shape.head_dim**-0.5, **self._heads, **product,
            )  # fmt: skip
        self._attend(depth, nodes)
        self._add(states, parents, self._mixed, w.o, self._middle, nodes, norm=w.residual_norm)
        pairs = self.launches.pairs if shape.inner % self.launches.pairs == 0 else 1
        kernels.feed_nodes[(shape.inner // pairs,)](
            self._middle, w.gate, w.up, self._act, nodes, shape.eps,
            HIDDEN=shape.hidden, INNER=shape.inner, PAIRS=pairs, **product,
        )  # fmt: skip
        out = self._states[depth + 1]
        self._add(self._middle, self._same, self._act, w.down, out, nodes, guesses=True)

    def _attend(self, depth: int, nodes: int) -> None:
        shape, memory, new, cut = self.shape, self._memory, self._new, self.launches.attend
        dim = triton.next_power_of_2(shape.head_dim)
        keys = min(KEYS // dim, triton.next_power_of_2(self.window))
        kernels.attend_nodes[(shape.num_heads, nodes, cut.n + (depth > 0))](
            self._q, memory.keys, memory.values, self._node_keys, self._node_values, self._parents,
            new.span, new.count, self._mixed, self._mixes, self._sums, self._arrived,
            len(memory.states), depth, HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads,
            DIM=shape.head_dim, DIM_PAD=dim, WINDOW=self.window, KEYS=max(1, keys // cut.n),
            PARTS=cut.n, WIDTH=max(1, self.growth.width), **self._options(cut.warps),
        )  # fmt: skip

    @property
    def _heads(self) -> dict[str, int]:
        shape = self.shape
        return {
            "HIDDEN": shape.hidden,
            "HEADS": shape.num_heads,
            "KV_HEADS": shape.num_kv_heads,
            "HALF": shape.head_dim // 2,
        }


@torch.no_grad()
def token_table(weights: EagleWeights, vocabulary: Vocabulary, eps: float) -> Tensor:
    """[K, (HQ + 2 HK) D] in the dtype of the weights: what a draft id adds to queries, keys and
    values before they are rotated. Nodes below the root guess from these ids alone."""
    halves = [
        product(
            rms(vocabulary.embedding[ids], eps=eps), weights.qkv[:, : vocabulary.embedding.shape[1]]
        )
        for ids in vocabulary.draft_ids.split(4096)
    ]
    return torch.cat(halves)


def _turns_of(shape: HeadShape, device: torch.device) -> Tensor:
    """[D / 2] float64: circles that a channel is turned by a place; see `modules.angles_of`."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device)
    frequencies = shape.rope_theta ** (-steps / shape.head_dim)
    if shape.rope_factors:
        frequencies = frequencies / steps.new_tensor(shape.rope_factors)
    return frequencies / (2 * pi)
