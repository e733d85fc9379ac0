"""Every column of a stored page, changed one bit at a time: the page is refused, or it is equal."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from sessions.pagefile import SCHEMA
from sessions.upkeep import verify

COLUMNS = {
    "pages": (
        *("id", "key", "parent_key", "model_fp", "chain_index", "first_position", "num_tokens"),
        *("token_ids", "sampled", "origin", "head_crc", "crc", "num_bytes", "last_used"),
        "quarantined",
    ),
    "page_data": ("page_id", "data"),
}
CASES = [(table, column) for table, columns in COLUMNS.items() for column in columns]
HARMLESS = {"id", "last_used", "page_id"}
"""A change of these can leave the page as it was: it tells when a page goes, or where rows lie."""


def test_the_columns_are_all():
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in SCHEMA:
            db.execute(statement)
        for table, columns in COLUMNS.items():
            assert [row[1] for row in db.execute(f"PRAGMA table_info({table})")] == list(columns)


def flips(value: object) -> list[object]:
    """The value with one bit changed, for bits all over it; text stays ASCII."""
    match value:
        case None:
            return ["", "a reason"]
        case int():
            return [value ^ 1 << bit for bit in (0, 1, 2, 7, 15, 31, 62)]
        case str():
            raw = value.encode()
            return [
                (raw[:at] + bytes([byte ^ 1 << bit]) + raw[at + 1 :]).decode()
                for at, byte in enumerate(raw)
                for bit in (0, 5)
            ]
        case bytes():
            step = max(1, len(value) // 8)
            return [
                value[:at] + bytes([value[at] ^ 1 << at // step % 8]) + value[at + 1 :]
                for at in range(0, len(value), step)
            ]
    raise AssertionError(value)


@pytest.fixture
def stored(pages, maker):
    """Four pages, the last one a tail of ids the model chose, in an open store."""
    images = maker.chain(pages.root, list(range(12)))
    images.append(maker.image(images[-1].key, 3, (12, 13), sampled=2))
    pages.write(images)
    return images


@pytest.fixture
def behind(kv_path, stored):
    """A connection behind the store's back, which like damage asks for no constraint."""
    with closing(sqlite3.connect(kv_path, isolation_level=None)) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("PRAGMA synchronous = OFF")
        yield db


def change(db, table: str, column: str, row: int, value: object) -> bool:
    """Change a column; False if no row can hold that."""
    where = "id" if table == "pages" else "page_id"
    try:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where} = ?", (value, row))
    except sqlite3.IntegrityError:  # two rows of one number
        return False
    return True


def serves_only(pages, images) -> int:
    """Read in every way there is: what is served is what was stored. How many pages were."""
    by_key = {image.key: image for image in images}
    heads = list(pages.find(list(by_key)).values())
    for parent in (pages.root, *by_key):
        heads += pages.children(parent)
    # One by one: a run stops at the first that is missing.
    found = [image for key in by_key for image in pages.read([key])]
    assert all(head == by_key[head.key].head for head in heads)
    assert all(image == by_key[image.key] for image in found)
    pages.write(images)
    assert all(image == by_key[image.key] for image in pages.read(list(by_key)))
    return len(found)


@pytest.mark.parametrize(("table", "column"), CASES)
def test_a_changed_column_is_refused_or_equal(pages, stored, behind, table, column):
    rows = {name: behind.execute(f"SELECT * FROM {name}").fetchall() for name in COLUMNS}
    place = COLUMNS[table].index(column)
    for row in (2, 4):
        for value in flips(rows[table][row - 1][place]):
            if change(behind, table, column, row, value):
                served = serves_only(pages, stored)
                assert served == len(stored) - 1 or column in HARMLESS, value
            behind.execute("BEGIN")
            for name, columns in COLUMNS.items():
                behind.execute(f"DELETE FROM {name}")
                marks = ", ".join("?" * len(columns))
                behind.executemany(f"INSERT INTO {name} VALUES({marks})", rows[name])
            behind.execute("COMMIT")
            pages._bad.clear()


def test_a_mark_that_is_lost_is_still_a_refusal(pages, stored, behind, kv_path, maker):
    bad = stored[1]
    assert pages.quarantine(bad.key, "the model disagrees") == 1
    change(behind, "pages", "quarantined", 2, None)
    again = maker.open(kv_path)
    assert bad.key not in again.find([image.key for image in stored])
    assert list(again.read([bad.key])) == []
    assert again.write([bad]) == 1  # computed again, it is as good as new
    assert list(again.read([bad.key])) == [bad]
    again.close()


@pytest.mark.parametrize("column", ["chain_index", "first_position"])
def test_verify_sees_a_changed_head(pages, stored, behind, column):
    change(behind, "pages", column, 2, 77)
    found = verify(pages._disk)
    assert (found.pages, found.bad) == (4, {"head": 1})
