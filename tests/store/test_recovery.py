"""Backup and recover: a copy is whole and checked, and damage costs what it hit alone."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat

import pytest

from chatkv.errors import StoreError, UsageError
from sessions.exchange import export_jsonl
from sessions.recovery import backup, recover
from sessions.store import ChatStore

PAGE = 4096


BUILT: dict[str, bytes] = {}
"""Made once: thousands of commits."""


def build(talk_on, path) -> bytes:
    """A store of 30 chats with forks and long texts."""
    rng = random.Random(1)
    with ChatStore(":memory:") as store:
        talk = talk_on(store)
        for number in range(30):
            session = talk.start(f"chat {number}", "be brief" * 40)
            for turn in range(4):
                long = 20_000 if number % 7 == 0 and turn == 1 else 300
                said = "".join(rng.choice("abcdé한 ") for _ in range(long))
                made = talk.turn(session, f"{number} {turn} {said[:50]}", said)
            op = {"policy": "p", "reason": "r", "op": {"n": number}, "num_tokens": 1}
            fork = store.fork(session, made).id
            store.set_pending_ops(fork, [op])
            talk.turn(fork, "and?", "no")
        store.backup(path)
    return path.read_bytes()


@pytest.fixture
def full(path, tmp_path, talk_on):
    """That store as a file."""
    if not BUILT:
        BUILT["store"] = build(talk_on, tmp_path / "built")
    path.parent.mkdir(mode=0o700)
    path.write_bytes(BUILT["store"])
    path.chmod(0o600)
    return path


def chats(path) -> dict[str, bytes]:
    """What each chat exports to, by its id."""
    with ChatStore(path) as store:
        assert store.check() == []
        (sound,) = store._db.execute("PRAGMA integrity_check").fetchone()
        assert sound == "ok"
        mains = [row.id for row in store.sessions() if row.forked_from is None]
        return {main: "\n".join(export_jsonl(store, main)).encode() for main in mains}


def recovered(path):
    """What `recover` makes of a file, which it leaves alone."""
    before, seen = path.read_bytes(), path.stat().st_mtime_ns
    target = path.with_name("new.db")
    done = recover(path, target, force=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, seen)
    assert sorted(p.name for p in path.parent.iterdir() if p.name[0] == ".") == []
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    return chats(target), done


def test_a_good_store_comes_out_as_it_is(full):
    found, done = recovered(full)
    assert found == chats(full)
    with ChatStore(full) as old, ChatStore(full.with_name("new.db")) as new:
        assert new.sessions() == old.sessions()  # the numbers of tokens too
    assert done.unreadable_pages == 0
    assert not any(done.lost.values())
    assert done.read["turns"] == 30 * 6
    assert done.read["forgets"] == 30


@pytest.mark.parametrize("what", ["header", "schema", "first page"])
def test_neither_the_header_nor_the_schema_is_needed(full, what):
    whole = chats(full)
    raw = bytearray(full.read_bytes())
    match what:
        case "header":
            raw[:40] = os.urandom(40)
        case "schema":
            raw[100:PAGE] = os.urandom(PAGE - 100)
        case _:
            raw[:PAGE] = bytes(PAGE)
    full.write_bytes(raw)
    with pytest.raises((StoreError, sqlite3.Error)):
        ChatStore(full).sessions()
    found, _ = recovered(full)
    assert found == whole


def test_each_page_that_is_lost_costs_little(full):
    whole = chats(full)
    raw = full.read_bytes()
    rng = random.Random(2)
    for number in rng.sample(range(1, len(raw) // PAGE), 12):
        damaged = bytearray(raw)
        damaged[number * PAGE : (number + 1) * PAGE] = rng.randbytes(PAGE)
        full.write_bytes(damaged)
        found, done = recovered(full)
        same = sum(found.get(chat) == text for chat, text in whole.items())
        # The widest rows are those of sessions: a page holds all of them here.
        assert same >= 15 or done.lost["sessions"] or done.lost["turns"], number
        assert len(found) >= len(whole)
        assert done.read["messages"] > 30 * 11 * 0.8


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_lose_only_their_rows(full, seed):
    rng = random.Random(seed)
    raw = bytearray(full.read_bytes())
    for _ in range(rng.choice([1, 5, 50])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    full.write_bytes(raw)
    _, done = recovered(full)
    assert done.read["messages"] > 30 * 11 * 0.5


@pytest.mark.parametrize("part", [0.25, 0.5, 0.9])
def test_a_file_cut_in_the_middle_gives_the_rest(full, part):
    raw = full.read_bytes()
    full.write_bytes(raw[: int(len(raw) * part)])
    found, done = recovered(full)
    assert done.read["messages"] > 330 * part * 0.4
    assert sum(done.lost.values()) + done.unreadable_pages > 0
    assert found


def test_what_was_said_in_a_lost_turn_stays_and_an_empty_one_is_marked(full):
    with ChatStore(full) as store:
        row = store.find("chat 3:main")
        (_, one, two, *_), ids = store.path(row.id), [t.turn.id for t in store.path(row.id)]
        store._db.execute("PRAGMA foreign_keys = OFF")
        store._db.execute("DELETE FROM turns WHERE id IN (?, ?)", (one.turn.id, two.turn.id))
        store._db.execute("DELETE FROM messages WHERE turn_id = ?", (two.turn.id,))
    target = full.with_name("new.db")
    assert recover(full, target).lost["turns"] == 2
    with ChatStore(target) as store:
        path = store.path(row.id)
        assert [turn.turn.id for turn in path] == [ids[0], *ids[2:]]
        assert path[1].turn.redacted_at is not None
        assert path[1].messages == ()
        chat = [t for t in store.sessions() if t.title == "recovered"]
        (kept,) = store.path(chat[0].id)
        assert [m.row.content for m in kept.messages] == [m.row.content for m in one.messages]


def test_a_commit_that_was_cut_short_is_undone(full):
    whole = chats(full)
    script = sqlite3.connect(full, isolation_level=None)
    script.execute("PRAGMA cache_size = 1")
    script.execute("BEGIN IMMEDIATE")
    script.execute("UPDATE messages SET content = content || ' half'")
    for name in ("chat.db", "chat.db-journal"):
        shutil.copy(full.with_name(name), full.with_name(f"cut-{name}"))
    script.execute("ROLLBACK")
    script.close()
    found, _ = recovered(full.with_name("cut-chat.db"))
    assert found == whole


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"\0" * PAGE * 3, bytes(range(256)) * 64])
def test_what_holds_no_chat_is_refused(tmp_path, data):
    file = tmp_path / "chat.db"
    file.write_bytes(data)
    with pytest.raises(StoreError):
        recover(file, tmp_path / "new.db")
    assert [p.name for p in tmp_path.iterdir()] == ["chat.db"]


def test_crafted_pages_do_not_hang(tmp_path):
    """Chains that lead to themselves and to each other, cells on every byte."""
    rng = random.Random(4)
    pages = []
    for _ in range(64):
        cells = b"".join(rng.randrange(2048, PAGE).to_bytes(2, "big") for _ in range(1000))
        body = b"\x0d\0\0\x03\xe8\0\0\0" + cells
        body += b"".join(rng.choice([b"\xa0\x10", b"\0\0\0\x05"]) for _ in range(3000))
        pages.append(body[:PAGE].ljust(PAGE, b"\1"))
    file = tmp_path / "chat.db"
    file.write_bytes(b"".join(pages))
    with pytest.raises(StoreError):
        recover(file, tmp_path / "new.db")


def test_a_backup_is_the_store(full, tmp_path):
    target = tmp_path / "copy.db"
    with ChatStore(full) as store, ChatStore(full) as other:
        other.create_session("meanwhile")
        made = backup(store, target)
    assert (made["turns"], made["bytes"]) == (30 * 6 + 1, target.stat().st_size)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} <= {"copy.db", "built"}
    shutil.move(target, full.with_name("moved.db"))
    assert chats(full.with_name("moved.db")) == chats(full)


def test_a_backup_replaces_nothing_unasked(full, tmp_path):
    target = tmp_path / "copy.db"
    target.write_bytes(b"mine")
    (tmp_path / "link.db").symlink_to(tmp_path / "nowhere")
    with ChatStore(full) as store:
        for name in (target, tmp_path / "link.db"):
            with pytest.raises(UsageError, match="exists"):
                backup(store, name)
        assert target.read_bytes() == b"mine"
        for name in ("chat.db", "chat.db-journal"):
            with pytest.raises(UsageError, match="itself"):
                backup(store, full.with_name(name), force=True)
        with pytest.raises(UsageError, match="no folder"):
            backup(store, tmp_path / "no" / "copy.db")
        backup(store, target, force=True)
    assert not (tmp_path / "nowhere").exists()
    with sqlite3.connect(target) as copy:
        assert copy.execute("SELECT count(*) FROM sessions").fetchone() == (60,)


def test_no_backup_is_made_of_a_damaged_store(full, tmp_path):
    with ChatStore(full) as store:
        (root,) = store._db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'turns_parent'"
        ).fetchone()
    raw = bytearray(full.read_bytes())
    raw[(root - 1) * PAGE + 200 : root * PAGE - 200] = os.urandom(PAGE - 400)
    full.write_bytes(raw)
    with ChatStore(full) as store, pytest.raises(StoreError, match="damaged"):
        backup(store, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()
