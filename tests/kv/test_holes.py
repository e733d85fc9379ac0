"""A table that let go of rows: which are left, where they stand, what was given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chatkv.errors import OutOfPages
from chatkv.kv.layout import Span, stages
from chatkv.kv.ops import Op, check_ops, live_ranges, next_position
from chatkv.kv.table import PageTable

SIZE = 4
EDGES = (0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1)


def seen(rows: Any, table: PageTable) -> list[tuple[float, int]]:
    """(number in the row, position) of all that attention may look at, in order."""
    holes = table.holes()
    assert holes is not None
    assert len(holes.valid) == len(holes.page_pos) == len(table.pages)
    found: list[tuple[float, int]] = []
    for slot in range(table.length):
        entry, offset = divmod(slot, SIZE)
        if holes.valid[entry, 0] <= offset < holes.valid[entry, 1]:
            (physical,) = table.slots(slot, slot + 1)
            found += [(rows.read([physical])[0], int(holes.page_pos[entry]) + offset)]
    return found


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("stop", EDGES)
@pytest.mark.parametrize("at", [9, 11, 12])
def test_rows_and_positions_at_page_edges(rows: Any, start: int, stop: int, at: int) -> None:
    if not start < stop <= at:
        return
    table = PageTable(rows.pool)
    rows.append(table, list(range(at)))
    table.forget(Op(at, ((start, stop),)))
    left = [i for i in range(at) if not start <= i < stop]
    assert table.num_tokens == table.position == at
    assert table.num_live == len(left)
    assert len(set(table.pages)) == len({i // SIZE for i in left}) == rows.pool.used
    assert table.length % SIZE == 0, "the next id begins a page"
    rows.append(table, [100, 101])
    assert seen(rows, table) == [(i, i) for i in left] + [(100, at), (101, at + 1)]
    holes = table.holes()
    assert holes is not None
    assert holes.ahead == at + 2 - table.length
    assert table.slot(at) == table.length - 2
    with pytest.raises(ValueError, match="before the op"):
        table.slot(at - 1)
    table.truncate(at + 1)
    assert seen(rows, table)[-1] == (100, at)
    with pytest.raises(ValueError, match="Cannot cut"):
        table.truncate(at - 1)
    fork = table.fork()
    table.release()
    rows.append(fork, [102])
    assert seen(rows, fork)[-2:] == [(100, at), (102, at + 1)]
    fork.release()
    assert rows.pool.free == rows.pool.num_pages


def test_a_rebase_counts_from_nought(rows: Any) -> None:
    table = PageTable(rows.pool)
    rows.append(table, list(range(10)))
    turned: list[tuple[Span, int]] = []

    def turn(span: Span, page: int) -> int:
        turned.append((span, page))
        return rows.pool.copy(page)

    table.forget(Op(10, ((1, 3), (5, 9)), rebase=True), turn)
    assert [(span.first, span.lo, span.shift) for span, _ in turned] == [
        (0, 3, 2),
        (4, 0, 2),
        (8, 1, 6),
    ]
    rows.append(table, [10])
    assert seen(rows, table) == [(0, 0), (3, 1), (4, 2), (9, 3), (10, 4)]
    assert table.position == 5
    assert next_position([Op(10, ((1, 3), (5, 9)), rebase=True)], 11) == 5
    assert sorted(table.originals) == [1, 2, 3]
    table.release()
    assert rows.pool.free == rows.pool.num_pages


def test_no_room_to_turn_leaves_nothing_behind(rows: Any) -> None:
    table = PageTable(rows.pool)
    rows.append(table, list(range(40)))

    def turn(span: Span, page: int) -> int:
        return rows.pool.copy(page)

    with pytest.raises(OutOfPages):
        table.forget(Op(40, ((1, 2),), rebase=True), turn)
    assert (table.pages, table.num_tokens) == ([], 0)
    assert rows.pool.free == rows.pool.num_pages
    other = PageTable(rows.pool)
    rows.append(other, [1, 2])
    with pytest.raises(ValueError, match="An op at 1"):
        other.forget(Op(1, ((0, 1),)))


def test_layouts_are_what_tables_come_to(rows: Any) -> None:
    ops = [Op(6, ((2, 4),)), Op(6, ((0, 1),)), Op(9, ((4, 7),), rebase=True), Op(15, ((10, 12),))]
    check_ops(ops, 15)
    table = PageTable(rows.pool)
    for op in ops:
        rows.append(
            table, list(range(table.num_tokens, op.at))
        ) if op.at > table.num_tokens else None
        table.forget(op, lambda _, page: rows.pool.share(page))
    assert table.stage == stages(ops, SIZE)[-1]
    left = [i for a, b in live_ranges(ops, 15) for i in range(a, b)]
    assert [number for number, _ in seen(rows, table)] == left
    ahead = np.diff([position for _, position in seen(rows, table)])
    assert (ahead > 0).all()
