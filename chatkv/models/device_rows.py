"""Rows of a step's results that stay on the device, and outlive the step if somebody holds them.

Knows tensors; no step and no graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor


class DeviceRow:
    """A row on the device; comes to the host, as float32, when numpy asks.

    It is copied only if somebody still holds it when its step runs again.

    Args:
        rows: [R, ...], of which it is one.
        row: Its place.
    """

    def __init__(self, rows: Tensor, row: int) -> None:
        self._rows, self._row = rows, row  # most rows are never looked at

    @property
    def values(self) -> Tensor:
        """On the device."""
        return self._rows[self._row]

    def leave(self) -> None:
        """Its place is about to be overwritten."""
        self._rows, self._row = self.values.clone()[None], 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values.cpu().numpy().astype(dtype or np.float32, copy=bool(copy))


class DeviceRows:
    """Tapped residuals of some rows, on the device. [rows, taps, H] when numpy asks.

    Args:
        tapped: [taps, R, H], of which they are a part.
        rows: Their places.
    """

    def __init__(self, tapped: Tensor, rows: Sequence[int]) -> None:
        self.tapped, self.rows = tapped, rows

    def leave(self) -> None:
        """Their place is about to be overwritten."""
        self.tapped, self.rows = picked(self.tapped, self.rows), range(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int, /) -> DeviceRow:
        return DeviceRow(self.tapped.transpose(0, 1), self.rows[row])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = self.tapped[:, list(self.rows)].transpose(0, 1)
        return rows.cpu().numpy().astype(dtype or np.float32, copy=bool(copy))


def picked(tapped: Tensor, rows: Sequence[int]) -> Tensor:
    """[taps, rows, H], a copy."""
    first = rows[0]
    if list(rows) == list(range(first, first + len(rows))):
        return tapped[:, first : first + len(rows)].clone()  # no index has to go to the device
    return tapped[:, list(rows)]
