"""Rows 10 to 12, 14 to 16 and 24: a kv.db that is damaged, gone, or wrong under good checksums."""

from __future__ import annotations

import math
import random
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from conversation import Conversation
from fakes import TinyModel
from program import SAMPLING

from chatkv.errors import StoreError
from sessions.pagefile import PAGE_BYTES

CLASSES = ("header", "b-tree header", "cell pointers", "overflow pointer", "payload")
"""Of bytes that mean different things to SQLite."""


def stop_and_flip(told: Conversation, offset: int, bit: int) -> None:
    with told.kv_db.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def places(raw: bytes, kind: str) -> list[int]:
    """Offsets of the bytes of that class."""
    found: list[int] = []
    for start in range(0, len(raw), PAGE_BYTES):
        head = start + (100 if start == 0 else 0)
        tree = raw[head] in (2, 5, 10, 13)
        size = 12 if raw[head] in (2, 5) else 8
        cells = struct.unpack(">H", raw[head + 3 : head + 5])[0] if tree else 0
        match kind:
            case "header" if start == 0:
                found += range(100)
            case "b-tree header" if tree:
                found += range(head, head + size)
            case "cell pointers" if tree:
                found += range(head + size, head + size + 2 * cells)
            case "overflow pointer" if not tree:  # and the map of pages, which a vacuum reads
                found += range(start, start + 4)
            case "payload" if not tree or raw[head] == 13:
                found += range(start + 20_000, start + PAGE_BYTES)
            case _:
                pass
    return found


def test_10_bit_flip_in_a_payload(told):
    told.play(2)
    told.stop()
    with told.pages() as db:
        rows = "SELECT page_id, data FROM page_data ORDER BY page_id LIMIT 1 OFFSET 2"
        ((page, data),) = db.execute(rows)
        flipped = bytes([data[0] ^ 1]) + data[1:]
        db.execute("UPDATE page_data SET data = ? WHERE page_id = ?", (flipped, page))
    told.start()
    (done,) = told.play(3)
    assert done.notice == "A stored page failed a check (checksum); it is made anew."
    assert done.usage.restored_pages == 2  # those before it
    told.running.flush()
    assert told.running.pages.stats().quarantined == 0  # by now a good one is in its place
    told.start()
    assert told.notices(told.play(4)) == []


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        ("b-tree header", 1),
        ("payload", 1),
        *(pytest.param(kind, 200, marks=pytest.mark.slow) for kind in CLASSES),
    ],
)
def test_11_bit_flip_in_a_b_tree(sampled, tmp_path, kind, seeds):
    """The chat goes on with the right answers whatever the bit was; and some bits were noticed."""
    # So many rows that a page of the cache takes three of SQLite.
    model = (lambda: TinyModel(num_layers=17)) if kind == "overflow pointer" else TinyModel
    short = {**SAMPLING, "max_tokens": 6}
    sampled.expected = None
    sampled.start(model=model(), sampling=short)
    sampled.play(2)
    told = sampled.running.chats.open("@last")
    before = [turn.reply for turn in told.turns()]
    sampled.stop()
    raw = sampled.kv_db.read_bytes()
    offsets = places(raw, kind)
    assert len(offsets) > 8
    cold = sampled.copy(tmp_path / "cold")
    cold.kv_db.unlink()
    cold.start(model=model())
    (done,) = cold.play(3)
    cold.stop()
    noticed = 0
    for seed in range(seeds):
        dice = random.Random(seed)
        torn = sampled.copy(tmp_path / str(seed))
        torn.expected = [*before, done.text]
        for _ in range(1 if seed % 2 else 30):
            stop_and_flip(torn, dice.choice(offsets), dice.randrange(8))
        torn.start(model=model())
        first = torn.running.pages.take_notices()
        noticed += bool(first + torn.notices(torn.play(3)))
        torn.running.flush()
        # Bits of the header can make it a newer chatkv's (row 21).
        assert torn.running.pages.usable or "newer chatkv" in first[0]
        torn.close()
    assert noticed > 0


@pytest.mark.parametrize(("offset", "value"), [(18, 3), (18, 0x82), (19, 3)])
def test_11_a_header_that_forbids_writing(sampled, offset, value):
    """SQLite's numbers of the format to write and to read."""
    sampled.play(2)
    sampled.stop()
    with sampled.kv_db.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([value]))
    damaged = sampled.kv_db.read_bytes()
    sampled.start()
    (notice,) = sampled.running.pages.take_notices()
    assert "set aside as kv.db.damaged" in notice
    assert sampled.kv_db.with_name("kv.db.damaged").read_bytes() == damaged
    assert sampled.notices(sampled.play(3)) == []
    sampled.start()
    (done,) = sampled.play(4)
    assert (done.notice, done.usage.verified) == ("", True)


BROKEN = {
    "truncated": lambda raw: raw[: len(raw) // 3],
    "empty": lambda raw: b"",
    "short": lambda raw: raw[:50],
    "not SQLite": lambda raw: b"no database here" * 8192,
    "zeros": lambda raw: bytes(len(raw)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_12_kv_db_is_no_database(sampled, how):
    told = sampled
    told.play(2)
    told.stop()
    broken = BROKEN[how](told.kv_db.read_bytes())
    told.kv_db.write_bytes(broken)
    told.start()
    notices = told.running.pages.take_notices()
    told.play(4)
    aside = told.kv_db.with_name("kv.db.damaged")
    if how == "empty":
        assert notices == []
        assert not aside.exists()
    else:
        (notice,) = notices
        assert "set aside as kv.db.damaged" in notice
        assert aside.read_bytes()[: len(broken)] == broken
    told.start()
    assert told.notices(told.play(4)) == []


def test_14_kv_db_deleted_while_open(told):
    told.play(2)
    for file in told.folder.glob("kv.db*"):
        file.unlink()
    ends = told.play(4)
    assert " ".join(told.notices(ends)) == "kv.db was removed while open; it is made anew."
    told.running.flush()
    assert told.kv_db.exists()
    assert told.running.pages.stats().pages > 0


def test_15_payload_under_the_wrong_key(told):
    told.play(2)
    told.stop()
    with told.pages() as db:
        (one, data), (two, other) = db.execute(
            "SELECT page_id, data FROM page_data WHERE length(data) ="
            " (SELECT max(length(data)) FROM page_data) ORDER BY page_id LIMIT 2"
        )
        swap = "UPDATE page_data SET data = ? WHERE page_id = ?"
        db.executemany(swap, [(other, one), (data, two)])
    told.start()
    ends = told.play(4)
    assert told.notices(ends)[0] == "A stored page failed a check (checksum); it is made anew."
    assert ends[0].usage.restored_pages == 0


def test_16_right_key_other_ids(told):
    told.play(2)
    told.stop()
    with told.pages() as db:
        ((page, ids),) = db.execute(
            "SELECT id, token_ids FROM pages ORDER BY chain_index LIMIT 1 OFFSET 1"
        )
        other = struct.pack("<i", 7) + ids[4:]
        db.execute("UPDATE pages SET token_ids = ? WHERE id = ?", (other, page))
    told.start()
    ends = told.play(4)
    assert told.notices(ends)[0] == "A stored page failed a check (ids); it is made anew."
    assert ends[0].usage.restored_pages == 1


@pytest.mark.parametrize("witness", [True, False], ids=["witness", "no witness"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_24_nan_with_a_good_checksum(sampled, value, witness):
    """Every check of the store says yes; the model must not."""
    told = sampled
    told.play(2)
    told.stop()
    with told.pages() as db:
        ((page, key, data),) = db.execute(
            "SELECT p.id, p.key, d.data FROM pages p JOIN page_data d ON d.page_id = p.id"
            " ORDER BY p.chain_index LIMIT 1 OFFSET 1"
        )
        wrong = data[:400] + struct.pack("<f", value) + data[404:]
        crc = zlib.crc32(wrong, zlib.crc32(key))
        db.execute("UPDATE page_data SET data = ? WHERE page_id = ?", (wrong, page))
        db.execute("UPDATE pages SET crc = ? WHERE id = ?", (crc, page))
        if not witness:
            db.execute("DELETE FROM snapshots")
    told.start()
    (done,) = told.play(3)
    assert done.usage.verified is False
    assert done.usage.reuse_reason == "damaged"
    told.running.flush()
    told.start()
    (done,) = told.play(4)
    assert done.usage.verified is True
    assert told.running.pages.stats().quarantined == 0


def test_24_wrong_rows_are_found_by_the_witness(told):
    """Finite, and wrong: only a forward pass can see it."""
    told.play(2)
    told.stop()
    with told.pages() as db:
        ((page, key, data),) = db.execute(
            "SELECT p.id, p.key, d.data FROM pages p JOIN page_data d ON d.page_id = p.id"
            " ORDER BY p.chain_index LIMIT 1"
        )
        wrong = data[4:] + data[:4]
        crc = zlib.crc32(wrong, zlib.crc32(key))
        db.execute("UPDATE page_data SET data = ? WHERE page_id = ?", (wrong, page))
        db.execute("UPDATE pages SET crc = ? WHERE id = ?", (crc, page))
    told.start()
    ends = told.play(4)
    assert [done.usage.verified for done in ends] == [False, None]
    assert ends[0].usage.reuse_reason == "damaged"
    with suppress(FileNotFoundError):
        assert not Path(told.kv_db.with_name("kv.db.damaged")).exists()


@pytest.mark.parametrize("name", ["kv.db", "chat.db"])
def test_a_schema_whose_names_are_no_utf8(sampled, name):
    """SQLite's message quotes them, and Python cannot decode it."""
    sampled.play(1)
    sampled.stop()
    file = sampled.folder / name
    raw = file.read_bytes()
    bad = raw.replace(b"CREATE TABLE meta(", b"CREATE TABLE meta)")
    bad = bad.replace(b"tablemetameta", b"table\xa0\xff\xa0\xa0meta")
    assert bad.count(b"\xa0\xff") > raw.count(b"\xa0\xff")
    file.write_bytes(bad)
    if name == "chat.db":
        with pytest.raises(StoreError, match="is damaged"):
            sampled.start()
        return
    sampled.start()
    assert "set aside" in sampled.running.pages.take_notices()[0]
    sampled.play(4)


def test_pages_that_cannot_be_read_leave_with_any_path(sampled):
    """A purge may not stop at them, and may not leave them behind either."""
    sampled.play(2)
    sampled.stop()
    with sampled.pages() as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("PRAGMA writable_schema = ON")
        db.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'ids BLOB NOT NULL', 'ids ANY')"
            " WHERE name = 'pages'"
        )
    with sampled.pages() as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("UPDATE pages SET token_ids = NULL")
    program = sampled.start()
    held = program.pages.stats().pages
    assert program.pages.purge([1, 2, 3], 0) == held > 5
    sampled.play(4)
