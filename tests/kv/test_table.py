"""A table's rows stay what was kept, whoever else holds its pages and whatever raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chatkv.errors import OutOfPages
from chatkv.kv.table import PageTable


class Stopped(Exception):
    """What a forward pass may raise."""


def test_reservation_across_page_borders(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2, 3])
    rows.append(table, [4, 5, 6, 7, 8, 9])
    assert rows.of(table) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (table.length, len(table.pages), rows.pool.used) == (9, 3, 3)
    assert table.entries().tolist() == table.pages
    assert table.entries().dtype == np.int32


def test_slots_are_physical_and_count_reserved_ones(rows: Any):
    table = PageTable(rows.pool)
    rows.pool.take(3)
    with table.reserve(6) as reservation:
        expected = [12, 13, 14, 15, 16, 17]
        assert reservation.first == 0
        assert reservation.slots.tolist() == expected
        assert reservation.slots.dtype == np.int64
        assert table.slots(0, 6).tolist() == expected
        assert table.entries().tolist() == [3, 4]
        assert table.length == 0
        reservation.keep(range(5))
        assert table.length == 5
    assert table.slots(3, 5).tolist() == [15, 16]
    assert table.slots(8, 8).tolist() == []
    with pytest.raises(ValueError, match="2 pages"):
        table.slots(0, 9)


@pytest.mark.parametrize("length", range(6))
@pytest.mark.parametrize(
    "kept", [[0], [0, 1, 2], [0, 15], [0, 3, 4, 9, 15], [0, 1, 5, 6, 7, 14], list(range(16))]
)
def test_tree_of_sixteen_rows_keeps_its_path(rows: Any, length: int, kept: list[int]):
    table = PageTable(rows.pool)
    history = [100.0 + index for index in range(length)]
    if history:
        rows.append(table, history)
    with table.reserve(16) as reservation:
        rows.write(reservation.slots, range(16))
        reservation.keep(kept)
    assert rows.of(table) == history + kept
    assert rows.pool.used == len(table.pages) == rows.pool.pages_for(length + len(kept))


@pytest.mark.parametrize("ending", ["nothing kept", "raised", "raised after keep"])
def test_what_is_not_kept_is_given_back(rows: Any, ending: str):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2, 3, 4, 5])
    other = table.fork()
    pages = list(table.pages)
    try:
        with table.reserve(9) as reservation:
            assert table.pages[1] != pages[1]
            rows.write(reservation.slots, range(9))
            if ending == "raised after keep":
                reservation.keep([0, 3, 5])
            if ending != "nothing kept":
                raise Stopped
    except Stopped:
        assert ending != "nothing kept"
    assert (table.pages, table.length) == (pages, 5)
    assert rows.of(table) == rows.of(other) == [1, 2, 3, 4, 5]
    assert rows.pool.used == 2
    rows.append(table, [6])
    assert rows.of(table) == [1, 2, 3, 4, 5, 6]


def test_fork_shares_until_one_side_writes(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2, 3, 4, 5, 6])
    fork = table.fork()
    assert rows.pool.used == 2
    rows.append(fork, [70, 80, 90])
    assert rows.pool.used == 4
    assert fork.pages[0] == table.pages[0]
    assert rows.of(table) == [1, 2, 3, 4, 5, 6]
    assert rows.of(fork) == [1, 2, 3, 4, 5, 6, 70, 80, 90]
    tail = table.pages[1]
    rows.append(table, [7])
    assert table.pages[1] == tail, "the last holder writes in place"
    assert rows.of(fork)[6] == 70


def test_fork_at_a_page_border_copies_nothing(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2, 3, 4])
    fork = table.fork()
    rows.append(fork, [5])
    rows.append(table, [6])
    assert fork.pages[0] == table.pages[0]
    assert rows.pool.used == 3
    assert (rows.of(table)[-1], rows.of(fork)[-1]) == (6, 5)


def test_two_forks_in_one_batch(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2])
    fork = table.fork()
    with table.reserve(3) as mine, fork.reserve(3) as other:
        assert not set(mine.slots.tolist()) & set(other.slots.tolist())
        rows.write(mine.slots, [3, 4, 5])
        rows.write(other.slots, [30, 40, 50])
        mine.keep([0, 2])
        other.keep([0, 1])
    assert (rows.of(table), rows.of(fork)) == ([1, 2, 3, 5], [1, 2, 30, 40])
    assert rows.pool.used == 2


def test_cut_in_mid_page_then_write(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2, 3, 4, 5, 6, 7])
    fork = table.fork()
    table.truncate(2)
    assert (table.length, len(table.pages), rows.pool.used) == (2, 1, 2)
    rows.append(table, [30])
    assert rows.of(table) == [1, 2, 30]
    assert rows.of(fork) == [1, 2, 3, 4, 5, 6, 7]
    table.truncate(0)
    assert table.pages == []
    with pytest.raises(ValueError, match="Cannot cut 0 ids to 1"):
        table.truncate(1)


def test_out_of_pages_gives_everything_back(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2, 3, 4, 5])
    fork = table.fork()
    pages = list(table.pages)
    rows.pool.take(8)  # two are left: enough for the new rows, not for the copy of the tail too
    with pytest.raises(OutOfPages, match="Need 3 pages of 4 tokens, but 2"), table.reserve(11):
        pass
    assert (table.pages, table.length, rows.pool.free) == (pages, 5, 2)
    assert [rows.pool.refs(page) for page in pages] == [2, 2]
    fork.release()
    rows.append(table, [6] * 11)
    assert rows.pool.free == 0


def test_a_copy_that_fails_gives_everything_back(rows: Any, monkeypatch: pytest.MonkeyPatch):
    table = PageTable(rows.pool)
    rows.append(table, [1, 2])
    fork = table.fork()

    def fail(src: int, dst: int) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(rows.pool, "copy_into", fail)
        with pytest.raises(Stopped):
            second(table)
    assert rows.pool.used == 1
    assert table.pages == fork.pages
    rows.append(table, [3])
    assert rows.of(table) == [1, 2, 3]


def test_nothing_else_while_a_reservation_is_open(rows: Any):
    table = PageTable(rows.pool)
    with table.reserve(1) as reservation:
        for action in (table.fork, table.release, lambda: table.truncate(0), lambda: second(table)):
            with pytest.raises(AssertionError, match="1 rows from slot 0"):
                action()
        reservation.keep([0])
        with pytest.raises(AssertionError, match="twice"):
            reservation.keep([0])
    with pytest.raises(AssertionError, match="closed"):
        reservation.keep([0])
    assert (table.length, rows.pool.used) == (1, 1)


def second(table: PageTable) -> None:
    with table.reserve(1):
        pass


@pytest.mark.parametrize("kept", [[], [1], [0, 2, 1], [0, 1, 1], [0, 4], [-1, 0]], ids=str)
def test_rows_out_of_order_are_refused(rows: Any, kept: list[int]):
    table = PageTable(rows.pool)
    with pytest.raises(ValueError, match="Cannot keep rows"), table.reserve(4) as reservation:
        reservation.keep(kept)
    assert (table.length, rows.pool.used) == (0, 0)


def test_no_empty_reservation(rows: Any):
    with pytest.raises(ValueError, match="0 rows"), PageTable(rows.pool).reserve(0):
        pass


def test_release_is_final(rows: Any):
    table = PageTable(rows.pool)
    rows.append(table, [1] * 9)
    table.release()
    assert rows.pool.free == 12
    for action in (table.release, table.fork, lambda: second(table)):
        with pytest.raises(AssertionError, match="released"):
            action()


def test_adopt_takes_over_references(rows: Any):
    source = PageTable(rows.pool)
    rows.append(source, [1, 2, 3, 4, 5, 6, 7])
    pages = [rows.pool.share(page) for page in source.pages]
    table = PageTable(rows.pool)
    for length in (0, 4, 9):
        with pytest.raises(ValueError, match="2 pages of 4"):
            table.adopt(pages, length)
    table.adopt(pages, 6)
    assert rows.of(table) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="6 slots already"):
        table.adopt([], 0)
    rows.append(table, [70])
    assert rows.of(table) == [1, 2, 3, 4, 5, 6, 70]
    assert rows.of(source) == [1, 2, 3, 4, 5, 6, 7]
    table.release()
    source.release()
    assert rows.pool.free == 12
