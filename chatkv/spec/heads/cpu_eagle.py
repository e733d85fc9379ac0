"""An eagle head on a CPU: one decoder layer that looks back on its own keys and values.

Knows numbers, rows and their places; no sequence and no `DraftTree`. Only rows of the target, whose
next ids are chosen, are stored; what a tree guessed leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chatkv.models.decoder import Decoder
from chatkv.models.layers import rotary_tables
from chatkv.models.logits import Features
from chatkv.spec.heads import cpu_kernels as kernels
from chatkv.spec.heads.cpu_parts import (
    CpuGuesses,
    Floats,
    Product,
    interleaved,
    norm_taps,
    numbers,
)
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.modules import WINDOW, EagleHead

ROWS = 8
"""Rows that are stored at once."""


class CpuMemory:
    """Keys and values of the last rows of one sequence; row p is in slot p % window."""

    def __init__(self, kv_heads: int, dim: int, hidden: int, window: int) -> None:
        self.keys = np.zeros((kv_heads, dim, window), np.float32)
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
    than its guesses gain in a reply of usual length."""

    def __init__(
        self, file: HeadFile, model: Decoder, *, depth: int = 3, children: int = 4
    ) -> None:
        super().__init__(file, model, depth, children)
        head = file.head
        assert isinstance(head, EagleHead), "grower_of looks before"
        self.window = WINDOW
        self._shape = shape = head.shape
        split = shape.num_heads * shape.head_dim
        qkv = numbers(head.qkv)
        self._fuse = Product(numbers(head.fuse), ROWS)
        self._kv = Product(qkv[split:], ROWS)
        self._q = Product(qkv[:split])
        self._o = Product(numbers(head.o))
        self._gates = Product(interleaved(head.gate, head.up))
        self._down = Product(numbers(head.down))
        self._norms = [numbers(w) for w in (head.token_norm, head.state_norm, head.feed_norm)]
        self._angles = self._tables(1024)
        own = (depth, shape.num_kv_heads, shape.head_dim)
        self._own_keys, self._own_values = np.zeros(own, np.float32), np.zeros(own, np.float32)
        self._scores = np.zeros(self.window + depth, np.float32)
        self._mixed = np.zeros((shape.num_heads, shape.head_dim), np.float32)

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
        taps, embedded = np.asarray(features), self.embedded(list(tokens))
        threads = self.model.threads
        for first in range(0, len(taps), ROWS):
            count = min(ROWS, len(taps) - first)
            for row in range(count):
                if self._shape.source == "chatkv":
                    norm_taps(taps[first + row], self.eps, self._fuse.x[row])
                else:
                    self._fuse.x[row] = taps[first + row].reshape(-1)
            self._fuse(threads, count)
            for row in range(count):
                self._pair(embedded[first + row], self._fuse.out[row], self._kv.x[row])
            self._kv(threads, count)
            for row in range(count):
                place = start + first + row
                key, value = self._heads(self._kv.out[row], place)
                kernels.store(memory.keys, memory.values, place % self.window, key, value)
            memory.state[:] = self._fuse.out[count - 1]

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
        shape, threads, (first, stop) = self._shape, self.model.threads, rows
        state = memory.state.copy()

        def advance(token: int, step: int) -> Floats:
            self._pair(self.embedded([token])[0], state, self._q.x[0])
            q = self._q(threads).reshape(shape.num_heads, shape.head_dim)
            cos, sin = self._turn(stop - 1 + step)
            kernels.rotate(q, cos, sin)
            if step:  # the root's own key and value are stored
                self._kv.x[0] = self._q.x[0]
                self._kv(threads)
                key, value = self._heads(self._kv.out[0], stop - 1 + step)
                self._own_keys[step - 1], self._own_values[step - 1] = key, value
            kernels.look(
                q, memory.keys, memory.values, first, stop, self._own_keys, self._own_values,
                step, self._scores, self._mixed,
            )  # fmt: skip
            self._o.x[0] = self._mixed.reshape(-1)
            if shape.norms_residual:
                state[:] = self._q.x[0, shape.hidden :]  # normed by `_pair`
            np.add(state, self._o(threads), out=state)
            kernels.norm(state, self._norms[2], self.eps, self._gates.x[0])
            kernels.gate(self._gates(threads), self._down.x[0])
            np.add(state, self._down(threads), out=state)
            return state

        return self.tree(
            advance, root, stop + 1, temperature=temperature, seed=seed, max_rows=max_rows
        )

    def _pair(self, embedded: Floats, state: Floats, out: Floats) -> None:
        kernels.norm_pair(embedded, self._norms[0], state, self._norms[1], self.eps, out)

    def _heads(self, row: Floats, place: int) -> tuple[Floats, Floats]:
        """Key, rotated in place, and value [HK, D] of a row of `_kv`."""
        key, value = row.reshape(2, self._shape.num_kv_heads, self._shape.head_dim)
        kernels.rotate(key, *self._turn(place))
        return key, value

    def _turn(self, place: int) -> tuple[Floats, Floats]:
        """cos and sin [D / 2] of a place; the tables double when it lies behind them."""
        cos, sin = self._angles
        if place >= len(cos):
            self._angles = self._tables(max(place + 1, 2 * len(cos)))
            cos, sin = self._angles
        return cos[place], sin[place]

    def _tables(self, stop: int) -> tuple[Floats, Floats]:
        shape = self._shape
        return rotary_tables(shape.head_dim, shape.rope_theta, shape.rope_factors, 0, stop)
