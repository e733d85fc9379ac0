"""What a sliding window hides: which pages a table lets go of, and which a path goes on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.kv.layout import stages
from chatkv.kv.ops import Op
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable
from chatkv.kv.window import first_seen, most_pages

SIZE = 4
windows = st.integers(1, 14)


def pool_of(pages: int = 64) -> PagePool:
    return PagePool(num_pages=pages, page_size=SIZE, num_layers=1, num_kv_heads=1, head_dim=2)


def grow(table: PageTable, count: int) -> None:
    with table.reserve(count) as reserved:
        reserved.keep(range(count))


def seen_entries(table: PageTable, num_ids: int, window: int) -> list[int]:
    """Entries with a row that an id at `num_ids`, or one behind it, sees."""
    return [
        entry
        for entry, span in enumerate(table.spans())
        if any(span.first + row > num_ids - window for row in range(span.lo, span.hi))
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), windows, st.booleans())
def test_a_table_holds_what_the_next_id_sees(counts: list[int], window: int, forgets: bool) -> None:
    pool = pool_of()
    table, whole = PageTable(pool, window), PageTable(pool)
    for turn, count in enumerate(counts):
        for one in (table, whole):
            grow(one, count)
            one.let_go()
        ids = table.num_tokens
        if forgets and turn == len(counts) // 2:
            op = Op(ids, ((ids // 3, ids // 2),) if ids // 3 < ids // 2 else ())
            for one in (table, whole):
                one.forget(op)
                one.let_go()
        expected = seen_entries(whole, ids, window)
        # The page that is being filled stays, whatever is seen of it.
        filled = whole.num_entries - ((ids - whole.stage.base) % SIZE > 0)
        assert table.gone == min([filled, *expected])
        assert table.num_entries == whole.num_entries
        assert len(table.pages) == table.num_entries - table.gone
        assert table.entries()[: table.gone].tolist() == [0] * table.gone
        holes = table.holes()
        if holes is not None:
            assert not holes.valid[: table.gone].any()
        assert (table.num_live, table.spans()) == (whole.num_live, whole.spans())
    fork = table.fork()
    if table.first_cut <= table.num_tokens:
        expected = seen_entries(whole, table.first_cut, window)
        assert not expected or expected[0] >= table.gone
        fork.truncate(table.first_cut)
        assert fork.num_tokens == table.first_cut
    if table.gone and table.first_cut > 1:
        with pytest.raises(ValueError, match="Cannot cut"):
            table.truncate(table.first_cut - 1)
        with pytest.raises(ValueError, match="let go of"):
            table.slots(table.gone * SIZE - 1, table.length)
    for one in (fork, table, whole):
        one.release()
    assert pool.used == 0


@given(st.lists(st.booleans(), max_size=12), st.integers(2, 14), st.booleans())
def test_a_path_goes_on_from_the_last_place_whose_window_is_known(
    known: list[bool], window: int, forgets: bool
) -> None:
    ops = [Op(6, ((1, 3),))] if forgets else []
    stage = stages(ops, SIZE)[-1]

    def needed(pages: int) -> list[int]:
        stop = stage.base + pages * SIZE
        places = [
            range(span.first + span.lo, span.first + span.hi) for span in stage.filled(stop, SIZE)
        ]
        return [
            entry
            for entry, rows in enumerate(places)
            if any(place > stop - window for place in rows)
        ]

    closed = len(stage.spans)
    works = [
        pages
        for pages in range(len(known) + 1)
        if all(entry < closed or known[entry - closed] for entry in needed(pages))
    ]
    best = most_pages(stage, known, SIZE, window)
    assert best == max(works)
    seen = needed(best)
    assert first_seen(stage, best, SIZE, window) == (seen[0] if seen else closed + best)


def test_a_table_without_a_window_keeps_all(rows: Any) -> None:
    table = PageTable(rows.pool)
    grow(table, 9)
    table.let_go()
    assert (table.gone, table.first_cut, len(table.pages)) == (0, 0, 3)
