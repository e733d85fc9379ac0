"""`export --with-kv`, `import --trust-kv`: pages travel, if they are what the file says."""

from __future__ import annotations

import json
import random
import sqlite3
import struct
from pathlib import Path

import pytest
import torch
from fakes import TinyModel
from project.program import COSTS, program, say

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.records import KV_SALT
from sessions.service import EngineService
from sessions.store import ChatStore
from tui import wiring


class TinyEngine(LocalEngine):
    """The tiny model on the kv.db of the settings."""

    def __init__(self, settings, model, *, ephemeral, logged=True, seed=0) -> None:
        tiny = TinyModel(seed)
        kv_db = settings.folders.kv_db
        self.pages = SqlitePageStore(kv_db, tiny.identity(tiny.page_size), limit_bytes=1 << 30)
        config = EngineConfig(spec="none")
        engine = Engine(tiny, config, store=self.pages, salt=self.pages.salt, costs=COSTS)
        super().__init__(EngineService(engine, self.pages))

    def close(self) -> None:
        super().close()
        self.pages.close()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setenv("CHATKV_MODEL", __file__)
    monkeypatch.setattr(wiring, "make_engine", TinyEngine)
    monkeypatch.setattr(wiring.Workspace, "start", lambda work: work.engine.start())


@pytest.fixture
def source(chatkv, tmp_path) -> Path:
    """A chat with a fork in tmp_path/data, exported with its pages."""
    with program(tmp_path / "data") as chats:
        chat = chats.new("ada")
        say(chat, "the first words of all of this")
        say(chat, "and then?")
        say(chat.fork(chat.turns()[0].id, "side"), "or else something rather different")
    made = tmp_path / "ada.jsonl"
    ran = chatkv("export", "ada", "--with-kv", "-o", str(made))
    assert ran.code == 0, ran.err
    assert "pages (" in ran.err
    return made


MADE: dict[str, bytes] = {}
"""The files of the first `source`: they are the same each time."""


@pytest.fixture
def file(request, tmp_path) -> Path:
    """What `source` exports, without the chats themselves."""
    if not MADE:
        made = request.getfixturevalue("source")
        MADE.update({f.suffix: f.read_bytes() for f in (made, made.with_suffix(".safetensors"))})
    for suffix, data in MADE.items():
        (tmp_path / f"ada{suffix}").write_bytes(data)
    return tmp_path / "ada.jsonl"


def there(chatkv, file, *args, folder="b"):
    return chatkv("import", str(file), "--data-dir", str(file.parent / folder), *args)


def test_pages_travel_and_are_used(chatkv, source, tmp_path):
    file = source
    ran = there(chatkv, file, "--trust-kv", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["chats"][0]["kv_pages"] > 6
    again = tmp_path / "again.jsonl"
    out = chatkv("export", "ada", "--with-kv", "-o", str(again), "--data-dir", str(tmp_path / "b"))
    assert out.code == 0
    assert again.read_bytes() == file.read_bytes()
    both = [one.with_suffix(".safetensors").read_bytes() for one in (again, file)]
    assert both[0] == both[1]
    with program(tmp_path / "data") as chats:
        wanted = say(chats.open("ada:main"), "why?").text
    with program(tmp_path / "b") as chats:
        chat = chats.open("ada:main")
        done = say(chat, "why?")
        assert done.text == wanted
        assert done.usage.restored_pages > 3
        assert done.usage.prompt_n < 30
        # Only the chats that they came with read them.
        alone = say(chats.new("eve"), "the first words of all of this")
        assert alone.usage.cached_tokens == 0
        side = say(chats.open("ada:side"), "go on")
        assert side.usage.restored_pages > 3


def test_without_the_flag_they_are_left_out(chatkv, file, tmp_path):
    ran = there(chatkv, file)
    assert ran.code == 0
    assert "--trust-kv uses them" in ran.err
    with program(tmp_path / "b") as chats:
        assert say(chats.open("ada:main"), "why?").usage.cached_tokens == 0


def test_a_foreign_file_cannot_choose_whose_pages_a_chat_reads(chatkv, file, tmp_path):
    text = file.read_text().replace('"settings":{', '"settings":{"kv_salt":"00",', 1)
    assert text != file.read_text()
    file.write_text(text)
    assert there(chatkv, file).code == 0
    with ChatStore(tmp_path / "b" / "chat.db") as store:
        assert all(KV_SALT not in store.session(row.id).settings for row in store.sessions())


def parts(file) -> tuple[dict, list, bytes]:
    raw = file.with_suffix(".safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["pages"]), raw[8 + length :]


def put(file, header, pages, data) -> None:
    header["__metadata__"]["pages"] = json.dumps(pages)
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + data
    file.with_suffix(".safetensors").write_bytes(raw)


def nothing_stored(folder: Path) -> bool:
    db = sqlite3.connect(folder / "kv" / "kv.db")
    with db:
        pages = db.execute("SELECT count(*) FROM pages").fetchone()[0]
    db.close()
    return pages == 0


def test_rows_of_other_words_are_found_by_computing_them(chatkv, file, tmp_path, monkeypatch):
    """Every digest is right, and the values are small; the text says something else."""
    header, pages, data = parts(file)
    size = len(data) // sum(len(page[1]) for page in pages) * len(pages[0][1])
    data = data[4:size] + data[:4] + data[size:]
    from sessions.exchange_kv import digest

    pages[0][3] = digest(data[:size])
    put(file, header, pages, data)
    monkeypatch.setattr("secrets.choice", lambda pages: pages[0])
    ran = there(chatkv, file, "--trust-kv")
    assert ran.code == 1
    assert "computed again and is another one" in ran.err
    assert nothing_stored(tmp_path / "b")
    # The chats are there all the same.
    assert chatkv("list", "--json", "--data-dir", str(tmp_path / "b")).json["chats"]


def change(file, name):
    from sessions.exchange_kv import digest

    header, pages, data = parts(file)
    match name:
        case "another text":
            header["__metadata__"]["jsonl"] = "0" * 64
        case "another model":
            header["__metadata__"]["identity"] = "{}"
        case "parent":
            pages[1][0] = 5
        case "ids":
            pages[1][1][0] = 10**9
        case "no ids":
            pages[1][1] = []
        case "bits":
            pages[1][2] = "zz"
        case "shape":
            header["page.1"]["shape"] = [1 << 50]
        case "offsets":
            header["page.1"]["data_offsets"] = [0, 4]
        case "flip":
            data = data[:9] + bytes([data[9] ^ 1]) + data[10:]
        case "cut":
            data = data[:-1]
        case "nan":
            size = header["page.0"]["shape"][0]
            data = struct.pack("<f", float("nan")) + data[4:]
            pages[0][3] = digest(data[:size])
        case "large":
            size = header["page.0"]["shape"][0]
            data = struct.pack("<f", -3e4) + data[4:]
            pages[0][3] = digest(data[:size])
        case "deep":
            header["__metadata__"]["pages"] = pages = "[" * 100_000
    put(file, header, pages, data)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("another text", "other JSON lines"),
        ("another model", "another model"),
        ("parent", "none before it"),
        ("ids", "an id outside"),
        ("no ids", "1 to 16 ids"),
        ("bits", "page 1"),
        ("shape", "another shape"),
        ("offsets", "another shape"),
        ("flip", "damaged"),
        ("cut", "bytes, and its pages"),
        ("nan", "no model computes"),
        ("large", "no model computes"),
        ("deep", "no pages"),
    ],
)
def test_what_is_not_what_it_says_is_refused_whole(chatkv, file, tmp_path, name, says):
    change(file, name)
    ran = there(chatkv, file, "--trust-kv")
    assert (ran.code, says in ran.err) == (1, True), ran.err
    assert nothing_stored(tmp_path / "b")


def test_headers_and_files_are_measured_before_they_are_read(chatkv, file, tmp_path):
    beside = file.with_suffix(".safetensors")
    raw = beside.read_bytes()
    for length in (0, 1, len(raw), 17 << 20, (1 << 64) - 1):
        beside.write_bytes(struct.pack("<Q", length) + raw[8:])
        folder = f"c{length % 1000}"
        ran = there(chatkv, file, "--trust-kv", folder=folder)
        assert ran.code == 1
        assert "header of" in ran.err
    ran = there(chatkv, file, "--trust-kv", "--max-bytes", str(len(raw) - 1), folder="d")
    assert "the most is" in ran.err
    beside.unlink()
    assert there(chatkv, file, "--trust-kv", folder="e").code == 2


def test_damaged_files_of_pages_are_refused_or_the_same(chatkv, file, tmp_path):
    beside = file.with_suffix(".safetensors")
    raw, rng = beside.read_bytes(), random.Random(4)
    for number in range(12):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(raw) if number % 2 else 4000)] ^= 1 << rng.randrange(8)
        beside.write_bytes(damaged)
        ran = there(chatkv, file, "--trust-kv", folder=f"f{number}")
        assert ran.code in (0, 1), ran.err
        assert "Traceback" not in ran.err


def test_flags_that_make_no_sense_and_files_that_exist(chatkv, source, tmp_path):
    assert chatkv("export", "ada", "--with-kv").code == 2
    assert chatkv("export", "ada", "--with-kv", "--format", "openai", "-o", "x").code == 2
    other = tmp_path / "other.jsonl"
    other.with_suffix(".safetensors").write_bytes(b"mine")
    assert chatkv("export", "ada", "--with-kv", "-o", str(other)).code == 2
    assert not other.exists()
    for page in (tmp_path / "data" / "kv").glob("kv.db*"):
        page.unlink()
    third = tmp_path / "third.jsonl"
    ran = chatkv("export", "ada", "--with-kv", "-o", str(third), "--json")
    assert ran.json["kv"] is None
    assert not third.with_suffix(".safetensors").exists()


def test_a_reader_of_safetensors_reads_it(file):
    from safetensors.torch import load_file

    tensors = load_file(file.with_suffix(".safetensors"))
    assert all(page.dtype == torch.uint8 for page in tensors.values())
