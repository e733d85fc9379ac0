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
    for table in tables:
        left = table.length
        for page in table.pages:
            holders[page] += 1
            rows[page] = max(rows.get(page, 0), min(pool.page_size, max(0, left)))
            left -= pool.page_size
    page_bytes, used = pool.payload_bytes(pool.page_size), len(holders)
    return Gauges(
        used_bytes=used * page_bytes,
        shared_bytes=sum(count > 1 for count in holders.values()) * page_bytes,
        cached_bytes=(pool.used - used) * page_bytes,
        free_bytes=pool.free * page_bytes,
        page_fill=sum(rows.values()) / (used * pool.page_size) if used else None,
    )
