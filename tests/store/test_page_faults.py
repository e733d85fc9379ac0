"""Whatever happens to `kv.db`, the chat goes on: a miss, a fresh file, or saving off, said once."""

from __future__ import annotations

import random
import shutil
import sqlite3

import pytest

from chatkv.errors import StoreBusy, StoreError
from sessions.pages import open_page_store


def keys(images):
    return [image.key for image in images]


@pytest.fixture
def stored(kv_path, maker):
    """A closed file with a chain of 12 pages, and the chain."""
    pages = maker.open(kv_path)
    images = maker.chain(pages.root, list(range(48)))
    pages.write(images)
    pages.close()
    return images


BROKEN = {
    "not SQLite": lambda raw: b"no database here" * 8192,
    "cut": lambda raw: raw[: len(raw) // 3],
    "short": lambda raw: raw[:50],
    "header": lambda raw: bytes(100) + raw[100:],
    "schema": lambda raw: raw[:100] + b"\xff" * 60000 + raw[60100:],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_file_is_set_aside_at_open(kv_path, maker, stored, how):
    kv_path.write_bytes(BROKEN[how](kv_path.read_bytes()))
    broken = kv_path.read_bytes()
    pages = maker.open(kv_path)
    assert list(pages.read(keys(stored))) == []
    images = maker.chain(pages.root, list(range(8)))
    assert pages.write(images) == 2
    assert list(pages.read(keys(images))) == images
    aside = kv_path.with_name("kv.db.damaged")
    assert aside.read_bytes()[: len(broken)] == broken
    (notice,) = pages.take_notices()
    assert "was damaged" in notice
    assert "kv.db.damaged" in notice
    pages.close()


def test_the_journal_of_a_damaged_file_stays_out_of_the_fresh_one(tmp_path, pages, maker, kv_path):
    images = maker.chain(pages.root, list(range(40)))
    pages.write(images)
    pages.end_turn()
    pages.find(keys(images))
    pages.shrink(1 << 30)  # notes the use, in pages other than the first
    path = tmp_path / "copy" / "kv.db"
    path.parent.mkdir(mode=0o700)
    for name in ("kv.db", "kv.db-wal"):
        shutil.copyfile(kv_path.with_name(name), path.with_name(name))
        path.with_name(name).chmod(0o600)
    assert path.with_name("kv.db-wal").stat().st_size > 100_000
    with path.open("r+b") as file:
        file.write(b"no database here")
    copy = maker.open(path)
    assert copy.salt != pages.salt
    assert copy.stats().pages == 0
    ok = copy._disk.ask(lambda db: db.execute("PRAGMA integrity_check").fetchall(), [])
    assert ok == [("ok",)]
    copy.close()


STARTS = """
    import sys
    from pathlib import Path
    from sessions.pages import SqlitePageStore
    print("ready", flush=True)
    sys.stdin.readline()
    pages = SqlitePageStore(Path(sys.argv[1]), limit_bytes=1 << 30)
    print(pages.salt.hex(), pages.saving, flush=True)
    pages.close()
"""


def test_several_processes_find_the_same_damage(kv_path, maker, stored, start_child):
    kv_path.write_bytes(b"no database here" * 8192)
    children = [start_child(STARTS, kv_path) for _ in range(3)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    answers = {child.communicate(timeout=60)[0] for child in children}
    assert len(answers) == 1  # nobody set the fresh file of another aside
    assert answers.pop().endswith(" True\n")
    assert kv_path.with_name("kv.db.damaged").read_bytes().startswith(b"no database here")


def test_an_empty_file_is_a_new_one(kv_path, maker, stored):
    kv_path.write_bytes(b"")
    pages = maker.open(kv_path)
    assert (pages.saving, pages.take_notices()) == (True, [])
    pages.close()


def test_damage_while_open_loses_the_pages_and_nothing_else(kv_path, maker, stored):
    pages = maker.open(kv_path)
    with kv_path.open("r+b") as file:
        for page in range(1, kv_path.stat().st_size // 65536):
            file.seek(page * 65536)
            file.write(b"\xff" * 64)
    assert pages.find(keys(stored)) == {}
    assert pages.saving
    assert "damaged" in " ".join(pages.take_notices())
    # Keys that live in memory are still good: the salt was kept.
    assert pages.write(stored) == len(stored)
    assert list(pages.read(keys(stored))) == stored
    root = pages.root
    pages.close()
    again = maker.open(kv_path)
    assert again.root == root
    assert list(again.read(keys(stored))) == stored
    again.close()


def test_damage_found_while_writing(kv_path, maker, stored):
    pages = maker.open(kv_path)
    pages._disk._file.writer.execute("DROP TABLE page_data")
    more = maker.chain(stored[-1].key, [7, 7, 7])
    assert pages.write(more) == 1
    assert list(pages.read(keys(more))) == more
    assert "damaged" in " ".join(pages.take_notices())
    pages.close()


def test_flipped_bits_anywhere_never_serve_a_wrong_page(tmp_path, kv_path, maker, stored):
    chance = random.Random(4)
    good = kv_path.read_bytes()
    by_key = {image.key: image for image in stored}
    missed = 0
    for number in range(24):
        path = tmp_path / f"flip{number}" / "kv.db"
        path.parent.mkdir(mode=0o700)
        flipped = bytearray(good)
        for _ in range(chance.choice([1, 50])):
            flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        path.chmod(0o600)
        pages = maker.open(path)
        found = list(pages.read(keys(stored)))
        assert all(by_key[image.key] == image for image in found)
        missed += len(found) < len(stored)
        pages.write(stored)
        again = list(pages.read(keys(stored)))
        assert all(by_key[image.key] == image for image in again)
        pages.close()
        shutil.rmtree(path.parent)
    assert missed > 3  # the flips did hit something


def test_a_newer_file_is_left_alone(kv_path, maker, stored):
    with sqlite3.connect(kv_path) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()
    before = kv_path.read_bytes()
    pages = maker.open(kv_path)
    assert (pages.usable, pages.saving) == (False, False)
    assert pages.find(keys(stored)) == {}
    assert list(pages.read(keys(stored))) == []
    assert pages.write(maker.chain(pages.root, [1, 2, 3, 4])) == 0
    assert pages.quarantine(stored[0].key, "x") == 1
    assert (pages.shrink(0), pages.delete(keys(stored)), pages.stats().pages) == (0, 0, 0)
    pages.end_turn()
    with pytest.raises(StoreError, match="cannot be removed now"):
        pages.purge([1, 2, 3], 0)
    (notice,) = pages.take_notices()
    assert "newer chatkv (schema 3, this one knows 2)" in notice
    assert pages.take_notices() == []
    pages.close()
    assert kv_path.read_bytes() == before
    opened = open_page_store(kv_path, maker.IDENTITY)
    assert opened.store is None
    assert opened.notice == notice


def test_an_older_file_is_replaced_without_a_word(kv_path, maker, stored):
    with sqlite3.connect(kv_path) as db:
        db.execute("PRAGMA user_version = 0")
    db.close()
    pages = maker.open(kv_path)
    assert (pages.saving, pages.stats().pages, pages.take_notices()) == (True, 0, [])
    assert not kv_path.with_name("kv.db.damaged").exists()
    assert kv_path.stat().st_mode & 0o777 == 0o600
    pages.close()


def test_a_file_deleted_while_open_is_made_again(pages, maker, kv_path):
    images = maker.chain(pages.root, list(range(16)))
    pages.write(images)
    for name in ("kv.db", "kv.db-wal", "kv.db-shm"):
        kv_path.with_name(name).unlink()
    # Until the end of the turn the old one serves, though nobody else can see it.
    assert list(pages.read(keys(images))) == images
    pages.end_turn()
    assert pages.take_notices() == ["kv.db was removed while open; it is made anew."]
    assert pages.find(keys(images)) == {}
    assert pages.write(images) == 4
    pages.close()
    again = maker.open(kv_path)
    assert list(again.read(keys(images))) == images
    again.close()


def test_a_folder_deleted_while_open_is_made_again(pages, maker, kv_path):
    shutil.rmtree(kv_path.parent)
    pages.end_turn()
    assert pages.write(maker.chain(pages.root, [1, 2, 3, 4])) == 1
    assert kv_path.exists()


def test_a_file_replaced_while_open_is_taken_over(pages, maker, kv_path):
    kv_path.unlink()
    kv_path.with_name("kv.db-wal").unlink()
    other = maker.open(kv_path)
    pages.end_turn()
    images = maker.chain(pages.root, list(range(16)))
    assert pages.root != other.root
    assert pages.write(images) == 4
    assert other.find(keys(images))  # one file, both roots
    assert pages.shrink(0) == 4
    other.close()


def test_a_busy_file_is_no_reason_to_stop_saving(pages, maker, kv_path):
    images = maker.chain(pages.root, [1, 2, 3, 4])
    other = sqlite3.connect(kv_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    pages._disk._file.writer.execute("PRAGMA busy_timeout = 50")
    with pytest.raises(StoreBusy, match="busy"):
        pages.write(images)
    assert pages.saving
    assert pages.find(keys(images)) == {}
    other.execute("ROLLBACK")
    other.close()
    assert pages.write(images) == 1


FULL = """
    import resource, sys
    from pathlib import Path
    from chatkv.errors import StoreError
    from chatkv.kv.keys import page_key
    from chatkv.kv.store import PageImage
    from sessions.pages import SqlitePageStore
    identity = {"layers": 2, "kv_heads": 1, "head_dim": 64, "page_tokens": 4,
                "pool_dtype": "bfloat16"}
    pages = SqlitePageStore(Path(sys.argv[1]), identity, limit_bytes=1 << 30)
    parent, images = pages.root, []
    for index in range(2000):
        ids = (index, 1, 2, 3)
        key = page_key(parent, ids, (False,) * 4)
        images.append(PageImage(key, parent, index, 4 * index, ids, (False,) * 4, "chunk",
                                bytes([index % 256]) * 2048))
        parent = key
    pages.write(images[:8])
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    failed = 0
    for start in range(8, 2000, 8):
        try:
            pages.write(images[start : start + 8])
        except StoreError as error:
            failed += 1
    got = list(pages.read([image.key for image in images]))
    assert got == images[: len(got)]
    print(failed, pages.saving, len(got) >= 8, len(pages.take_notices()))
    pages.end_turn()
    pages.close()
"""


def test_a_full_disk_ends_saving_and_says_so_once(kv_path, start_child):
    child = start_child(FULL, kv_path)
    out = child.communicate(timeout=60)[0]
    assert child.returncode == 0
    assert out == "1 False True 1\n"


def test_a_file_that_may_not_grow_evicts_and_goes_on(kv_path, maker):
    pages = maker.open(kv_path)
    old = maker.chain(pages.root, list(range(2000)))
    pages.write(old)
    writer = pages._disk._file.writer
    count = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {count}")
    fresh = maker.chain(pages.root, list(range(5000, 5400)))
    assert pages.write(fresh) == 100
    assert pages.saving
    assert list(pages.read(keys(fresh))) == fresh
    assert 0 < pages.stats().evicted_pages < 500
    assert pages.take_notices() == []
    pages.close()


def test_a_writer_that_fails_at_any_statement_leaves_whole_pages(kv_path, maker, failing):
    """Raise at the n-th statement of a write, for every n until it succeeds."""
    for left in range(100):
        pages = maker.open(kv_path)
        images = maker.chain(pages.root, [left, *range(7)])
        file = pages._disk._file
        file.writer = failing(file.writer, left)
        try:
            pages.write(images)
            failed = False
        except StoreError:
            failed = True
            assert not pages.saving
        file.writer = file.writer.real
        assert not file.writer.in_transaction
        assert list(pages.read(keys(images))) == ([] if failed else images)
        pages.close()
        if not failed:
            break
    assert 10 < left < 99


KILLED = """
    import random, sys
    from pathlib import Path
    from chatkv.kv.keys import page_key
    from chatkv.kv.store import PageImage
    from sessions.pages import SqlitePageStore
    identity = {"layers": 2, "kv_heads": 1, "head_dim": 64, "page_tokens": 4,
                "pool_dtype": "bfloat16", "weights": "one"}
    pages = SqlitePageStore(Path(sys.argv[1]), identity, limit_bytes=1 << 30)
    parent = pages.root
    print("ready", flush=True)
    for index in range(100_000):
        ids = (int(sys.argv[2]), index, 2, 3)
        key = page_key(parent, ids, (False,) * 4)
        payload = key * 64
        pages.write([PageImage(key, parent, index, 4 * index, ids, (False,) * 4, "step", payload)])
        parent = key
"""


def test_a_page_is_whole_or_absent_after_kill_9(kv_path, maker, start_child):
    import time

    chance = random.Random(2)
    total = 0
    for number in range(3):
        child = start_child(KILLED, kv_path, number)
        assert child.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.02, 0.2))
        child.kill()
        child.wait()
        pages = maker.open(kv_path)
        frontier = [pages.root]
        count = 0
        while frontier:
            heads = [head for key in frontier for head in pages.children(key)]
            frontier = [head.key for head in heads]
            images = [image for key in frontier for image in pages.read([key])]
            assert [image.payload for image in images] == [key * 64 for key in frontier]
            count += len(images)
        stats = pages.stats()
        assert (stats.pages, stats.quarantined) == (count, 0)
        assert count >= total
        total = count
        assert pages.take_notices() == []
        pages.close()
    assert total > 4
