"""The gauges add up to the pool, whoever holds its pages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from chatkv.kv.gauges import gauges
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable


def pool() -> PagePool:
    return PagePool(
        num_pages=20, page_size=4, num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32
    )


def filled(on: PagePool, rows: int) -> PageTable:
    table = PageTable(on)
    with table.reserve(rows) as reserved:
        reserved.keep(range(rows))
    return table


@given(st.lists(st.integers(1, 9), max_size=5), st.booleans(), st.booleans())
def test_they_add_up(lengths, forked, cached):
    on = pool()
    tables = [filled(on, rows) for rows in lengths]
    if cached:
        on.take()  # as the prefix cache holds one
    if forked and tables:
        tables.append(tables[0].fork())
    found = gauges(on, tables)
    page = on.payload_bytes(4)
    assert found.used_bytes + found.cached_bytes + found.free_bytes == 20 * page
    assert found.cached_bytes == cached * page
    pages = [-(-rows // 4) for rows in lengths]
    assert found.used_bytes == sum(pages) * page
    assert found.shared_bytes == (pages[0] * page if forked and pages else 0)
    expected = sum(lengths) / (4 * sum(pages)) if pages else None
    assert found.page_fill == expected


def test_an_idle_pool_is_cached_not_free():
    on = pool()
    table = filled(on, 6)
    for page in table.pages:
        on.share(page)
    table.release()
    found = gauges(on, [])
    assert (found.used_bytes, found.page_fill) == (0, None)
    assert found.cached_bytes == 2 * on.payload_bytes(4)
