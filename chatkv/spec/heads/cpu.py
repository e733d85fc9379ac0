"""A recurrent head on a CPU. Knows numbers and one row of taps; no sequence and no `DraftTree`."""

from __future__ import annotations

import numpy as np

from chatkv.errors import HeadsMismatch
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
from chatkv.spec.heads.modules import EagleHead, RecurrentHead


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


def grower_of(file: HeadFile, model: Model) -> CpuGrower | CpuEagle:
    """The head of a file on its target. Raises HeadsMismatch for one that does not run here."""
    if isinstance(model, Decoder):
        if isinstance(file.head, RecurrentHead):
            expect_packable(file.head)
            return CpuGrower(file, model)
        if isinstance(file.head, EagleHead):
            expect_packable(file.head)
            return CpuEagle(file, model)
    raise HeadsMismatch(
        f"Heads of kind {file.head.shape.kind} do not run on {model.device}.",
        hint="Recurrent and eagle ones do.",
    )
