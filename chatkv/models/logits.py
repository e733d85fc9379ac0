"""What a step gives: a row of logits for each row of the batch, and the token each row picks.

Knows rows and samplers; no tree and no model. On a CPU the logits are an array and a row is picked
when it is asked for. On a device they stay there: all rows are picked at once and only ids come
back (`cuda_logits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from chatkv.models.model import ForwardBatch
from chatkv.sampling import Sampler


class KeptRow(Protocol):
    """One row that outlives the step. `numpy.asarray` gives [V] float32."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class Features(Protocol):
    """Tapped residuals of rows that outlive their pass, oldest first. `numpy.asarray` gives
    [rows, layers, H] float32; one of them, [layers, H]."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> KeptRow: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class StepLogits(Protocol):
    """The logits of one step, good until the next one.

    Rows count from 0 over the wanted rows of the batch.
    """

    def __len__(self) -> int: ...

    def wait(self) -> None:
        """Return when the step is done; for whoever measures it."""
        ...

    def sample(self, samplers: Sequence[Sampler], behind: Callable[[], None] | None = None) -> None:
        """Say who picks, one sampler a sequence of the batch. Once, before the first `pick`.

        Args:
            behind: Called when the device has been given all that picking needs, before anyone
                waits: what it is to do next.
        """
        ...

    def has_moved(self, sequence: int) -> bool:
        """Whether the K/V rows that a walk down the sequence's tree keeps have been moved to its
        first slots already."""
        ...

    def pick(self, row: int, history: Sequence[int] = ()) -> int:
        """The token that comes behind a row.

        Args:
            history: All ids up to the row, guessed ones included; not read unless the sampler
                has `edits_rows`.

        Raises:
            ModelError: A logit is NaN, or the best one is infinite.
        """
        ...

    def row(self, row: int) -> npt.NDArray[np.float32]:
        """[V] float32, a copy."""
        ...

    def keep(self, row: int) -> KeptRow:
        """A copy of a row that comes to the host when it is read."""
        ...

    def features(self, rows: Sequence[int]) -> Features:
        """A copy of the tapped residuals of rows of the batch, in order of the layers.

        Those of rows whose logits are not wanted are there if `ForwardBatch.tapped` says so.
        """
        ...


def wanted_rows(batch: ForwardBatch) -> list[int]:
    """Rows of the batch whose logits are wanted."""
    if batch.logit_rows is None:
        return list(range(len(batch.tokens)))
    return batch.logit_rows.tolist()


def owners(batch: ForwardBatch) -> list[int]:
    """The sequence of each wanted row."""
    starts = batch.call.q_start_host
    every = [n for n, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b)]
    return [every[row] for row in wanted_rows(batch)]


class HostLogits:
    """`StepLogits` over an array in host memory.

    Args:
        logits: [wanted rows, V] float32; may be overwritten by the next step.
        batch: What was run.
        taps: [layers, rows, H] float32 of the layers that are tapped, likewise; of all rows, or
            of the last `batch.tapped`.
    """

    def __init__(
        self,
        logits: npt.NDArray[np.float32],
        batch: ForwardBatch,
        taps: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.logits = logits
        self._taps = taps
        self._batch = batch
        self._samplers: Sequence[Sampler] = ()
        self._owners: list[int] = []
        self._places: list[int] = []

    def __len__(self) -> int:
        return len(self.logits)

    def wait(self) -> None:
        """A CPU step is done when it returns."""

    def sample(self, samplers: Sequence[Sampler], behind: Callable[[], None] | None = None) -> None:
        """Nothing is computed before it is asked for: a walk visits few rows."""
        self._samplers = samplers
        self._owners = owners(self._batch)
        self._places = [int(self._batch.positions[row]) + 1 for row in wanted_rows(self._batch)]
        if behind is not None:
            behind()

    def has_moved(self, sequence: int) -> bool:
        """Never: rows are moved once it is known which."""
        return False

    def pick(self, row: int, history: Sequence[int] = ()) -> int:
        sampler = self._samplers[self._owners[row]]
        return sampler.pick(self.logits[row], history, self._places[row]).token

    def row(self, row: int) -> npt.NDArray[np.float32]:
        return self.logits[row].copy()

    def keep(self, row: int) -> KeptRow:
        return self.logits[row].copy()

    def features(self, rows: Sequence[int]) -> Features:
        assert self._taps is not None, "no layer is tapped"
        before = len(self._batch.tokens) - self._batch.tapped if self._batch.tapped else 0
        kept: Any = self._taps[:, [row - before for row in rows]].swapaxes(0, 1).copy()
        return kept
