"""A head on a CUDA device: a whole tree in one captured graph.

Knows tensors and one row of taps; no sequence and no tree. What changes from call to call is sent
in one transfer, and tokens, parents and chances come back in one.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.graphs import DeviceRow, captured
from chatkv.models.logits import KeptRow
from chatkv.models.model import Model
from chatkv.models.staged import Staged
from chatkv.spec.heads.device_eagle import DeviceEagle
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.grow import Growth, ParallelCell, RecurrentCell, Vocabulary, grow
from chatkv.spec.heads.modules import ParallelHead
from chatkv.spec.heads.noise_triton import draft_noise

GROWTH = Growth(rows=16, depth=4, width=4, children=8)


class DeviceGrower:
    """Guesses below a root, from the taps of the row that chose it.

    Args:
        file: A recurrent or a parallel head.
        model: Its target.
    """

    def __init__(self, file: HeadFile, model: CudaDecoder) -> None:
        weights = model.layers.weights
        device = model.layers.device
        self._head = file.head.to(device, weights.dtype)
        self._vocabulary = Vocabulary.of(file.draft_ids, weights.head, weights.embedding)
        shape = file.head.shape
        floats = {"dtype": torch.float32, "device": device}
        self._taps = torch.zeros(1, len(shape.taps), shape.hidden, **floats)
        self._noise = torch.zeros(1, GROWTH.depth, shape.draft_ids, **floats)
        self.inputs = Staged(
            {
                "root": (torch.int64, (1,)),
                "seed": (torch.int64, (1,)),
                "position": (torch.int32, (1,)),
                "inverse_t": (torch.float64, (1,)),
            },
            device,
        )
        self._out = torch.zeros(3, GROWTH.rows, **floats)
        self._here = torch.zeros(3, GROWTH.rows, pin_memory=device.type == "cuda")
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture = model.graphs.capture

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
        there = self.inputs.begin()
        there["root"][0] = root
        there["seed"][0] = seed if temperature > 0 else -1
        there["position"][0] = position
        there["inverse_t"][0] = 1 / temperature if temperature > 0 else 1
        self.inputs.send()
        self._taps[0].copy_(taps.values)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
            if self._capture:
                self._graph = captured(self._compute, None)
        self.inputs.wait()
        tokens, parents, chance = self._here.numpy()
        ids, rows = tokens.astype(np.int64).tolist(), parents.astype(np.int64).tolist()
        return ids, rows, chance.tolist()

    def _compute(self) -> None:
        there = self.inputs.device
        draft_noise(there["seed"], there["position"], self._vocabulary.draft_ids, self._noise)
        kind = ParallelCell if isinstance(self._head, ParallelHead) else RecurrentCell
        found = grow(
            self._head,
            kind(self._head, self._taps),  # type: ignore[arg-type]
            self._vocabulary,
            there["root"],
            GROWTH,
            inverse_t=there["inverse_t"].float(),
            noise=self._noise,
        )
        self._put(0, found.tokens)
        self._put(1, found.parents)
        self._put(2, found.chance)
        self._here.copy_(self._out, non_blocking=True)

    def _put(self, line: int, values: Tensor) -> None:
        # Ids are below 2^24: float32 holds them.
        self._out[line].copy_(values[0])


def grower_of(file: HeadFile, model: Model) -> DeviceGrower | DeviceEagle:
    """The head of a file on its target."""
    assert isinstance(model, CudaDecoder), f"{model.device} is a device"
    return (DeviceEagle if file.head.shape.kind == "eagle" else DeviceGrower)(file, model)
