"""Heads that read one row, on a CPU. Knows numbers and taps; no sequence and no `DraftTree`."""

from __future__ import annotations

import numpy as np

from chatkv.models.decoder import Decoder
from chatkv.models.logits import KeptRow
from chatkv.models.model import Model
from chatkv.spec.heads import cpu_kernels as kernels
from chatkv.spec.heads.cpu_eagle import CpuEagle
from chatkv.spec.heads.cpu_parts import (
    CpuGuesses,
    Floats,
    Product,
    expect_packable,
    interleaved,
    norm_taps,
    numbers,
)
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.modules import EagleHead, ParallelHead, RecurrentHead


class CpuGrower(CpuGuesses):
    """Guesses of a recurrent head below a root, from the taps of the row that chose it."""

    def __init__(
        self, file: HeadFile, model: Decoder, *, depth: int = 3, children: int = 4
    ) -> None:
        super().__init__(file, model, depth, children)
        head = file.head
        assert isinstance(head, RecurrentHead), "grower_of looks before"
        self._fuse = Product(numbers(head.fuse))
        self._gates = Product(interleaved(head.gate, head.up))
        self._down = Product(numbers(head.down))
        self._one = np.ones(model.spec.hidden_size, np.float32)

    def grow(
        self,
        taps: KeptRow,
        root: int,
        position: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of a tree, its root first.

        Args:
            taps: [taps, H] of the row that chose the root.
            position: Of the token behind the root.
        """
        threads, one = self.model.threads, self._one
        norm_taps(np.asarray(taps), self.eps, self._fuse.x[0])
        state = self._fuse(threads).copy()

        def advance(token: int, step: int) -> Floats:
            embedded = self.embedded([token])[0]
            kernels.norm_pair(state, one, embedded, one, self.eps, self._gates.x[0])
            kernels.gate(self._gates(threads), self._down.x[0])
            np.add(state, self._down(threads), out=state)
            return state

        return self.tree(
            advance, root, position, temperature=temperature, seed=seed, max_rows=max_rows
        )


class CpuFan(CpuGuesses):
    """Guesses of a parallel head: the state of a depth is the same behind all of its tokens."""

    def __init__(
        self, file: HeadFile, model: Decoder, *, depth: int = 3, children: int = 4
    ) -> None:
        super().__init__(file, model, min(depth, file.head.shape.depth), children)
        head = file.head
        assert isinstance(head, ParallelHead), "grower_of looks before"
        self._fuse = Product(numbers(head.fuse))
        self._blocks = [Product(block) for block in numbers(head.blocks)[: self.depth]]

    def grow(
        self,
        taps: KeptRow,
        root: int,
        position: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """As `CpuGrower.grow`."""
        threads = self.model.threads
        norm_taps(np.asarray(taps), self.eps, self._fuse.x[0])
        features = self._fuse(threads)

        def advance(token: int, step: int) -> Floats:
            block = self._blocks[step]  # a depth that nobody comes to is not computed
            block.x[0] = features
            wide = block(threads)
            half: Floats = np.float32(0.5) * wide
            up: Floats = half * np.tanh(half)
            return features + half + up  # silu(wide), and no overflow on the way

        return self.tree(
            advance, root, position, temperature=temperature, seed=seed, max_rows=max_rows
        )


def grower_of(file: HeadFile, model: Model) -> CpuGrower | CpuFan | CpuEagle:
    """The head of a file on its target. Raises HeadsMismatch for one that cannot be packed."""
    assert isinstance(model, Decoder), f"{model.device} is the CPU"
    expect_packable(file.head)
    if isinstance(file.head, EagleHead):
        return CpuEagle(file, model)
    return (CpuGrower if isinstance(file.head, RecurrentHead) else CpuFan)(file, model)
