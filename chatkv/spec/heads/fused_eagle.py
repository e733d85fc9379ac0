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
from chatkv.spec.heads.fused import ROWS, Launch, TreeGrower, wide
from chatkv.spec.heads.grow import Growth, Vocabulary
from chatkv.spec.heads.modules import EagleHead
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
        shape, weight = head.shape, head.qkv
        self._turns = _turns_of(shape, weight.device)
        self._q = weight.new_zeros(ROWS, shape.num_heads, shape.head_dim)
        self._mixed = torch.zeros_like(self._q)
        levels = (max(1, growth.depth - 1), max(1, growth.width))
        sizes = (*levels, shape.num_kv_heads, shape.head_dim)
        self._node_keys, self._node_values = weight.new_zeros(sizes), weight.new_zeros(sizes)
        self._middle = torch.zeros_like(self._states[0])
        self._same = torch.arange(ROWS, dtype=torch.int32, device=weight.device)

    def store(self, memory: EagleMemory, new: NewRows) -> None:
        """Keep new rows, any number up to the window. A row's bits are its own."""
        head, shape, cut = self.head, self.head.shape, self.launches.fuse_rows
        blocks = triton.cdiv(len(new.path), ROWS)
        kernels.fuse_rows[(triton.cdiv(shape.hidden, cut.n), blocks)](
            new.tapped, new.path, new.span, new.count, head.fuse, memory.states,
            new.tapped.shape[1], shape.hidden, len(memory.states), TAPS=len(shape.taps),
            NORMED=shape.source == "chatkv", **self._cut(cut, shape.hidden),
        )  # fmt: skip
        cut = self.launches.heads
        kernels.store_rows[(self._heads_blocks(), blocks)](
            memory.states, new.path, new.behind, new.span, new.count, self.vocabulary.embedding,
            head.state_norm, head.token_norm, head.qkv, self._turns, memory.keys, memory.values,
            self._q, self._parents[0], shape.hidden, shape.eps, shape.head_dim**-0.5,
            len(memory.states), **self._heads_options(),
        )  # fmt: skip

    def grow(
        self, start: Carried, memory: EagleMemory, new: NewRows, out: Tensor, rows: TreeRows
    ) -> None:
        """Keep new rows, and grow a tree behind the last one; see `_grow`. Its taps are not read.

        Args:
            new: At most a path's.
        """
        self._memory, self._new = memory, new
        self.store(memory, new)
        self._grow(start, out, rows)

    def _advance(self, start: Carried, depth: int, nodes: int) -> None:
        head, shape, memory, new = self.head, self.head.shape, self._memory, self._new
        states, parents = self._states[depth] if depth else memory.states, self._parents[depth]
        if depth:
            kernels.node_heads[(self._heads_blocks(),)](
                states, parents, self._tokens[depth], new.span, new.count,
                self.vocabulary.embedding, head.state_norm, head.token_norm, head.qkv, self._turns,
                self._node_keys[depth - 1], self._node_values[depth - 1], self._q, nodes, depth,
                shape.hidden, shape.eps, shape.head_dim**-0.5, **self._heads_options(),
            )  # fmt: skip
        self._attend(depth, nodes)
        self._add(states, parents, self._mixed, head.o, self._middle, nodes, shape.norms_residual)
        cut = self.launches.feed
        kernels.feed_nodes[(triton.cdiv(shape.inner, cut.n),)](
            self._middle, head.feed_norm, head.gate, head.up, self._act, nodes, shape.hidden,
            shape.inner, shape.eps, **self._cut(cut, shape.hidden),
        )  # fmt: skip
        out = self._states[depth + 1]
        self._add(self._middle, self._same, self._act, head.down, out, nodes)

    def _add(
        self, states: Tensor, parents: Tensor, x: Tensor, weight: Tensor, out: Tensor, nodes: int,
        normed: bool = False,
    ) -> None:  # fmt: skip
        head, (hidden, inputs), cut = self.head, weight.shape, self.launches.add
        kernels.add_nodes[(triton.cdiv(hidden, cut.n),)](
            states, parents, x, weight, head.state_norm, out, nodes, hidden, inputs, head.shape.eps,
            NORMED=normed, **self._cut(cut, inputs),
        )  # fmt: skip

    def _attend(self, depth: int, nodes: int) -> None:
        shape, memory, new, cut = self.head.shape, self._memory, self._new, self.launches.attend
        width, group = max(1, self.growth.width), shape.num_heads // shape.num_kv_heads
        dim = triton.next_power_of_2(max(16, shape.head_dim))
        kernels.attend_nodes[(shape.num_kv_heads,)](
            self._q, memory.keys, memory.values, self._node_keys, self._node_values, self._parents,
            new.span, new.count, self._mixed, nodes, len(memory.states), HEADS=shape.num_heads,
            KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim, DIM_PAD=dim,
            QUERIES=triton.next_power_of_2(max(16, nodes * group)), WINDOW=self.window,
            BLOCK_S=min(cut.n, KEYS // dim, triton.next_power_of_2(max(16, self.window))),
            DEPTH=depth, WIDTH=width, OWN=triton.next_power_of_2(max(16, depth * width)),
            **self._options(cut),
        )  # fmt: skip

    @property
    def _channels(self) -> int:
        """Of half a head, that one program makes."""
        half = self.head.shape.head_dim // 2
        return min(self.launches.heads.n, half & -half)

    def _heads_blocks(self) -> int:
        shape = self.head.shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        return heads * (shape.head_dim // 2 // self._channels)

    def _heads_options(self) -> dict[str, Any]:
        shape, cut = self.head.shape, self.launches.heads
        return {
            "HEADS": shape.num_heads,
            "KV_HEADS": shape.num_kv_heads,
            "HALF": shape.head_dim // 2,
            **self._cut(cut, shape.hidden),
            "BLOCK_N": self._channels,
        }

    def _cut(self, cut: Launch, inputs: int) -> dict[str, Any]:
        """A part of the inner dimension for each warp."""
        parts = {"PARTS": cut.warps, "WIDE": wide(inputs, cut)}
        return {"BLOCK_N": cut.n, **parts, **self._options(cut)}


def _turns_of(shape: HeadShape, device: torch.device) -> Tensor:
    """[D / 2] float64: circles that a channel is turned by a place; see `modules.angles_of`."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device)
    frequencies = shape.rope_theta ** (-steps / shape.head_dim)
    if shape.rope_factors:
        frequencies = frequencies / steps.new_tensor(shape.rope_factors)
    return frequencies / (2 * pi)
