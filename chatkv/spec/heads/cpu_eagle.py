"""An eagle head on a CPU: one decoder layer that looks back on its own keys and values.

Knows numbers, rows and their places; no sequence and no `DraftTree`. Only rows of the target, whose
next ids are chosen, are stored; what a tree guessed leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chatkv.attention.cpu_math import TILE
from chatkv.models.decoder import Decoder
from chatkv.models.layers import rotary_tables
from chatkv.models.logits import Features
from chatkv.spec.heads import cpu_kernels as kernels
from chatkv.spec.heads import cpu_parts
from chatkv.spec.heads.cpu_parts import (
    CpuGuesses,
    Floats,
    Product,
    interleaved,
    numbers,
)
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.modules import WINDOW, EagleHead

ROWS = 8
"""Rows that are stored at once."""


class CpuMemory:
    """Keys and values of the last rows of one sequence; row p is in slot p % window. Behind the
    window keys have room for whole tiles."""

    def __init__(self, kv_heads: int, dim: int, hidden: int, window: int) -> None:
        self.keys = np.zeros((kv_heads, dim, -(-window // TILE) * TILE), np.float32)
        self.values = np.zeros((kv_heads, window, dim), np.float32)
        self.state = np.zeros(hidden, np.float32)
        """[H] features of the row that was stored last."""

    def copy(self) -> CpuMemory:
        """Another one with the same content."""
        twin = CpuMemory.__new__(CpuMemory)
        twin.keys, twin.values = self.keys.copy(), self.values.copy()
        twin.state = self.state.copy()
        return twin


class CpuEagle(CpuGuesses):
    """Guesses below a root, from taps of the rows before it."""

    reads_again = False
    """A row that is computed once more takes a quarter of a plain step, and a window of them more
    than its guesses gain in a reply of usual length. It is done in idle time."""

    def __init__(
        self, file: HeadFile, model: Decoder, *, depth: int = 3, children: int = 4
    ) -> None:
        super().__init__(file, model, depth, children)
        head = file.head
        assert isinstance(head, EagleHead), "grower_of looks before"
        self.window = WINDOW
        self._shape = shape = head.shape
        split = shape.num_heads * shape.head_dim
        qkv, codes = numbers(head.qkv), cpu_parts.CODES
        self._fuse = Product(numbers(head.fuse), ROWS)
        self._kv = Product(qkv[split:], ROWS, kind=codes)
        self._q = Product(qkv[:split], kind=codes)
        self._o = Product(numbers(head.o), kind=codes)
        self._gates = Product(interleaved(head.gate, head.up), kind=codes)
        self._down = Product(numbers(head.down), kind=codes)
        parts = (self._q, self._kv, self._o, self._gates, self._down)
        self._products = tuple(part.arrays for part in parts)
        self._norms = np.ones((4, shape.hidden), np.float32)
        for norm, weight in zip(
            self._norms, (head.token_norm, head.state_norm, head.feed_norm), strict=False
        ):
            norm[:] = numbers(weight)
        self._angles = self._tables(1024)
        own = (depth, shape.num_kv_heads, shape.head_dim)
        self._own_keys, self._own_values = np.zeros(own, np.float32), np.zeros(own, np.float32)
        places = self.new_memory().keys.shape[2]
        self._steps = (
            np.arange(shape.head_dim) * places,
            np.arange(self.window) * shape.head_dim,
        )
        group, width = shape.num_heads // shape.num_kv_heads, max(places, shape.head_dim) + TILE
        self._lines = np.zeros((2 * group, width), np.float32)

    def new_memory(self) -> CpuMemory:
        """Room for one sequence."""
        shape = self._shape
        return CpuMemory(shape.num_kv_heads, shape.head_dim, shape.hidden, self.window)

    def store(
        self, memory: CpuMemory, start: int, features: Features, tokens: Sequence[int]
    ) -> None:
        """Keep rows whose next ids are known.

        Args:
            start: Place of the first row.
            features: [rows, taps, H].
            tokens: The id behind each row.
        """
        cos, sin = self._turns(start, start + len(features))
        kernels.store_rows(
            np.ascontiguousarray(features, np.float32), self.embedded(list(tokens)),
            self._shape.source == "eagle3", self._norms, self.eps, start, cos, sin,
            self._fuse.arrays, self._kv.arrays, memory.keys, memory.values, memory.state,
        )  # fmt: skip

    def grow(
        self,
        memory: CpuMemory,
        rows: tuple[int, int],
        root: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of a tree, its root first.

        Args:
            rows: [first, stop) of the rows that are stored; the last one chose the root.
        """
        model, (first, stop) = self.model, rows
        state = memory.state.copy()

        def advance(token: int, step: int) -> Floats:
            cos, sin = (table[0] for table in self._turns(stop - 1 + step, stop + step))
            kernels.advance(
                token, *model.embedding, state, self._shape.norms_residual,
                self._norms, self.eps, cos, sin, self._products, model.threads, memory.keys,
                memory.values, first, stop, self._own_keys, self._own_values, step, self._steps,
                self._lines,
            )  # fmt: skip
            return state

        return self.tree(
            advance, root, stop + 1, temperature=temperature, seed=seed, max_rows=max_rows
        )

    def _turns(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """cos and sin [stop - start, D / 2] of places; the tables double when one lies behind."""
        cos, sin = self._angles
        if stop > len(cos):
            self._angles = self._tables(max(stop, 2 * len(cos)))
            cos, sin = self._angles
        return cos[start:stop], sin[start:stop]

    def _tables(self, stop: int) -> tuple[Floats, Floats]:
        shape = self._shape
        return rotary_tables(shape.head_dim, shape.rope_theta, shape.rope_factors, 0, stop)
