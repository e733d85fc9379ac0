"""A head on a CUDA device: a whole tree in one captured graph.

Knows tensors and what one row left behind; no sequence and no tree. A tree is grown from what the
walk down the last one carried along on the device, or from a row of taps that the host names.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.device_rows import DeviceRow
from chatkv.models.logits import KeptRow
from chatkv.models.model import Model
from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.models.work import Work
from chatkv.spec.heads.device_eagle import GROWTH, FusedEagle
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.fused import FusedGrower
from chatkv.spec.heads.grow import ParallelCell, Vocabulary, grow
from chatkv.spec.heads.modules import ParallelHead, RecurrentHead
from chatkv.spec.heads.noise_triton import draft_noise


class DeviceHead(ABC):
    """Guesses below a root, from the taps of the row that chose it.

    Args:
        file: The head.
        model: Its target; its steps keep the taps from here on.
    """

    depth = GROWTH.depth

    def __init__(self, file: HeadFile, model: CudaDecoder) -> None:
        weights, device = model.layers.weights, model.layers.device
        model.tap(file.head.shape.taps)
        self._graphs = model.graphs
        self._vocabulary = Vocabulary.of(file.draft_ids, weights.head, weights.embedding)
        size, is_cuda = (3, GROWTH.rows), device.type == "cuda"
        self._out = torch.zeros(size, dtype=torch.int32, device=device)
        self._here = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._carried: Carried | None = None
        self._work = Work(self._compute, False)

    def launch(self) -> None:
        """Grow from what the walk behind a step leaves; returns at once."""
        if self._carried is not self._graphs.carried:
            self._carried = self._graphs.carried
            self._work = Work(self._compute, self._graphs.capture)
        self._work()
        if self._done is not None:
            self._done.record()

    def read(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of the tree that was launched last, its root first."""
        if self._done is not None:
            self._done.synchronize()
        tokens, parents, chance = self._here
        return tokens.tolist(), parents.tolist(), chance.view(torch.float32).tolist()

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
            taps: [taps, H] of the row that chose the root, on the device.
            position: Of the token behind the root.
            max_rows: Not looked at: every tree has `GROWTH.rows`.
        """
        del max_rows
        assert isinstance(taps, DeviceRow)
        carried = self._graphs.carried
        assert carried is not None, "the model's layers are tapped"
        carried.send(taps.values, root, position, temperature=temperature, seed=seed)
        self.launch()
        return self.read()

    def _compute(self) -> None:
        assert self._carried is not None
        self._launch(self._carried, self._out)
        self._here.copy_(self._out, non_blocking=True)

    @abstractmethod
    def _launch(self, start: Carried, out: Tensor) -> None:
        """Fill out [3, R] int32: tokens, parents, and the bits of the float32 chances."""


class FusedHead(DeviceHead):
    """A recurrent head in a few kernels a depth; its trees can be run without coming here first."""

    def __init__(self, file: HeadFile, model: CudaDecoder) -> None:
        super().__init__(file, model)
        weights = model.layers.weights
        head = file.head.to(weights.embedding.device, weights.dtype)
        assert isinstance(head, RecurrentHead)
        self.rows = TreeRows.empty(GROWTH.rows, weights.embedding.device)
        self._fused = FusedGrower(head, self._vocabulary, GROWTH)

    def _launch(self, start: Carried, out: Tensor) -> None:
        self._fused.grow(start, out, self.rows)


class ModuleHead(DeviceHead):
    """A parallel head, launch by launch of its modules."""

    def __init__(self, file: HeadFile, model: CudaDecoder) -> None:
        super().__init__(file, model)
        weights, shape = model.layers.weights, file.head.shape
        head = file.head.to(weights.embedding.device, weights.dtype)
        assert isinstance(head, ParallelHead)
        self._head = head
        self._noise = weights.embedding.new_zeros(
            (1, GROWTH.depth, shape.draft_ids), dtype=torch.float32
        )

    def _launch(self, start: Carried, out: Tensor) -> None:
        draft_noise(start.seed, start.position, self._vocabulary.draft_ids, self._noise)
        found = grow(
            self._head,
            ParallelCell(self._head, start.taps[None]),
            self._vocabulary,
            start.root,
            GROWTH,
            inverse_t=start.inverse_t.float(),
            noise=self._noise,
        )
        out[0].copy_(found.tokens[0])
        out[1].copy_(found.parents[0])
        out[2].copy_(found.chance[0].view(torch.int32))


def grower_of(file: HeadFile, model: Model) -> DeviceHead | FusedEagle:
    """The head of a file on its target."""
    assert isinstance(model, CudaDecoder), f"{model.device} is a device"
    kinds = {"recurrent": FusedHead, "parallel": ModuleHead, "eagle": FusedEagle}
    return kinds[file.head.shape.kind](file, model)
