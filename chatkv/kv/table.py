"""The pages of one sequence, in order, and how much of them is filled.

Knows slots and pages; no token ids and no keys. A slot counts from the start of the sequence
(`entry * page_size + offset`); a physical slot from the start of the pool (`page * page_size +
offset`). A page that others hold too is copied before this table writes to it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from chatkv.kv.pool import PagePool


class PageTable:
    """An empty table of `pool`. Holds one reference on each of its pages until `release`."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        """Page ids, one for each `page_size` slots begun. Read only."""
        self.length = 0
        """Slots filled. Read only; an open reservation is not counted."""
        self._open: Reservation | None = None
        self._released = False

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """[stop - start] physical slots of the logical ones, reserved ones included."""
        size = self.pool.page_size
        if not 0 <= start <= stop <= len(self.pages) * size:
            raise ValueError(f"Slots {start} to {stop} of a table with {len(self.pages)} pages.")
        first = start // size
        pages = np.array(self.pages[first : self.pool.pages_for(stop)], dtype=np.int64)
        logical = np.arange(start - first * size, stop - first * size, dtype=np.int64)
        return pages[logical // size] * size + logical % size

    def entries(self) -> npt.NDArray[np.int32]:
        """[len(pages)] the row of this sequence in an attention call, reserved pages included."""
        return np.array(self.pages, dtype=np.int32)

    @contextmanager
    def reserve(self, n: int) -> Generator[Reservation]:
        """Room for `n` new rows behind `length`.

        On entering, pages are taken, and a last page that others hold is replaced by a copy. Rows
        not kept by the end, or all of them if anything raises, are given back.

        Raises:
            ValueError: `n` is below 1.
            OutOfPages: On entering; the table is as before.
        """
        self._check_idle("reserve")
        if n < 1:
            raise ValueError(f"A reservation of {n} rows.")
        before, first, kept = self.pages, self.length, 0
        full = first // self.pool.page_size
        shared = [page for page in before[full:] if self.pool.refs(page) > 1]
        untouched = len(before) - len(shared)
        taken = self.pool.take(self.pool.pages_for(first + n) - untouched)
        try:
            for src, dst in zip(shared, taken, strict=False):
                self.pool.copy_into(src, dst)
            self.pages = before[:untouched] + taken
            reservation = self._open = Reservation(self, n)
            yield reservation
            kept = self.length - first
        finally:
            if self._open is not None:
                self._open.open, self._open = False, None
            if kept:
                # The copy stays and the original goes: until here a failure could go back to it.
                for page in shared:
                    self.pool.release(page)
                self._shrink(self.length)
            else:
                self.pages, self.length = before, first
                for page in taken:
                    self.pool.release(page)

    def fork(self) -> PageTable:
        """A second table with the same content. Pages are shared until one of the two writes."""
        self._check_idle("fork")
        fork = PageTable(self.pool)
        fork.pages = [self.pool.share(page) for page in self.pages]
        fork.length = self.length
        return fork

    def truncate(self, length: int) -> None:
        """Keep the first `length` slots; pages without any go back.

        Raises:
            ValueError: `length` is below 0 or above the present one.
        """
        self._check_idle("truncate")
        if not 0 <= length <= self.length:
            raise ValueError(f"Cannot cut {self.length} slots to {length}.")
        self._shrink(length)

    def adopt(self, pages: Sequence[int], length: int) -> None:
        """Fill an empty table with pages whose references the caller took, and now hands over.

        The last page may be shared and may hold more rows than `length` needs.

        Raises:
            ValueError: The table is not empty, or `length` does not end in the last page. The
                references stay with the caller then.
        """
        self._check_idle("adopt")
        if self.pages:
            raise ValueError(f"The table holds {self.length} slots already.")
        if self.pool.pages_for(length) != len(pages):
            raise ValueError(f"{len(pages)} pages of {self.pool.page_size} for {length} slots.")
        self.pages = list(pages)
        self.length = length

    def release(self) -> None:
        """Give all pages back. The table is of no use afterwards."""
        self._check_idle("release")
        self._shrink(0)
        self._released = True

    def _shrink(self, length: int) -> None:
        kept = self.pool.pages_for(length)
        for page in self.pages[kept:]:
            self.pool.release(page)
        del self.pages[kept:]
        self.length = length

    def _check_idle(self, verb: str) -> None:
        assert not self._released, f"{verb} of a released table"
        assert self._open is None, f"{verb} with {self._open} open"


class Reservation:
    """New rows of a table: written by a forward pass, then partly kept. Made by `reserve`."""

    def __init__(self, table: PageTable, n: int) -> None:
        self._table = table
        self.first = table.length
        """Logical slot of row 0."""
        self.slots = table.slots(self.first, self.first + n)
        """[n] int64, physical slot of each row."""
        self.open = True
        """Whether rows can still be kept."""

    def __repr__(self) -> str:
        return f"Reservation({len(self.slots)} rows from slot {self.first})"

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows to the slots behind `first`, in order, and count them in. Once only.

        Args:
            rows: Rising from 0, the root's row, which is in place already. Below the rows reserved.

        Raises:
            ValueError: `rows` is empty or breaks the order. Nothing is kept.
        """
        assert self.open, f"keep with {self} closed"
        assert self._table.length == self.first, f"keep twice in {self}"
        # rows[i] >= i follows from the order, so that no row is overwritten before it moves.
        in_place = rows == range(len(rows))  # compared without a look at each row
        rising = in_place or all(a < b for a, b in pairwise(rows))
        if len(rows) == 0 or rows[0] != 0 or not rising or rows[-1] >= len(self.slots):
            raise ValueError(f"Cannot keep rows {list(rows)} of {len(self.slots)}.")
        still = len(rows) if in_place else sum(row == index for index, row in enumerate(rows))
        if still < len(rows):
            src = torch.as_tensor(self.slots[np.array(rows[still:])])
            self._table.pool.compact(src, torch.as_tensor(self.slots[still : len(rows)]))
        self._table.length += len(rows)
