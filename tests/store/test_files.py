"""Faults of `chat.db`: modes, owners, locks, damage, full disks. Nothing acknowledged is lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from chatkv.errors import StoreBusy, StoreError
from sessions.locks import WriterClaim, is_alive, owners
from sessions.pagefile import NoPageFile, open_page_file
from sessions.paths import private_file, private_folder
from sessions.store import ChatStore


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_are_for_their_owner_alone(store, path, pages, kv_path):
    store.create_session()
    assert mode(path.parent) == mode(kv_path.parent) == 0o700
    for file in (path, kv_path, kv_path.with_name("kv.db-wal"), kv_path.with_name("kv.db-shm")):
        assert mode(file) == 0o600
    claims = path.parent / "chat.db-writers"
    assert mode(claims) == 0o700
    assert [mode(claim) for claim in claims.iterdir()] == [0o600]
    assert (kv_path.parent / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d17")
    assert not (path.parent / "CACHEDIR.TAG").exists()


def test_the_folder_of_conversations_is_no_cache(store, path):
    open_page_file(path.with_name("kv.db"), limit_bytes=1 << 30).close()
    assert not (path.parent / "CACHEDIR.TAG").exists()


def test_a_store_others_can_write_is_refused(store, path):
    store.close()
    path.chmod(0o660)
    with pytest.raises(StoreError, match=r"written by other users \(mode 660\)") as caught:
        ChatStore(path)
    assert f"chmod go-w {path}" in caught.value.hint
    path.chmod(0o600)
    path.parent.chmod(0o777)
    with pytest.raises(StoreError, match=f"{path.parent} can be written"):
        ChatStore(path)
    with pytest.raises(NoPageFile, match="can be written by other users"):
        open_page_file(path.with_name("kv.db"), limit_bytes=1 << 30)


def test_a_store_others_can_read_is_closed_to_them(store, path):
    store.close()
    path.chmod(0o644)
    ChatStore(path).close()
    assert mode(path) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_store_of_another_user_is_refused(store, path):
    store.close()
    os.chown(path, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        ChatStore(path)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        ChatStore(path, read_only=True)


def test_folders_and_files_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Cannot make the folder"):
        private_folder(tmp_path / "file" / "below")
    with pytest.raises(StoreError, match="Cannot make"):
        private_file(tmp_path / "missing" / "chat.db")
    with pytest.raises(StoreError, match="no session store at"):
        ChatStore(tmp_path / "missing" / "chat.db", read_only=True)
    assert not (tmp_path / "missing").exists()


def test_read_only_on_request(store, path):
    row = store.create_session("ada")
    with ChatStore(path, read_only=True) as reader:
        assert reader.find("ada") == row
        with pytest.raises(StoreError, match="can only be read"):
            reader.create_session()


HOLDER = """
    import sys
    from sessions.store import ChatStore
    store = ChatStore(sys.argv[1])
    store.create_session("held")
    with store._writing():
        print("held", flush=True)
        sys.stdin.readline()
    store.close()
"""


def test_a_busy_store_names_who_holds_it(store, path, start_child, monkeypatch):
    import time

    row = store.create_session()
    store.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "mine", {})
    child = start_child(HOLDER, path)
    assert child.stdout.readline() == "held\n"
    store._db.execute("PRAGMA busy_timeout = 100")
    with pytest.raises(StoreBusy) as caught:
        store.create_session()
    at = rf"The session store {path} is busy (process {child.pid}, since "
    assert caught.value.message.startswith(at)
    assert caught.value.message.endswith(time.strftime("%H:")[:2] + caught.value.message[-5:])
    # Reading goes on, in a new process too.
    monkeypatch.setattr("sessions.database.BUSY_TIMEOUT_MS", 100)
    with ChatStore(path) as reader:
        assert len(reader.sessions()) == 2
    child.stdin.write("\n")
    child.stdin.flush()
    child.wait(timeout=30)
    store.create_session()
    assert store.check() == []


def test_writers_are_known_as_long_as_they_live(tmp_path):
    folder = tmp_path / "writers"
    first, second = WriterClaim(folder), WriterClaim(folder)
    assert is_alive(folder, first.id)
    assert is_alive(folder, second.id)
    assert [owner.pid for owner in owners(folder, but=first.id)] == [os.getpid()]
    second.release()
    second.release()
    assert not is_alive(folder, second.id)
    assert owners(folder, but=first.id) == []
    for name in ("", "..", "../writers", "nobody"):
        assert not is_alive(folder, name)
    (folder / "left-over").write_text('{"pid": 1, "since": 0}')
    assert len(owners(folder)) == 1
    assert not (folder / "left-over").exists()
    first.release()
    assert owners(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda raw: b"not SQLite at all" * 100, id="other file"),
        pytest.param(lambda raw: raw[: len(raw) // 2], id="cut in half"),
        pytest.param(lambda raw: raw[:100] + bytes(4000) + raw[4100:], id="no schema page"),
    ],
)
def test_a_damaged_store_is_left_as_it_is(store, path, damage):
    row = store.create_session("ada")
    store.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "x" * 20000, {})
    store.close()
    raw = damage(path.read_bytes())
    path.write_bytes(raw)
    with pytest.raises(StoreError) as caught, ChatStore(path) as opened:
        opened.path(row.id)
    assert str(path) in caught.value.message
    assert "is damaged" in caught.value.message
    assert "backup" in caught.value.hint
    assert path.read_bytes() == raw
    shutil.copyfile(path, path.with_name("chat.db.bak-1"))
    with pytest.raises(StoreError) as caught, ChatStore(path) as opened:
        opened.path(row.id)
    assert "chat.db.bak-1" in caught.value.hint


def test_after_damage_nothing_is_written_any_more(store, path):
    row = store.create_session("ada")
    for turn in range(20):
        head = store.session(row.id).head_turn_id
        store.begin_turn(row.id, head, head, f"{turn}" * 3000, {})
    store.close()
    raw = bytearray(path.read_bytes())
    with sqlite3.connect(path) as db:
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'").fetchone()[
            0
        ]
    db.close()
    raw[(root - 1) * 4096 : (root - 1) * 4096 + 8] = b"\xff" * 8
    path.write_bytes(raw)
    with ChatStore(path) as opened:
        assert opened.session(row.id).title == "ada"
        with pytest.raises(StoreError, match="damaged"):
            opened.path(row.id)
        with pytest.raises(StoreError, match="damaged"):
            opened.rename(row.id, "bob")
    assert path.read_bytes() == raw


def test_another_programs_database_is_not_touched(tmp_path):
    path = tmp_path / "chat.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE notes(x)")
    db.close()
    path.chmod(0o600)
    raw = path.read_bytes()
    with pytest.raises(StoreError, match="no chatkv session store"):
        ChatStore(path)
    assert path.read_bytes() == raw


FULL = """
    import resource, sys
    from chatkv.errors import StoreError
    from sessions.store import ChatStore
    with ChatStore(sys.argv[1]) as store:
        row = store.create_session("full")
        limit = store.file.stat().st_size + 300_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        for turn in range(100):
            head = store.session(row.id).head_turn_id
            try:
                begun = store.begin_turn(row.id, head, head, f"{turn} " + "x" * 20000, {})
            except StoreError as error:
                print(error.message, flush=True)
                break
            print(begun.turn_id, flush=True)
        assert store.session(row.id).head_turn_id == head
        store.rename(row.id, "still here")
"""


def test_a_full_disk_loses_the_new_message_only(path, start_child):
    child = start_child(FULL, path)
    *acknowledged, error = child.communicate(timeout=60)[0].splitlines()
    assert child.returncode == 0
    assert len(acknowledged) > 3
    assert error.startswith(f"Cannot save to {path}: the disk is full")
    with ChatStore(path) as store:
        (row,) = store.sessions()
        turns = [str(turn.turn.id) for turn in store.path(row.id)[1:]]
        assert turns == acknowledged
        assert row.title == "still here"
        assert store.check() == []


def test_a_disk_that_fails_at_any_statement_leaves_whole_transactions(memory, talk, failing):
    """Play a chat and fail at the n-th statement, for every n until all of it succeeds."""
    real = memory._db
    for left in range(1000):
        kept = talk.start(f"kept {left}")
        memory._db = failing(real, left)
        done: list[str] = []
        with suppress(StoreError):
            session = talk.start(f"ada {left}", system="sys")
            done.append("start")
            one = talk.turn(session, f"one {left}", "first")
            done.append("one")
            fork = memory.fork(session, one, f"fork {left}").id
            done.append("fork")
            talk.turn(fork, f"two {left}", "second")
            done.append("two")
            memory.delete(session)
            done.append("delete")
        memory._db = real
        assert not real.in_transaction
        assert memory.check() == []
        rows = {row.id: row for row in memory.sessions()}
        assert kept in rows
        if done:
            assert (session in rows) == ("delete" not in done)
        if "one" in done and "delete" not in done:
            assert talk.texts(session) == ["sys", f"one {left}", "first"]
        if "two" in done:
            assert talk.texts(fork) == ["sys", f"one {left}", "first", f"two {left}", "second"]
            assert memory.session(fork).forked_from == (None if "delete" in done else session)
        if "delete" in done:
            break
        for row in rows.values():
            memory.delete(row.id)
    assert 60 < left < 999


def test_a_copy_is_whole_and_private(store, tmp_path):
    row = store.create_session("ada")
    target = tmp_path / "copy" / "chat.db"
    private_folder(target.parent)
    store.backup(target)
    store.rename(row.id, "bob")
    store.backup(target)
    assert mode(target) == 0o600
    with ChatStore(target) as copy:
        assert copy.find("bob").id == row.id


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.sessions()
