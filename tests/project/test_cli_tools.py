"""`export, models, kv, doctor, verify`: commands around the chats."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import sys
import types

import pytest

from chatkv.errors import BadWeights, EngineLost
from chatkv.models import catalog
from sessions.pages import SqlitePageStore
from sessions.store import ChatStore
from tui import health, wiring


@pytest.fixture
def stored(tmp_path):
    """A real store with one chat of one turn."""
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        row = store.create_session("ada", "Be brief.", {"model": "Toy"})
        begun = store.begin_turn(
            row.id, row.head_turn_id, row.head_turn_id, "Grüße\x1b", {"seed": 7}
        )
        store.finish_turn(begun.turn_id, "done", "Hallo.", b"f" * 32, (1, 2), ((0, 2),), {})
    return row.id


def test_export_writes_lines(chatkv, stored, tmp_path):
    ran = chatkv("export", "ada")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0
    assert lines[0]["format"] == "chatkv/1"
    assert "Grüße\x1b" in [line.get("content") for line in lines]
    target = tmp_path / "out.jsonl"
    assert chatkv("export", "ada", "-o", str(target)).code == 0
    assert target.read_text() == ran.out
    again = chatkv("export", "ada", "-o", str(target))
    assert (again.code, "--force" in again.err) == (2, True)
    forced = chatkv("export", "ada", "-o", str(target), "--force", "--json").json
    assert forced["exports"] == [{"session": stored, "records": len(lines)}]
    assert chatkv("export", "ada", "--json").json["exports"][0]["records"] == lines
    assert chatkv("export", "nobody").code == 3
    assert chatkv("export", "ada", "-o", "/nowhere/x").code == 6


def test_a_resumed_chat_keeps_its_model_unless_told(stored, chatkv, monkeypatch, tmp_path):
    from tui.settings import load

    with ChatStore(tmp_path / "data" / "chat.db") as store:
        assert wiring.model_of(load(), store, "ada") == "Toy"
        assert wiring.model_of(load(), store, None) == catalog.DEFAULT_MODEL
        assert wiring.model_of(load({"model": "Other"}), store, "ada") == "Other"
        monkeypatch.setenv("CHATKV_MODEL", "Third")
        assert wiring.model_of(load(), store, "ada") == "Third"


def test_models(chatkv, monkeypatch, tmp_path):
    gguf = tmp_path / "own.gguf"
    gguf.write_bytes(b"GGUF and more")
    rows = chatkv("models", "list", "--json").json["models"]
    assert catalog.DEFAULT_MODEL in [row["name"] for row in rows]
    assert catalog.DEFAULT_MODEL in chatkv("models", "list").out
    data = chatkv("models", "info", str(gguf), "--json").json
    assert (data["name"], data["size_bytes"]) == ("own", 13)
    assert data["sha256"] == hashlib.sha256(b"GGUF and more").hexdigest()
    assert chatkv("models", "info", "nothing-like-it").code == 4
    assert chatkv("models", "info", "nothing-like-it", "--json").json["error"]["exit"] == 4


def test_models_pull(chatkv, monkeypatch, tmp_path):
    def pull(name, progress):
        progress("fetching", 0, 10)
        if name == "broken":
            raise BadWeights("It came with another hash.", hint="Try again.")
        return catalog.ModelFile(name, tmp_path / "m.gguf")

    monkeypatch.setattr(catalog, "pull", pull)
    assert chatkv("models", "pull", "new", "--json").json["fetched"] is True
    assert chatkv("models", "pull", "broken").code == 4


def test_kv_stats(chatkv, tmp_path):
    empty = chatkv("kv", "stats", "--json").json
    assert (empty["pages"], empty["file_bytes"]) == (0, 0)
    assert not (tmp_path / "data").exists()
    assert wiring.page_round_trip(tmp_path / "data" / "kv" / "kv.db")
    data = chatkv("kv", "stats", "--json").json
    assert (data["pages"], data["tokens"], data["quarantined"]) == (1, 16, 0)
    assert data["limit_bytes"] > 0
    assert "chatkv_store_pages 1\n" in chatkv("kv", "stats", "--prometheus").out
    assert chatkv("kv", "stats", "--prometheus", "--json").code == 2
    out = chatkv("kv", "stats").out
    assert "pages" in out
    assert "0 (0 B)" in out  # found nowhere yet
    for name in ("pool", "host", "disk"):
        assert f"\n{name} " in out  # what it means


def test_the_round_trip_sees_a_page_that_changed(tmp_path, monkeypatch):
    class Forgetful(SqlitePageStore):
        def read(self, keys):
            return (dataclasses.replace(page, payload=b"x" * 4096) for page in super().read(keys))

    monkeypatch.setattr("sessions.pages.SqlitePageStore", Forgetful)
    assert not wiring.page_round_trip(tmp_path / "kv.db")


def test_kv_stats_of_a_newer_file(chatkv, tmp_path):
    path = tmp_path / "data" / "kv" / "kv.db"
    assert wiring.page_round_trip(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    ran = chatkv("kv", "stats")
    assert (ran.code, "newer" in ran.err) == (6, True)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A model that is hashed at once."""
    gguf = tmp_path / "own.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("CHATKV_MODEL", str(gguf))
    monkeypatch.setenv("CHATKV_CACHE_DIR", str(tmp_path / "cache"))


def test_doctor(chatkv, quick):
    ran = chatkv("doctor", "--json")
    rows = {row["name"]: row for row in ran.json["checks"]}
    assert ran.code == 0
    assert set(rows) == {
        "python",
        "torch",
        "packages",
        "device",
        "sqlite",
        "folders",
        "numba cache",
        "model",
        "chat db",
        "kv db",
        "kv round trip",
    }
    assert all(set(row) == {"name", "status", "detail", "hint"} for row in rows.values())
    assert {row["status"] for row in rows.values()} <= {"ok", "warn"}
    assert rows["kv round trip"]["status"] == "ok"


def test_doctor_names_what_fails(chatkv, quick, monkeypatch, tmp_path):
    monkeypatch.setattr(wiring, "page_round_trip", lambda path: False)
    monkeypatch.setattr(health, "TORCH", (99, 0))
    monkeypatch.setenv("CHATKV_MODEL", "nothing-like-it")
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "chat.db").write_bytes(b"no database" * 1000)
    ran = chatkv("doctor", "--json")
    failed = {row["name"] for row in ran.json["checks"] if row["status"] == "fail"}
    assert failed == {"kv round trip", "torch", "model", "chat db"}
    assert ran.code == 1
    assert "FAIL" in chatkv("doctor").out


def test_doctor_checks_the_hash(chatkv, monkeypatch, tmp_path):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"other")
    file = catalog.ModelFile("m", gguf, "gguf", "0" * 64)
    monkeypatch.setattr(catalog, "find", lambda name: file)
    rows = {row["name"]: row for row in chatkv("doctor", "--json").json["checks"]}
    assert rows["model"]["status"] == "fail"
    assert "0000" in rows["model"]["detail"]


def test_doctor_load(chatkv, quick, chats, monkeypatch):
    engine = chats.Engine()
    monkeypatch.setattr(wiring, "make_engine", lambda *_, **__: engine)
    rows = {row["name"]: row for row in chatkv("doctor", "--load", "--json").json["checks"]}
    assert "backend cpu (exact)" in rows["engine"]["detail"]
    assert "Drafters: ngram." in rows["engine"]["detail"]
    assert engine.closed

    def dies(timeout_s=None):
        raise EngineLost("The engine process ended (signal 9).")

    monkeypatch.setattr(engine, "wait_ready", dies)
    ran = chatkv("doctor", "--load")
    assert ran.code == 1
    assert "signal 9" in ran.out


@pytest.fixture
def played(monkeypatch, quick):
    """`sessions.verify` without an engine; what it was asked for."""
    asked = {}
    report = {"complete": True, "prompts": 2, "replies": 4, "tokens": 9}
    report |= {"different": 0, "drafted_steps": 3}

    def verify_prompts(file, prompts, **settings):
        asked.update(settings, prompts=prompts, file=file)
        return dict(report)

    module = types.SimpleNamespace(verify_prompts=verify_prompts)
    monkeypatch.setitem(sys.modules, "sessions.verify", module)
    asked["report"] = report
    return asked


def test_verify(chatkv, played, tmp_path):
    args = ("--prompts", "a", "--prompts", "b", "--limit", "2", "--temperature", "0,1")
    ran = chatkv("verify", *args, "--drafters", "random", "--json")
    assert ran.code == 0
    assert ran.json == {"v": 1, **played["report"]}
    assert [str(path) for path in played["prompts"]] == ["a", "b"]
    assert (played["temperatures"], played["drafters"]) == ((0.0, 1.0), ("random",))
    assert (played["limit"], played["max_tokens"]) == (2, 64)
    assert chatkv("verify").out.splitlines()[1].split() == ["prompts", "2"]
    assert played["drafters"] == ("ngram", "random")


@pytest.mark.parametrize("change", [{"different": 1}, {"drafted_steps": 0}])
def test_verify_fails_with_7(chatkv, played, change):
    played["report"].update(change)
    assert chatkv("verify").code == 7
    assert chatkv("verify", "--json").code == 7


@pytest.mark.parametrize(
    ("device", "part"), [("cuda", "No CUDA device can be used"), ("npu", "Ascend NPU")]
)
def test_doctor_says_why_a_device_cannot_be_used(chatkv, quick, monkeypatch, device, part):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = chatkv("doctor", "--device", device, "--json")
    rows = {row["name"]: row for row in ran.json["checks"]}
    assert (ran.code, rows["device"]["status"]) == (1, "fail")
    assert part in rows["device"]["detail"]


def test_an_unknown_device(chatkv):
    ran = chatkv("doctor", "--device", "tpu")
    assert ran.code == 2
    assert "must be auto, cpu, cuda, cuda:N or npu" in ran.err


def test_verify_asks_the_draft_model_that_is_named(chatkv, played):
    assert chatkv("verify", "--draft-model", "small.gguf").code == 0
    assert played["drafters"] == ("ngram", "random", "draft_model")
    assert played["draft_model"] == "small.gguf"
