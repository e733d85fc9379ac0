"""A small pool whose rows are plain numbers, so that a test can say what each slot must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable

SHAPE = {"page_size": 4, "num_layers": 2, "num_kv_heads": 2, "head_dim": 2}


class Rows:
    """A poisoned pool, and one number a slot: what each layer, head and channel holds of it."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages=num_pages, dtype=torch.float32, **SHAPE)
        self.pool.data.fill_(torch.nan)
        self.data = self.pool.data.numpy()
        # Added to the number, so that a row in the wrong layer, kind, head or channel is seen.
        self.place = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2) / 16

    def write(self, slots: Iterable[int], values: Iterable[float]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.data[:, slot // 4, :, :, slot % 4] = self.place + value

    def read(self, slots: Iterable[int]) -> list[float]:
        """The numbers in these physical slots; NaN where a row is torn or unwritten."""
        numbers: list[float] = []
        for slot in slots:
            rows = self.data[:, slot // 4, :, :, slot % 4] - self.place
            numbers.append(rows.flat[0].item() if (rows == rows.flat[0]).all() else np.nan)
        return numbers

    def of(self, table: PageTable) -> list[float]:
        return self.read(table.slots(0, table.length))

    def append(self, table: PageTable, values: list[float]) -> None:
        with table.reserve(len(values)) as reservation:
            self.write(reservation.slots, values)
            reservation.keep(range(len(values)))

    def poison_free_pages(self) -> None:
        for page in range(self.pool.num_pages):
            if self.pool.refs(page) == 0:
                self.data[:, page] = np.nan


@pytest.fixture
def make_rows() -> Callable[[int], Rows]:
    """`make_rows(num_pages)`: a class made here, since test folders are no packages."""
    return Rows


@pytest.fixture
def rows() -> Rows:
    return Rows(12)
