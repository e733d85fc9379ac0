"""Where the ids of a path lie in the entries of its page table: a function of places and ops alone.

Ids fill pages from `base` on. An op closes the page it falls in: that page stays short, the next id
opens a new one. What it drops leaves the entries: whole ones go, others are narrowed, nothing is
moved. Plain numbers; no page, no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from chatkv.kv.ops import Op


class Span(NamedTuple):
    """One entry that no id is added to any more: rows lo <= row < hi of a page."""

    first: int
    """Place of the id in row 0."""
    lo: int
    hi: int
    own: int
    """Place less position of its rows when they were computed."""
    shift: int
    """Place less position of its rows now; where it is not `own`, keys were turned."""

    @property
    def size(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True, slots=True)
class Stage:
    """The entries when the id at `base` is computed: the spans, then pages filled from `base`."""

    spans: tuple[Span, ...] = ()
    base: int = 0
    shift: int = 0
    """Place less position of the ids from `base` on."""
    ops: int = 0
    """How many ops of the path led here."""
    live: int = 0
    """Ids in the spans."""

    def filled(self, num_ids: int, page_size: int) -> list[Span]:
        """All entries when `num_ids` ids are in place, the open page too."""
        starts = range(self.base, num_ids, page_size)
        shift = self.shift
        return [
            *self.spans,
            *(Span(at, 0, min(page_size, num_ids - at), shift, shift) for at in starts),
        ]

    def after(self, op: Op, page_size: int) -> Stage:
        """The stage that begins with this op."""
        return self.narrowed(self.filled(op.at, page_size), op)[0]

    def narrowed(self, spans: Sequence[Span], op: Op) -> tuple[Stage, list[int]]:
        """The stage that begins with this op, and which of `spans` each of its entries was.

        A gap inside a page leaves two entries of the same page.
        """
        kept: list[Span] = []
        sources: list[int] = []
        for index, span in enumerate(spans):
            for lo, hi in _rows(span, op):
                kept.append(span._replace(lo=lo, hi=hi))
                sources.append(index)
        shift, live = self.shift, 0
        for index, span in enumerate(kept):
            if op.rebase:
                kept[index] = span._replace(shift=span.first + span.lo - live)
            live += span.size
        if op.rebase:
            shift = op.at - live
        return Stage(tuple(kept), op.at, shift, self.ops + 1, live), sources


def stages(ops: Sequence[Op], page_size: int) -> list[Stage]:
    """The stage before any op, then the one behind each op. Raises ValueError for a restart."""
    known = tuple(ops)
    return [_stage(known[:count], page_size) for count in range(len(known) + 1)]


@lru_cache(maxsize=1024)
def _stage(ops: tuple[Op, ...], page_size: int) -> Stage:
    # Kept: each turn of a long conversation asks again for those before it.
    if not ops:
        return Stage()
    if ops[-1].restart:
        raise ValueError("A restart is a path of its own: flatten it first.")
    return _stage(ops[:-1], page_size).after(ops[-1], page_size)


def _rows(span: Span, op: Op) -> list[tuple[int, int]]:
    """What the op leaves of the rows of a span, as ranges of rows."""
    rows: list[tuple[int, int]] = []
    lo, hi = span.lo, span.hi
    for start, stop in op.drop:
        start, stop = start - span.first, stop - span.first
        if stop <= lo or start >= hi:
            continue
        if start > lo:
            rows.append((lo, start))
        lo = min(stop, hi)
    if lo < hi:
        rows.append((lo, hi))
    return rows
