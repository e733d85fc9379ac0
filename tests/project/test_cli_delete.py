"""`rm --forever` and `trash empty` on real files: no trace of a deleted chat is left in any."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import click
import pytest
from fakes import ByteTokenizer, TinyModel
from project.program import COSTS, files_with, packed, payloads, program, say, traces_of

from chatkv.engine import Engine
from sessions import build
from sessions.deletion import work_off_at_start
from sessions.pages import SqlitePageStore
from tui import output
from tui.drafts import Drafts

SECRET, SHARED = "the xylophone is buried under the old oak", "what do we share here"


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def told(data) -> dict[str, str]:
    """A chat with a fork that shares its first turn, and both went on."""
    with program(data) as chats:
        chat = chats.new("main chat")
        say(chat, SHARED)
        fork = chat.fork(name="side")
        say(chat, SECRET)
        say(fork, "zebras of the fork stay")
        return {"main": chat.id, "side": fork.id}


def test_nothing_of_it_is_left_in_any_file(chatkv, told, data):
    rows = payloads(data, SECRET)
    assert len(rows) > 1
    drafts = Drafts(data / "drafts")
    drafts.save(told["main"], "what was never sent")
    drafts.save(told["side"], "a draft of the fork")
    assert files_with(data, *traces_of(SECRET)) == [
        "chat.db",
        next(data.glob("history-*.tokens")).name,
        "kv.db",
    ]
    assert files_with(data, *rows) == ["kv.db"]
    ran = chatkv("rm", "--forever", told["main"], "--yes", "--json")
    assert ran.json["deleted"] == [told["main"]]
    assert ran.json["pages"] >= len(rows)
    assert ran.json["backups"] == []
    assert files_with(data, *traces_of(SECRET), *rows) == []
    assert [path.name for path in (data / "drafts").iterdir()] == [told["side"]]
    # What the fork shares is all there, and its pages are good, with the witness of each turn.
    assert chatkv("kv", "stats", "--json").json["snapshots"] == 2
    shown = chatkv("show", told["side"], "--json").json["turns"]
    assert [turn["prompt"] for turn in shown] == [SHARED, "zebras of the fork stay"]
    assert "kv.db" in files_with(data, packed(SHARED[:8]))
    with program(data) as chats:
        done = say(chats.open(told["side"]), "and on")
        assert done.usage.restored_pages > 0
        assert done.usage.verified is True
        assert done.usage.prompt_n < 20


def test_the_last_of_a_chat_takes_the_shared_turns_with_it(chatkv, told, data):
    assert chatkv("rm", "--forever", told["main"], told["side"], "--yes").code == 0
    assert files_with(data, *traces_of(SHARED), *traces_of("zebras of the fork stay")) == []
    left = chatkv("kv", "stats", "--json").json
    assert (left["pages"], left["snapshots"]) == (0, 0)  # a witness holds ids too
    assert chatkv("list", "--json").json["chats"] == []


def test_what_is_in_the_trash_can_be_deleted_too(chatkv, told, data):
    assert chatkv("rm", told["main"], "--yes").code == 0
    assert chatkv("rm", "--forever", told["main"], "--yes").code == 0
    assert files_with(data, *traces_of(SECRET)) == []
    assert chatkv("rm", "--forever", told["main"], "--yes").code == 3


def test_all_must_exist_before_one_goes(chatkv, told, data):
    assert chatkv("rm", "--forever", told["main"], "nobody", "--yes").code == 3
    assert "chat.db" in files_with(data, SECRET.encode())


def test_it_has_to_be_confirmed(chatkv, told, data, monkeypatch):
    without = chatkv("rm", "--forever", told["main"], stdin=b"")
    assert (without.code, "--yes" in without.err) == (2, True)
    assert chatkv("rm", "--forever", told["main"], "--json").code == 2
    asked = []

    def refuse(text, **_):
        asked.append(text)
        raise click.Abort

    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setattr("click.confirm", refuse)
    assert chatkv("rm", "--forever", told["main"]).code == 130
    assert "main chat for good" in asked[0]
    assert "chat.db" in files_with(data, SECRET.encode())
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    assert chatkv("rm", "--forever", told["main"]).code == 0
    assert files_with(data, SECRET.encode()) == []


def test_trash_empty(chatkv, told, data):
    assert chatkv("trash", "empty", "--yes", "--json").json["deleted"] == []
    assert chatkv("rm", told["main"], "--yes").code == 0
    young = chatkv("trash", "empty", "--older-than", "1", "--yes", "--json").json
    assert young["deleted"] == []
    with sqlite3.connect(data / "chat.db") as db:
        db.execute("UPDATE sessions SET trashed_at = trashed_at - 90000000")
    db.close()
    old = chatkv("trash", "empty", "--older-than", "1", "--yes", "--json").json
    assert old["deleted"] == [told["main"]]
    assert files_with(data, *traces_of(SECRET)) == []
    assert [row["id"] for row in chatkv("list", "--json").json["chats"]] == [told["side"]]


def test_backups_that_may_hold_it_are_named(chatkv, told, data):
    (data / "chat.db.bak-0").write_bytes(b"older")
    ran = chatkv("rm", "--forever", told["main"], "--yes")
    assert "chat.db.bak-0" in ran.err


def test_without_kv_db_the_text_goes_all_the_same(chatkv, told, data):
    for file in (data / "kv").glob("kv.db*"):
        file.unlink()
    (data / "kv" / "kv.db.damaged").write_bytes(packed(SECRET))
    assert chatkv("rm", "--forever", told["main"], "--yes").code == 0
    assert files_with(data, *traces_of(SECRET)) == []


@pytest.fixture
def left_over(chatkv, told, data):
    """The chat is deleted while another process holds kv.db."""
    other = sqlite3.connect(data / "kv" / "kv.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sessions.database.BUSY_TIMEOUT_MS", 50)
        ran = chatkv("rm", "--forever", told["main"], "--yes")
    other.close()
    assert ran.code == 6
    assert "deleted, but not their pages" in ran.err
    assert files_with(data, SECRET.encode()) == []
    assert "kv.db" in files_with(data, *traces_of(SECRET))
    return told


def test_pages_of_a_busy_kv_db_go_with_the_next_gc(chatkv, left_over, data):
    assert chatkv("kv", "gc", "--json").json["purged"] > 0
    assert files_with(data, *traces_of(SECRET)) == []


def test_pages_of_a_busy_kv_db_go_when_an_engine_starts(left_over, data):
    model = TinyModel()
    identity = model.identity(model.page_size)
    pages = SqlitePageStore(data / "kv" / "kv.db", identity, limit_bytes=1 << 30)
    work_off_at_start(data / "chat.db", pages)
    pages.close()
    assert files_with(data, *traces_of(SECRET)) == []


class Drifting(ByteTokenizer):
    def prefix_stable(self) -> bool:
        return False


def test_an_engine_is_built_with_both(left_over, data, monkeypatch):
    """Left-over pages go, and a template that rewrites old turns is said."""
    model = TinyModel()
    model.tokenizer = Drifting()
    monkeypatch.setattr(build.catalog, "find", lambda name: None)
    monkeypatch.setattr(build, "load_model", lambda *_, **__: (model, ""))
    monkeypatch.setattr(build, "Engine", lambda *a, **k: Engine(*a, **k, costs=COSTS, guard=False))
    options = {"kv_path": str(data / "kv" / "kv.db"), "chat_db": str(data / "chat.db")}
    service = build.build_service({"model": "tiny", "spec": "none", **options})
    assert "writes old turns in another way" in service.ready().notice
    service.close()
    service.pages.close()
    assert files_with(data, *traces_of(SECRET)) == []
