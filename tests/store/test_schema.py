"""The formats, which are final: tables as released, old files made new, newer ones kept."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from chatkv.errors import SchemaTooNew, StoreError
from sessions import migrations
from sessions.exchange import export_jsonl
from sessions.pagefile import open_page_file
from sessions.store import ChatStore

DATA = Path(__file__).parents[1] / "data"
MAIN = f"session{1:019d}"
TOKENS = [("main", 17), ("tail", 18), ("16-vs-32", 15)]


def schema(connection: sqlite3.Connection) -> str:
    rows = connection.execute(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
        " AND name NOT LIKE 'messages\\_fts\\_%' ESCAPE '\\' ORDER BY name"
    )
    return "".join(f"{row[0]};\n" for row in rows)


def pragmas(connection: sqlite3.Connection, *names: str) -> list[object]:
    return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]


def released(tmp_path: Path, version: int) -> Path:
    """The store of a released schema in a folder of its own."""
    folder = tmp_path / "old"
    folder.mkdir(mode=0o700)
    path = folder / "chat.db"
    shutil.copyfile(DATA / f"chat-v{version}.db", path)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return released(tmp_path, 1)


def test_chat_db_is_as_released(store):
    assert schema(store._db) == (DATA / "chat-v2.sql").read_text()
    names = "page_size journal_mode synchronous foreign_keys secure_delete trusted_schema"
    assert pragmas(store._db, *names.split()) == [4096, "delete", 3, 1, 1, 0]
    names = "cell_size_check busy_timeout application_id user_version recursive_triggers"
    assert pragmas(store._db, *names.split())[:4] == [1, 5000, 0x43484B31, 2]


def test_the_released_step_is_left_alone(path, monkeypatch):
    monkeypatch.setattr(migrations, "STEPS", migrations.STEPS[:1])
    with ChatStore(path) as store:
        assert schema(store._db) == (DATA / "chat-v1.sql").read_text()


def test_pragmas_hold_in_an_existing_store_too(store, path):
    with ChatStore(path) as again:
        names = "synchronous foreign_keys secure_delete trusted_schema cell_size_check"
        assert pragmas(again._db, *names.split()) == [3, 1, 1, 0, 1]


def test_kv_db_is_as_released(kv_path):
    opened = open_page_file(kv_path, limit_bytes=8 << 30)
    assert schema(opened.writer) == (DATA / "kv-v2.sql").read_text()
    names = "page_size auto_vacuum journal_mode synchronous secure_delete mmap_size cache_size"
    # secure_delete 2 is FAST, auto_vacuum 2 incremental.
    assert pragmas(opened.writer, *names.split()) == [65536, 2, "wal", 1, 2, 0, -8192]
    names = "wal_autocheckpoint journal_size_limit foreign_keys trusted_schema cell_size_check"
    assert pragmas(opened.writer, *names.split()) == [1024, 64 << 20, 1, 0, 1]
    names = "application_id user_version max_page_count"
    assert pragmas(opened.writer, *names.split()) == [0x43484B32, 2, (9 << 30) // 65536 + 64]
    opened.close()


def test_a_kv_db_of_schema_1_makes_room_for_a_fresh_one(kv_path, maker):
    """Its pages are computed again: nothing in them proves what a reader relies on now."""
    kv_path.parent.mkdir(mode=0o700)
    kv_path.touch(0o600)
    with closing(sqlite3.connect(kv_path)) as db, db:
        db.executescript((DATA / "kv-v1.sql").read_text())
        db.execute("INSERT INTO meta VALUES('salt', ?), ('clock', '7')", ("00" * 32,))
        db.execute("PRAGMA application_id = 0x43484B32")
        db.execute("PRAGMA user_version = 1")
    for pages in (maker.open(kv_path), maker.open(kv_path)):  # twice: also the fresh one is good
        (image,) = maker.chain(pages.root, [1, 2, 3, 4])
        pages.write([image])
        assert [page.key for page in pages.read([image.key])] == [image.key]
        assert (pages.stats().pages, pages.take_notices()) == (1, [])
        pages.close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_released_store_comes_up_to_date_twice(tmp_path, version):
    old = released(tmp_path, version)
    exported = (DATA / "export-v1.jsonl").read_text(encoding="utf-8")
    for _ in range(2):
        with ChatStore(old) as store:
            assert "".join(f"{line}\n" for line in export_jsonl(store, MAIN)) == exported
            assert store.check() == []
            # The turns of the released store are counted, each under its longest tokenizer.
            assert [(row.fork, row.tokens) for row in store.sessions()] == TOKENS
            assert [match.excerpt for match in store.search("नमस्ते")] == ["नमस्ते"]


def test_a_migration_keeps_a_copy_of_the_old_store(old, monkeypatch):
    before = old.read_bytes()
    with ChatStore(old) as store:
        paths = [store.path(row.id) for row in store.sessions()]

    now = old.stat().st_size

    def m003_more(db):
        db.execute("CREATE TABLE more(id INTEGER PRIMARY KEY) STRICT")

    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, m003_more))
    with ChatStore(old) as store:
        assert [store.path(row.id) for row in store.sessions()] == paths
        assert pragmas(store._db, "user_version") == [3]
    first = old.with_name("chat.db.bak-1")
    assert (first.stat().st_mode & 0o777, first.stat().st_size) == (0o600, len(before))
    copy = old.with_name("chat.db.bak-2")
    assert copy.stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    with ChatStore(copy) as store:
        assert [store.path(row.id) for row in store.sessions()] == paths
    assert copy.stat().st_size == now
    # The newer one is now too new for us: it can be read, and nothing else.
    with ChatStore(old) as store:
        assert [store.path(row.id) for row in store.sessions()] == paths
        with pytest.raises(SchemaTooNew, match="schema 3, and this one knows schemas up to 2"):
            store.create_session()
        assert isinstance(store.read_only, SchemaTooNew)
    with ChatStore(old, read_only=True) as store:
        assert len(store.sessions()) == len(paths)


def test_a_migration_that_fails_changes_nothing(old, monkeypatch):
    before = old.read_bytes()

    def m003_whole(db):
        db.execute("CREATE TABLE whole(id INTEGER PRIMARY KEY) STRICT")

    def m004_half(db):
        db.execute("CREATE TABLE half(id INTEGER PRIMARY KEY) STRICT")
        db.execute("CREATE TABLE turns(id)")

    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, m003_whole, m004_half))
    with pytest.raises(StoreError, match="table turns already exists"):
        ChatStore(old)
    assert old.read_bytes() == before
    monkeypatch.undo()
    with ChatStore(old) as store:
        assert len(store.sessions()) == 3


def test_an_older_store_that_cannot_be_written_says_so(old, monkeypatch):
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, lambda db: None))
    with pytest.raises(StoreError, match="older schema 1"):
        ChatStore(old, read_only=True)


def test_an_ordinary_open_loads_nothing_heavy(store, path):
    store.create_session("ada")
    code = (
        "import sys; from sessions.store import ChatStore; from sessions.pages import *;"
        f"print(ChatStore({str(path)!r}).find('ada').title);"
        "heavy = {'numpy', 'torch', 'sqlite_utils', 'numba', 'click'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DATA.parents[1], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ada\n", "")


def test_one_page_by_execute_and_all_by_executescript(tmp_path):
    """Why the vacuum of kv.db goes through executescript."""
    db = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("CREATE TABLE t(x)")
    db.execute("BEGIN")
    db.executemany("INSERT INTO t VALUES(?)", [(bytes(5000),)] * 100)
    db.execute("COMMIT")
    db.execute("DELETE FROM t")
    (before,) = pragmas(db, "freelist_count")
    db.execute("PRAGMA incremental_vacuum(64)")
    assert pragmas(db, "freelist_count") == [before - 1]
    db.executescript("PRAGMA incremental_vacuum(64)")
    assert pragmas(db, "freelist_count") == [before - 65]
    db.close()
