"""How the pool's pages are held right now. Knows pages and holders; counts, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable


@dataclass(frozen=True, slots=True)
class Gauges:
    """Bytes of the pool by who holds them; what they add up to is the pool."""

    used_bytes: int
    """Of pages that a live table holds. When all are idle it moves to `cached_bytes`."""
    shared_bytes: int
    """Of those, the ones that more than one live table holds."""
    cached_bytes: int
    """Of pages that are kept for reuse and that no live table holds."""
    free_bytes: int
    page_fill: float | None
    """Valid rows over slots of used pages: what short tails cost. None if none is used."""


def gauges(pool: PagePool, tables: Iterable[PageTable]) -> Gauges:
    """Of a pool with these live tables."""
    holders: Counter[int] = Counter()
    rows: dict[int, int] = {}
    size = pool.page_size
    for table in tables:
        holes = table.holes()
        for entry, page in enumerate(table.pages, table.gone):
            low, high = (0, size) if holes is None else map(int, holes.valid[entry])
            count = max(0, min(high, table.length - entry * size) - low)
            # A page whose keys were turned keeps the one that it was made from.
            for held in {page, table.originals.get(entry, page)}:
                holders[held] += 1
                rows[held] = max(rows.get(held, 0), count)
    page_bytes, used = pool.payload_bytes(pool.page_size), len(holders)
    return Gauges(
        used_bytes=used * page_bytes,
        shared_bytes=sum(count > 1 for count in holders.values()) * page_bytes,
        cached_bytes=(pool.used - used) * page_bytes,
        free_bytes=pool.free * page_bytes,
        page_fill=sum(rows.values()) / (used * pool.page_size) if used else None,
    )
