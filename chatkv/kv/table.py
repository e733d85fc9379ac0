"""The pages of one sequence, in order, and which of their rows the sequence still sees.

Knows slots, places and pages; no token ids and no keys. A place counts the ids of the sequence from
its start, forgotten ones too; a slot counts rows of the table from its start (`entry * page_size +
offset`), a physical slot rows of the pool (`page * page_size + offset`). The three differ once
something is forgotten. A page that others hold too is copied before this table writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from chatkv.kv.layout import Span, Stage
from chatkv.kv.ops import Op
from chatkv.kv.pool import PagePool

Turn = Callable[[Span, int], int]
"""Of a span and the page with its keys as first computed: a page with them turned to where the span
is now, held for the caller."""


@dataclass(frozen=True, slots=True)
class Holes:
    """What attention has to know of a table of which something was forgotten."""

    valid: npt.NDArray[np.int32]
    """[M, 2] rows lo <= row < hi of each entry that exist."""
    page_pos: npt.NDArray[np.int32]
    """[M] position of row 0 of each entry, maybe negative."""
    ahead: int
    """Position of a new row less its slot."""


class PageTable:
    """An empty table of `pool`. Holds one reference on each of its pages until `release`.

    Args:
        pool: Of its pages.
        window: Positions behind which no layer of the model sees anything; None if one sees all.
    """

    def __init__(self, pool: PagePool, window: int | None = None) -> None:
        self.pool, self.window = pool, window
        self.pages: list[int] = []
        """Page ids, one an entry from `gone` on. Read only."""
        self.gone = 0
        """First entries whose pages were let go of: no row will look there again. Read only."""
        self.length = 0
        """Slots filled, holes included. Read only; an open reservation is not counted."""
        self.stage = Stage()
        """Entries that an op closed, and where filling went on behind them. Read only."""
        self.originals: dict[int, int] = {}
        """By entry: the page whose keys were turned to make the entry's page. Held too."""
        self._ahead = 0
        """Place of an id behind the last op, less its slot."""
        self._edges: tuple[Stage, npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None
        """Of the closed entries, as `holes` says them: they are asked for at every step."""
        self._open: Reservation | None = None
        self._released = False

    @property
    def num_tokens(self) -> int:
        """Ids in place, forgotten ones too: the place of the next one."""
        return self.length + self._ahead

    @property
    def position(self) -> int:
        """Of the next id."""
        return self.num_tokens - self.stage.shift

    @property
    def num_live(self) -> int:
        """Ids in sight."""
        return self.stage.live + self.length - len(self.stage.spans) * self._size

    def spans(self) -> list[Span]:
        """All entries, the open page too."""
        return self.stage.filled(self.num_tokens, self._size)

    def slot(self, place: int) -> int:
        """The logical slot of an id behind the last op. Raises ValueError for an earlier one."""
        if place < self.stage.base:
            raise ValueError(f"The id at {place} is before the op at {self.stage.base}.")
        return place - self._ahead

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """[stop - start] physical slots of the logical ones, reserved ones included."""
        size, gone = self._size, self.gone
        if not gone * size <= start <= stop <= self.num_entries * size:
            here = f"{self.num_entries} pages, {gone} let go of"
            raise ValueError(f"Slots {start} to {stop} of a table with {here}.")
        first = start // size
        if first == (stop - 1) // size and start < stop:  # as most steps
            offset = (self.pages[first - gone] - first) * size
            return np.arange(start + offset, stop + offset, dtype=np.int64)
        pages = np.array(self.pages[first - gone : self.pool.pages_for(stop) - gone], np.int64)
        logical = np.arange(start - first * size, stop - first * size, dtype=np.int64)
        return pages[logical // size] * size + logical % size

    @property
    def num_entries(self) -> int:
        """M, of reserved pages and of those let go of too."""
        return self.gone + len(self.pages)

    def page(self, entry: int) -> int:
        """Of an entry that is here."""
        assert entry >= self.gone, f"the page of entry {entry} was let go of"
        return self.pages[entry - self.gone]

    def entries(self) -> npt.NDArray[np.int32]:
        """[M] the row of this sequence in an attention call, reserved pages included. What stands
        for a page that was let go of is any page."""
        return np.array([0] * self.gone + self.pages, dtype=np.int32)

    def holes(self) -> Holes | None:
        """What of the entries exists, reserved pages included; None if nothing was forgotten."""
        if not self.stage.ops:
            return None
        size, stage, closed, count = self._size, self.stage, len(self.stage.spans), self.num_entries
        if self._edges is None or self._edges[0] is not stage:
            self._edges = (stage, *_edges(stage))
        valid = np.empty((count, 2), np.int32)
        page_pos = np.empty(count, np.int32)
        _, valid[:closed], page_pos[:closed] = self._edges
        valid[closed:] = 0, size
        page_pos[closed:] = stage.base - stage.shift + size * np.arange(count - closed)
        valid[: self.gone] = 0
        return Holes(valid, page_pos, self._ahead - stage.shift)

    @contextmanager
    def reserve(self, n: int, spare: int = 0) -> Generator[Reservation]:
        """Room for `n` new rows behind `length`.

        On entering, pages are taken, and a last page that others hold is replaced by a copy. Rows
        not kept by the end, or all of them if anything raises, are given back.

        Args:
            n: Rows, 1 or more.
            spare: Rows behind them that may be written as well, and are never kept; none where
                they need a page and none is free.

        Raises:
            ValueError: `n` is below 1.
            OutOfPages: On entering; the table is as before.
        """
        self._check_idle("reserve")
        if n < 1:
            raise ValueError(f"A reservation of {n} rows.")
        before, first, kept = self.pages, self.length, 0
        full = first // self._size - self.gone
        if self.pool.pages_for(first + n + spare) > self.pool.pages_for(first + n):
            spare = spare if self.pool.free > 1 else 0
        shared = [page for page in before[full:] if self.pool.refs(page) > 1]
        untouched = len(before) - len(shared)
        taken = self.pool.take(self.pool.pages_for(first + n + spare) - self.gone - untouched)
        try:
            for src, dst in zip(shared, taken, strict=False):
                self.pool.copy_into(src, dst)
            self.pages = before[:untouched] + taken
            reservation = self._open = Reservation(self, n, spare)
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
        fork = PageTable(self.pool, self.window)
        fork.pages = [self.pool.share(page) for page in self.pages]
        fork.originals = {entry: self.pool.share(page) for entry, page in self.originals.items()}
        fork.length, fork.stage, fork._ahead = self.length, self.stage, self._ahead
        fork.gone = self.gone
        return fork

    def let_go(self) -> None:
        """Give back the pages that no row from the next id on sees."""
        self._check_idle("let_go")
        if self.window is None:
            return
        unseen = self.position - self.window
        while self.pages and self._newest(self.gone) <= unseen:
            self.pool.release(self.pages.pop(0))
            self.gone += 1

    @property
    def first_cut(self) -> int:
        """The fewest ids, but for none, that `truncate` can leave: all that the next one would see
        is here."""
        if self.window is None or not self.gone:
            return self.stage.base
        return max(self.stage.base, self._newest(self.gone - 1) + self.stage.shift + self.window)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` ids; pages without any go back.

        Raises:
            ValueError: `num_tokens` is below 0, above the present one, or between 0 and
                `first_cut`: what an op dropped, or a window hid, is not here any more.
        """
        self._check_idle("truncate")
        if not 0 <= num_tokens <= self.num_tokens or 0 < num_tokens < self.first_cut:
            raise ValueError(f"Cannot cut {self.num_tokens} ids to {num_tokens}.")
        if num_tokens < self.first_cut:
            self._empty()
        else:
            self._shrink(num_tokens - self._ahead)

    def adopt(
        self,
        pages: Sequence[int],
        num_tokens: int,
        stage: Stage | None = None,
        originals: Mapping[int, int] | None = None,
        gone: int = 0,
    ) -> None:
        """Fill an empty table with pages whose references the caller took, and now hands over.

        The last page may be shared and may hold more rows than `num_tokens` needs.

        Args:
            pages: Those of the stage's spans, then those filled behind its base; from `gone` on.
            num_tokens: Ids in place.
            stage: What an op closed; None if there was none.
            originals: By entry, pages with keys as first computed, where `pages` has turned ones.
            gone: First entries that no id to come sees.

        Raises:
            ValueError: The table is not empty, or `num_tokens` does not end in the last page. The
                references stay with the caller then.
        """
        self._check_idle("adopt")
        stage = stage or Stage()
        if self.pages or self.length:
            raise ValueError(f"The table holds {self.length} slots already.")
        closed = len(stage.spans)
        if self.pool.pages_for(num_tokens - stage.base) + closed != gone + len(pages):
            raise ValueError(f"{len(pages)} pages of {self._size} for {num_tokens} ids.")
        self.pages, self.stage, self.gone = list(pages), stage, gone
        self.originals = dict(originals or {})
        self._ahead = stage.base - closed * self._size
        self.length = num_tokens - self._ahead

    def forget(self, op: Op, turn: Turn | None = None) -> None:
        """Let go of what `op` drops; the next id begins a new page. No row is moved or copied.

        Args:
            op: At the place of the next id.
            turn: Makes pages for spans whose positions change; needed if the op rebases.

        Raises:
            ValueError: The op is for another place.
            OutOfPages: No room for pages to turn; the table is empty then. What leaves goes first,
                so that no more is needed at once than each page in sight and its original.
        """
        self._check_idle("forget")
        if op.at != self.num_tokens:
            raise ValueError(f"An op at {op.at}, with {self.num_tokens} ids in place.")
        stage, entries = self.stage.narrowed(self.spans(), op)
        gone = sum(entry < self.gone for entry in entries)
        pages: dict[int, int] = {}
        originals: dict[int, int] = {}
        for index, (span, entry) in enumerate(zip(stage.spans, entries, strict=True)):
            if index < gone:
                continue
            page = self.page(entry)
            source = self.originals.get(entry, page)
            moves = span.shift != self._shift_of(entry)
            if not moves:
                pages[index] = self.pool.share(page)
            if moves or page != source:
                originals[index] = self.pool.share(source)
        self._empty()
        try:
            for index, span in enumerate(stage.spans):
                if index >= gone and index not in pages:
                    assert turn is not None, f"{op} moves positions"
                    pages[index] = turn(span, originals[index])
        except BaseException:  # a Ctrl-C too: no table owns these pages yet
            self._release([*pages.values(), *originals.values()])
            raise
        self.pages = [pages[index] for index in range(gone, len(stage.spans))]
        self.originals, self.stage, self.gone = originals, stage, gone
        self.length = len(stage.spans) * self._size
        self._ahead = op.at - self.length

    def release(self) -> None:
        """Give all pages back. The table is of no use afterwards."""
        self._check_idle("release")
        self._empty()
        self._released = True

    @property
    def _size(self) -> int:
        return self.pool.page_size

    def _newest(self, entry: int) -> int:
        """The last position that an entry has rows for."""
        spans, stage = self.stage.spans, self.stage
        if entry < len(spans):
            return spans[entry].first + spans[entry].hi - 1 - spans[entry].shift
        return stage.base + (entry - len(spans) + 1) * self._size - 1 - stage.shift

    def _shift_of(self, entry: int) -> int:
        spans = self.stage.spans
        return spans[entry].shift if entry < len(spans) else self.stage.shift

    def _empty(self) -> None:
        self._release([*self.pages, *self.originals.values()])
        self.pages, self.originals, self.stage = [], {}, Stage()
        self.length = self._ahead = self.gone = 0

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.pool.release(page)

    def _shrink(self, length: int) -> None:
        kept = max(self.pool.pages_for(length), len(self.stage.spans)) - self.gone
        # The first one last, so that whoever takes pages next gets the same ones in this order.
        self._release(self.pages[kept:][::-1])
        del self.pages[kept:]
        self.length = length

    def _check_idle(self, verb: str) -> None:
        assert not self._released, f"{verb} of a released table"
        assert self._open is None, f"{verb} with {self._open} open"


def _edges(stage: Stage) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """[C, 2] rows that exist and [C] position of row 0, of the closed entries."""
    numbers = np.array(stage.spans, np.int32).reshape(-1, 5)
    return numbers[:, 1:3], numbers[:, 0] - numbers[:, 4]


class Reservation:
    """New rows of a table: written by a forward pass, then partly kept. Made by `reserve`."""

    def __init__(self, table: PageTable, n: int, spare: int = 0) -> None:
        self._table = table
        self.first = table.length
        """Logical slot of row 0."""
        self.reach = table.slots(self.first, self.first + n + spare)
        """[n + spare] int64, physical slots, those of the spare rows too."""
        self.slots = self.reach[:n]
        """[n] int64, physical slot of each row."""
        self.open = True
        """Whether rows can still be kept."""

    def __repr__(self) -> str:
        return f"Reservation({len(self.slots)} rows from slot {self.first})"

    def keep(self, rows: Sequence[int], *, moved: bool = False) -> None:
        """Move these rows to the slots behind `first`, in order, and count them in. Once only.

        Args:
            rows: Rising from 0, the root's row, which is in place already. Below the rows reserved.
            moved: They are there already: whoever chose them has moved them.

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
        still = (
            len(rows) if in_place or moved else sum(row == index for index, row in enumerate(rows))
        )
        if still < len(rows):
            src = torch.as_tensor(self.slots[np.array(rows[still:])])
            self._table.pool.compact(src, torch.as_tensor(self.slots[still : len(rows)]))
        self._table.length += len(rows)
