"""`StepLogits` that stay on the device: all rows pick at once, and only ids come back.

Knows a captured step and the samplers of its sequences; no tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.models.graphs import CapturedStep
from chatkv.models.logits import KeptRow, owners, wanted_rows
from chatkv.models.model import ForwardBatch
from chatkv.sampling import Sampler
from chatkv.sampling_plain import check
from chatkv.sampling_triton import settings_of


class DeviceRow:
    """[V] float32 on the device; comes to the host when numpy asks."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values.cpu().numpy().astype(dtype or np.float32, copy=False)


class DeviceLogits:
    """`StepLogits` of a step on the device.

    Args:
        step: Where the results are.
        batch: What was run.
    """

    def __init__(self, step: CapturedStep, batch: ForwardBatch) -> None:
        self._step, self._batch = step, batch
        self._generation = step.generation
        self._rows = wanted_rows(batch)
        self._picked: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def wait(self) -> None:
        if self._step.layers.device.type == "cuda":
            torch.cuda.current_stream(self._step.layers.device).synchronize()

    def sample(self, samplers: Sequence[Sampler]) -> None:
        """Pick for all wanted rows; returns when the ids are here."""
        self._check_current()
        step, settings = self._step, self._step.settings.begin()
        count = 0
        for row, owner in zip(self._rows, owners(self._batch), strict=True):
            position = int(self._batch.positions[row]) + 1
            settings["integers"][row], settings["floats"][row] = settings_of(
                samplers[owner].params, position
            )
            count = max(count, row + 1)
        settings["rows"][0] = count
        step.pick()
        ids = step.picks.out[:count].tolist()
        self._picked = [ids[row] for row in self._rows]

    def pick(self, row: int, history: Sequence[int] = ()) -> int:
        del history
        token = self._picked[row]
        if token < 0:
            check(float("nan"))
        return token

    def row(self, row: int) -> npt.NDArray[np.float32]:
        self._check_current()
        return self._step.room.logits[self._rows[row]].cpu().numpy().copy()

    def keep(self, row: int) -> KeptRow:
        self._check_current()
        return DeviceRow(self._step.room.logits[self._rows[row]].clone())

    def _check_current(self) -> None:
        assert self._step.generation == self._generation, "these logits were overwritten by a step"
