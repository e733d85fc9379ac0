"""`StepLogits` that stay on the device: all rows pick at once, and only ids come back.

A row whose sampler edits it first (penalties, a grammar) comes to the host when it is asked for,
and is picked there: the host's pick has the device's bits. Knows a captured step and the samplers
of its sequences; no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from chatkv.models.graphs import CapturedStep
from chatkv.models.logits import Features, KeptRow, owners, wanted_rows
from chatkv.models.model import ForwardBatch
from chatkv.sampling import Sampler
from chatkv.sampling_plain import check


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
        self._owners: list[int] = []
        self._samplers: Sequence[Sampler] = ()
        self._picked: list[int] = []
        self._walked = False

    def __len__(self) -> int:
        return len(self._rows)

    def wait(self) -> None:
        self._step.inputs.wait()

    def sample(self, samplers: Sequence[Sampler], behind: Callable[[], None] | None = None) -> None:
        """Pick for all wanted rows that are not edited; returns when the ids are here."""
        self._check_current()
        self._samplers, self._owners = samplers, owners(self._batch)
        if all(sampler.edits_rows for sampler in samplers):
            if behind is not None:
                behind()
            self.wait()
            return
        params = tuple(None if sampler.edits_rows else sampler.params for sampler in samplers)
        self._step.set(self._batch.call.q_start_host, params)
        ids = self._step.pick(behind)
        self._picked = [ids[row] for row in self._rows]
        self._walked = True

    def has_moved(self, sequence: int) -> bool:
        return self._walked and not self._samplers[sequence].edits_rows

    def pick(self, row: int, history: Sequence[int] = ()) -> int:
        sampler = self._samplers[self._owners[row]]
        if sampler.edits_rows:
            return sampler.pick(self.row(row), history, self._place(self._rows[row])).token
        token = self._picked[row]
        if token < 0:
            check(float("nan"))
        return token

    def row(self, row: int) -> npt.NDArray[np.float32]:
        self._check_current()
        return self._step.room.logits[self._rows[row]].cpu().numpy().copy()

    def keep(self, row: int) -> KeptRow:
        self._check_current()
        return self._step.keep(self._rows[row])

    def features(self, rows: Sequence[int]) -> Features:
        self._check_current()
        return self._step.features(rows)

    def _place(self, row: int) -> int:
        """Position of the token that comes behind a row of the batch."""
        return int(self._batch.positions[row]) + 1

    def _check_current(self) -> None:
        assert self._step.generation == self._generation, "these logits were overwritten by a step"
