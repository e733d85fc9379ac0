"""Rows 13 and 17 to 22: files, models and programs of another kind or another time."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing

import pytest
from conversation import Conversation
from fakes import REPLY, USER, ByteTokenizer, TinyModel
from forked import Child
from program import PROMPTS, say
from victims import start_at_once

from chatkv.errors import SchemaTooNew, StoreError
from sessions import migrations
from sessions.pages import SqlitePageStore
from sessions.recovery import recover
from sessions.store import ChatStore


def cold(told: Conversation, folder, model, prompt: str) -> str:
    """The reply of a chat with the same turns that has no page of them."""
    other = told.copy(folder)
    with closing(other):
        other.start(kv=False, model=model)
        return say(other.chat, prompt).text


DAMAGE = {
    "not SQLite": lambda raw: b"not SQLite at all" * 100,
    "cut in half": lambda raw: raw[: len(raw) // 2],
    "no schema": lambda raw: raw[:100] + bytes(4000) + raw[4100:],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_13_chat_db_damaged(sampled, tmp_path, how):
    sampled.play(2)
    say(sampled.chat, "x" * 300)  # the last turn is the one that may go
    sampled.stop()
    good = sampled.chat_db.read_bytes()
    raw = DAMAGE[how](good)
    sampled.chat_db.write_bytes(raw)
    with pytest.raises(StoreError, match="is damaged") as damaged:
        list(sampled.chat.send("is anybody there?"))
    sampled.stop()
    assert "chatkv recover" in damaged.value.hint
    assert "backup" in damaged.value.hint
    assert sampled.chat_db.read_bytes() == raw
    if how == "not SQLite":
        sampled.chat_db.write_bytes(good)  # the backup that was offered
    else:
        recover(sampled.chat_db, tmp_path / "new.db")
        sampled.chat_db.unlink()
        shutil.move(tmp_path / "new.db", sampled.chat_db)
    turns = sampled.chat.turns()
    assert [(t.prompt, t.reply) for t in turns[:2]] == list(
        zip(PROMPTS, sampled.expected[:2], strict=False)
    )


def test_17_other_weights_under_the_same_name(told, tmp_path, monkeypatch):
    told.start()
    identity = told.running.model.identity(16)
    at = time.mktime((2031, 3, 3, 12, 0, 0, 0, 0, -1))
    with monkeypatch.context() as past:
        past.setattr(time, "time_ns", lambda: int(at * 1e9))
        assert told.running.pages.recognise("tiny") == ""
    told.play(2)
    expected = cold(told, tmp_path / "cold", TinyModel(1), PROMPTS[2])
    changed = told.start(seed=1)
    assert identity != changed.model.identity(16)
    notice = changed.pages.recognise("tiny")
    assert notice.startswith("tiny changed since 3 March 2031: ")
    assert changed.pages.recognise("tiny") == ""
    main_id = told.chat.id
    done = say(told.chat.fork(), PROMPTS[2])
    assert (done.text, done.usage.cached_tokens) == (expected, 0)
    # The old weights come back, and find what is theirs.
    back = told.start()
    assert back.pages.recognise("tiny").startswith("tiny changed since ")
    main = back.chats.open(main_id)
    done = say(main, PROMPTS[2])
    assert done.text == told.expected[2]
    assert done.usage.restored_pages > 0


CHANGES = {
    "adapter": {"adapters": ["00", "0x1.0p+0"]},
    "rope": {"rope_theta": "0x1.0p+4"},
    "backend": {"backend": "cuda exact 2"},
    "linear": {"linear": "int8"},
    "weights": {"weights": "others"},
}


class Changed(TinyModel):
    change: dict[str, object]

    def identity(self, *args):
        return {**super().identity(*args), **self.change}


@pytest.mark.parametrize("what", CHANGES)
def test_18_another_identity(sampled, what):
    sampled.play(2)
    model = Changed()
    model.change = CHANGES[what]
    sampled.start(model=model)
    (done,) = sampled.play(3)
    assert (done.usage.cached_tokens, done.usage.restored_pages) == (0, 0)
    assert done.notice == ""
    (done,) = sampled.play(4)  # but what it stored itself is found
    assert done.usage.cached_tokens > 0
    model = Changed()
    model.change = CHANGES[what]
    sampled.start(model=model)
    assert say(sampled.chat, "on").usage.restored_pages > 0


def test_18_another_page_size(sampled, tmp_path):
    class Large(TinyModel):
        page_size = 32

    sampled.play(2)
    sampled.stop()
    expected = cold(sampled, tmp_path / "cold", Large(), PROMPTS[2])
    sampled.start(model=Large())
    done = say(sampled.chat.fork(), PROMPTS[2])
    assert (done.usage.cached_tokens, done.text) == (0, expected)
    sampled.stop()
    # Half as many bytes a number: whoever read these rows would read nonsense.
    identity = {**TinyModel().identity(16), "pool_dtype": "bfloat16"}
    with closing(SqlitePageStore(sampled.kv_db, identity, limit_bytes=1 << 30)) as pages:
        with sampled.pages() as db:
            keys = [row[0] for row in db.execute("SELECT key FROM pages")]
        assert len(keys) > 5
        assert pages.find(keys) == {}
        assert list(pages.read(keys)) == []
        assert pages.take_notices() == []


class OtherTokenizer(ByteTokenizer):
    def tok_fp(self):
        return b"o" * 32

    def user_ids(self, text, first, system=None):
        return [USER, 10, *self.encode(text), REPLY]


def test_19_tokenizer_or_template_changed(told, tmp_path):
    def changed() -> TinyModel:
        model = TinyModel()
        model.tokenizer = OtherTokenizer()
        return model

    told.play(2)
    told.stop()
    expected = cold(told, tmp_path / "cold", changed(), PROMPTS[2])
    told.start(model=changed())
    done = say(told.chat.fork(), PROMPTS[2])
    assert done.text == expected
    # The system prompt and the mark of the user are the same ids as before.
    assert done.usage.cached_tokens == 5
    with closing(sqlite3.connect(told.chat_db)) as db:
        (kinds,) = db.execute("SELECT count(DISTINCT tok_fp) FROM renders").fetchone()
        rows = "SELECT count(*), count(DISTINCT message_id) FROM renders WHERE tok_fp = ?"
        own, messages = db.execute(rows, (b"o" * 32,)).fetchone()
    assert kinds == 2
    assert own == messages == 7  # system, two turns, the new prompt and its reply, all anew
    # Both sets of ids stay: with the old template the old chat goes on as ever.
    told.start()
    told.running.chats.open("@last")


def m003_more(db):
    db.execute("CREATE TABLE more(id INTEGER PRIMARY KEY) STRICT")


def m004_half(db):
    db.execute("CREATE TABLE half(id INTEGER PRIMARY KEY) STRICT")
    db.execute("CREATE TABLE turns(id)")


def test_20_older_schema(told, monkeypatch):
    told.play(2)
    told.stop()
    with told.pages() as db:
        db.execute("PRAGMA user_version = 0")
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, m003_more))
    (done,) = told.play(3)
    assert (done.usage.restored_pages, done.notice) == (0, "")  # kv.db: made anew, not a word
    told.stop()
    copy = told.chat_db.with_name("chat.db.bak-2")
    assert copy.stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    with ChatStore(copy) as store:
        turns = store.path(store.sessions()[0].id)[1:]
        assert [turn.message("assistant").row.content for turn in turns] == told.expected[:2]


def test_20_a_migration_that_fails(told, monkeypatch):
    told.play(2)
    told.stop()
    before = told.chat_db.read_bytes()
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, m003_more, m004_half))
    with pytest.raises(StoreError, match="table turns already exists"):
        told.start()
    assert told.chat_db.read_bytes() == before
    monkeypatch.undo()
    told.play(4)


def test_21_newer_schema(told):
    told.play(2)
    told.stop()
    files = {}
    for path, newer in ((told.chat_db, 3), (told.kv_db, 3)):
        with closing(sqlite3.connect(path)) as db:
            db.execute(f"PRAGMA user_version = {newer}")
        files[path] = path.read_bytes()
    program = told.start()
    assert [turn.reply for turn in told.chat.turns()] == told.expected[:2]
    with pytest.raises(SchemaTooNew, match="schema 3, and this one knows schemas up to 2"):
        list(told.chat.send("hello"))
    (notice,) = program.pages.take_notices()
    assert "newer chatkv (schema 3, this one knows 2)" in notice
    assert (program.pages.usable, program.pages.saving) == (False, False)
    told.stop()
    assert {path: path.read_bytes() for path in files} == files
    with closing(sqlite3.connect(told.chat_db)) as db:
        db.execute("PRAGMA user_version = 2")
    told.start()  # chat.db is ours again, kv.db is not
    told.play(4)
    told.stop()
    assert told.kv_db.read_bytes() == files[told.kv_db]


def test_22_simultaneous_first_starts(tmp_path):
    tmp_path.chmod(0o700)
    go = tmp_path / "go"
    children = [Child(start_at_once, tmp_path, go, str(number)) for number in range(4)]
    for child in children:
        child.wait_for("ready")
    go.touch()
    said = {tuple(child.run()) for child in children}
    assert len(said) == 1  # the same salt for all, and nothing to complain about
    assert said.pop()[-1].endswith(" True []")
    with ChatStore(tmp_path / "chat.db") as store:
        assert {row.title for row in store.sessions()} == {"0", "1", "2", "3"}
        assert store.check() == []
        applied = store._db.execute("SELECT name FROM _sqlite_migrations").fetchall()
        assert applied == [("m001_conversations",), ("m002_turn_tokens",)]
