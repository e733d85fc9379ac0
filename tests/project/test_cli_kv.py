"""`kv verify` and `kv gc` on real and on damaged files."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from chatkv.errors import StoreBusy
from chatkv.kv.keys import page_key
from chatkv.kv.store import PageImage
from sessions import cachefile, upkeep
from sessions.cachefile import CacheFile
from sessions.pages import SqlitePageStore
from sessions.store import ChatStore
from tui import installed, wiring

TOKENS, TOKEN_BYTES = 4, 2 * 2 * 1 * 64 * 2
IDENTITY = {
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "page_tokens": TOKENS,
    "pool_dtype": "bfloat16",
    "weights": "one",
}


@pytest.fixture
def kv_path(tmp_path) -> Path:
    return tmp_path / "data" / "kv" / "kv.db"


def fill(kv_path: Path, count: int, first: int = 0, **identity) -> list[PageImage]:
    """A chain of `count` pages of one model, stored."""
    chance = random.Random(first)
    pages = SqlitePageStore(kv_path, {**IDENTITY, **identity}, limit_bytes=1 << 30)
    parent, images = pages.root, []
    for index in range(count):
        ids = tuple(range(first + TOKENS * index, first + TOKENS * (index + 1)))
        sampled = (False,) * TOKENS
        key = page_key(parent, ids, sampled)
        payload = chance.randbytes(pages.model.token_bytes * TOKENS)
        place = (index, TOKENS * index)
        images.append(PageImage(key, parent, *place, ids, sampled, "chunk", payload))
        parent = key
    assert pages.write(images) == count
    pages.close()
    return images


@pytest.fixture
def stored(kv_path) -> list[PageImage]:
    return fill(kv_path, 40)


def change(kv_path: Path, statement: str, *values: object) -> None:
    """Something happens to the file behind everybody's back."""
    db = sqlite3.connect(kv_path, isolation_level=None)
    db.execute(statement, values)
    db.close()


def counts(kv_path: Path) -> dict[str, int]:
    db = sqlite3.connect(kv_path)
    pages, bad = db.execute("SELECT count(*), count(quarantined) FROM pages").fetchone()
    (models,) = db.execute("SELECT count(*) FROM models").fetchone()
    db.close()
    return {"pages": pages, "quarantined": bad, "models": models}


def test_verify_reads_all_that_is_there(chatkv, kv_path, stored):
    fill(kv_path, 3, weights="two", layers=1)
    ran = chatkv("kv", "verify", "--json")
    assert (ran.code, ran.json["pages"], ran.json["bad"]) == (0, 43, {})
    assert ran.json["payload_bytes"] == 40 * TOKENS * TOKEN_BYTES + 3 * TOKENS * TOKEN_BYTES // 2
    assert (ran.json["round_trip"], ran.json["damaged"]) == (True, False)
    assert list(kv_path.parent.glob(".chatkv-verify-*")) == []
    assert "payload_bytes" in chatkv("kv", "verify").out


def test_verify_without_a_file_makes_none(chatkv, kv_path):
    ran = chatkv("kv", "verify", "--json")
    assert (ran.code, ran.json["pages"]) == (0, 0)
    assert not kv_path.parent.exists()
    assert chatkv("kv", "gc", "--json").json["evicted"] == 0
    assert not kv_path.parent.exists()


FLIP = (
    "UPDATE page_data SET data ="
    " CAST(substr(data, 1, 99) || x'00ff00ff' || substr(data, 104) AS BLOB)"
)
BAD = {
    "checksum": f"{FLIP} WHERE page_id = 7",
    "size": "UPDATE page_data SET data = substr(data, 2) WHERE page_id = 7",
    "no data": "DELETE FROM page_data WHERE page_id = 7",
    "ids": "UPDATE pages SET token_ids = zeroblob(16) WHERE id = 7",
}


@pytest.mark.parametrize("reason", BAD)
def test_verify_finds_each_kind_of_bad_page(chatkv, kv_path, stored, reason):
    change(kv_path, BAD[reason])
    ran = chatkv("kv", "verify", "--json")
    assert (ran.code, ran.json["bad"]) == (7, {reason: 1})
    assert (ran.json["pages"], ran.json["quarantined"]) == (40, 0)
    assert counts(kv_path)["quarantined"] == 1
    pages = SqlitePageStore(kv_path, IDENTITY, limit_bytes=1 << 30)
    assert list(pages.read([stored[6].key])) == []
    assert list(pages.read([stored[5].key])) == [stored[5]]
    pages.close()
    again = chatkv("kv", "verify", "--json")  # it is dealt with
    assert (again.code, again.json["quarantined"], again.json["bad"]) == (0, 1, {})


def test_swapped_payloads_are_found(chatkv, kv_path, stored):
    change(
        kv_path,
        "UPDATE page_data SET data = (SELECT d.data FROM page_data d"
        " WHERE d.page_id = 13 - page_data.page_id) WHERE page_id IN (6, 7)",
    )
    assert chatkv("kv", "verify", "--json").json["bad"]["checksum"] >= 1


def test_pages_of_a_model_that_is_not_what_it_says_are_bad(chatkv, kv_path, stored):
    change(kv_path, "UPDATE models SET identity = replace(identity, 'one', 'two')")
    ran = chatkv("kv", "verify", "--json")
    assert (ran.code, ran.json["bad"]) == (7, {"model": 40})


@pytest.mark.parametrize("where", ["header", "tree"])
def test_a_damaged_file_is_set_aside_and_said(chatkv, kv_path, stored, where):
    raw = bytearray(kv_path.read_bytes())
    if where == "header":
        raw[:16] = b"no database here"
    else:
        for page in range(2, len(raw) // 65536):
            raw[page * 65536 : page * 65536 + 64] = b"\xff" * 64
    kv_path.write_bytes(raw)
    ran = chatkv("kv", "verify", "--json")
    assert (ran.code, ran.json["damaged"]) == (7, True)
    assert "set aside" in ran.err
    assert kv_path.with_name("kv.db.damaged").exists()
    assert counts(kv_path)["pages"] == 0
    again = chatkv("kv", "verify", "--json")
    assert (again.code, again.json["damaged"]) == (0, False)


def test_flipped_bits_anywhere_end_in_a_count_or_a_file_set_aside(chatkv, kv_path, stored):
    good, chance = kv_path.read_bytes(), random.Random(8)
    for _ in range(12):
        flipped = bytearray(good)
        for _ in range(chance.choice([1, 30])):
            flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        for file in kv_path.parent.glob("kv.db*"):
            file.unlink()
        kv_path.write_bytes(flipped)
        kv_path.chmod(0o600)
        ran = chatkv("kv", "verify", "--json")
        assert ran.code in (0, 7), ran.out
        # Whatever it said: what is read afterwards is right.
        pages = SqlitePageStore(kv_path, IDENTITY, limit_bytes=1 << 30)
        by_key = {image.key: image for image in stored}
        assert all(by_key[image.key] == image for image in pages.read(list(by_key)))
        pages.close()


def test_verify_of_a_newer_file_leaves_it_alone(chatkv, kv_path, stored):
    change(kv_path, "PRAGMA user_version = 9")
    for command in ("verify", "gc"):
        ran = chatkv("kv", command)
        assert (ran.code, "newer" in ran.err) == (6, True)
    assert counts(kv_path)["pages"] == 40


def test_verify_fails_when_the_round_trip_does(chatkv, kv_path, stored, monkeypatch):
    monkeypatch.setattr(wiring, "page_round_trip", lambda path: False)
    assert chatkv("kv", "verify", "--json").code == 7


def test_gc_removes_what_is_no_use_and_frees_the_space(chatkv, kv_path, stored):
    fill(kv_path, 200, first=5000)
    change(kv_path, "UPDATE pages SET quarantined = 'checksum' WHERE id = 240")
    change(kv_path, "UPDATE pages SET quarantined = 'checksum' WHERE id BETWEEN 100 AND 120")
    before = kv_path.stat().st_size
    data = chatkv("kv", "gc", "--json").json
    # What hung behind the removed ones can be reached no more.
    assert (data["quarantined"], data["unreachable"]) == (22, 119)
    assert (data["evicted"], data["other_models"]) == (0, 0)
    assert counts(kv_path) == {"pages": 99, "quarantined": 0, "models": 1}
    assert kv_path.stat().st_size < before
    assert data["freed_bytes"] > 0
    again = chatkv("kv", "gc", "--json").json
    assert (again["quarantined"], again["unreachable"], again["freed_bytes"]) == (0, 0, 0)


def test_gc_evicts_down_to_the_budget(chatkv, kv_path, stored, monkeypatch):
    fill(kv_path, 600, first=5000)
    monkeypatch.setenv("CHATKV_KV_DISK_MAX", "2MiB")
    data = chatkv("kv", "gc", "--json").json
    assert data["evicted"] > 100
    assert kv_path.stat().st_size <= 2 << 20
    assert counts(kv_path)["pages"] == 640 - data["evicted"]
    ran = chatkv("kv", "verify", "--json")
    assert (ran.code, ran.json["pages"]) == (0, 640 - data["evicted"])


def test_space_is_given_back_in_bounded_steps(kv_path, stored, monkeypatch):
    fill(kv_path, 600, first=5000)
    monkeypatch.setattr(cachefile, "VACUUM_STEP_BYTES", 65536)
    disk = CacheFile(kv_path, limit_bytes=1 << 21)
    steps = []
    disk._file.writer.set_trace_callback(
        lambda text: steps.append(text) if "incremental_vacuum" in text else None
    )
    found = upkeep.collect(disk)
    disk.close()
    assert found.evicted > 100
    assert set(steps) == {"PRAGMA incremental_vacuum(1)"}
    assert len(steps) > 3


def test_a_purge_also_takes_what_was_evicted_before(kv_path):
    """Rows of a page fill many of SQLite's, which are not overwritten when a page is evicted."""
    evicted, kept = fill(kv_path, 2, layers=256)
    pages = SqlitePageStore(kv_path, {**IDENTITY, "layers": 256}, limit_bytes=1 << 30)
    pages.delete([evicted.key])
    pages.end_turn()
    pieces = [evicted.payload[at : at + 64] for at in range(0, len(evicted.payload), 4096)]
    raw = b"".join(file.read_bytes() for file in kv_path.parent.glob("kv.db*"))
    assert sum(piece in raw for piece in pieces) > len(pieces) // 2
    pages.purge(list(kept.token_ids), 0)  # of any path
    raw = b"".join(file.read_bytes() for file in kv_path.parent.glob("kv.db*"))
    assert not any(piece in raw for piece in pieces)
    pages.close()


def test_a_purge_is_not_done_while_others_read_the_journal(kv_path, monkeypatch):
    monkeypatch.setattr("sessions.database.BUSY_TIMEOUT_MS", 50)
    (page,) = fill(kv_path, 1)
    pages = SqlitePageStore(kv_path, IDENTITY, limit_bytes=1 << 30)
    pages.find([page.key])
    pages.end_turn()
    reader = sqlite3.connect(kv_path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM pages").fetchone()
    with pytest.raises(StoreBusy):
        pages.purge(list(page.token_ids), 0)
    reader.execute("ROLLBACK")
    reader.close()
    pages.purge(list(page.token_ids), 0)
    assert kv_path.with_name("kv.db-wal").stat().st_size == 0
    pages.close()


@pytest.fixture
def gguf(tmp_path) -> Path:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_only_all_takes_pages_of_models_that_are_not_here(
    chatkv, kv_path, stored, gguf, tmp_path, monkeypatch
):
    fill(kv_path, 5, weights="gone")
    fill(kv_path, 6, weights="of a chat")
    digests = {"own": "of a chat", "default": "one"}
    monkeypatch.setattr(installed, "weights_digest", lambda file: digests[file.name])
    monkeypatch.setattr("chatkv.models.catalog.list_models", lambda: [])
    default = tmp_path / "default.gguf"
    default.write_bytes(b"GGUF")
    monkeypatch.setenv("CHATKV_MODEL", str(default))
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        row = store.create_session("a", settings={"model": str(gguf)})
        store.create_session("b", settings={"model": "/not/here.gguf"})
        store.trash(row.id)  # the trash can be brought back
    assert chatkv("kv", "gc", "--json").json["other_models"] == 0
    assert counts(kv_path)["models"] == 3
    data = chatkv("kv", "gc", "--all", "--json").json
    assert (data["other_models"], data["unreachable"]) == (5, 0)
    assert counts(kv_path) == {"pages": 46, "quarantined": 0, "models": 2}
    assert chatkv("kv", "verify", "--json").json["pages"] == 46


def test_gc_of_a_busy_file_says_so(kv_path, stored, monkeypatch):
    other = sqlite3.connect(kv_path, isolation_level=None)
    monkeypatch.setattr("sessions.database.BUSY_TIMEOUT_MS", 50)
    disk = CacheFile(kv_path, limit_bytes=1 << 30)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="busy"):
        upkeep.collect(disk)
    other.execute("ROLLBACK")
    other.close()
    disk.close()
    assert counts(kv_path)["pages"] == 40


def test_weights_are_named_without_loading_them(tmp_path, monkeypatch):
    from chatkv.models import catalog, weights

    monkeypatch.setenv("CHATKV_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF and more")
    file = catalog.find(str(path))
    folder = tmp_path / "cache" / "converted"
    folder /= f"{weights.known_sha256(path)[:32]}-{weights.CONVERTER}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"spec": {"weights_digest": "abc"}}')
    assert installed.weights_digest(file) == "abc"
    assert installed.weights_digest(catalog.find("random:tiny")) == ""
    assert installed.tokenizer_of(str(path)) is None
    assert installed.tokenizer_of("nothing-like-it") is None
