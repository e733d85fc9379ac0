"""Row 27: files of people who mean no good."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from data.escape_corpus import CORPUS
from terminal import Terminal

from sessions.store import ChatStore
from tui import cli
from tui.safe_text import safe_text

OLD = (Path(__file__).parents[1] / "data" / "export-v1.jsonl").read_bytes()
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def openai(**more: object) -> bytes:
    return json.dumps({"messages": TALK, **more}).encode()


REFUSED = {
    "a million million turns": OLD.replace(b'"turns":6', b'"turns":1000000000000'),
    "a turn that is its own parent": OLD.replace(b'"turn":2,"parent":1', b'"turn":2,"parent":2'),
    "a circle of forks": OLD.replace(b'"forked_from":1', b'"forked_from":3'),
    "nesting without end": b"[" * 1_000_000,
    "a number without end": b'{"turns":' + b"9" * 5_000_000 + b"}",
    "ids that are no tokens": OLD.replace(b'"token_ids":[5,6,7]', b'"token_ids":[5,-6,7]'),
    "spans past the ids": OLD.replace(b'"sampled":[[0,2]]', b'"sampled":[[0,1099511627776]]'),
    "ids of another shape": OLD.replace(b'"token_ids":[5,6,7]', b'"token_ids":[[5],[6],[7]]'),
    "a role of another world": OLD.replace(b'"role":"user"', b'"role":"root"'),
    "a database": b"SQLite format 3\0" + bytes(4096),
    "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    "no text": bytes(range(128, 256)) * 100,
}  # fmt: skip

HARMLESS = {
    "a path for a title": openai(title="../../../../etc/passwd"),
    "a file for a title": openai(title="/tmp/evil.jsonl"),
    "a statement for a title": openai(title="x'); DROP TABLE sessions; --"),
    "an option for a title": openai(title="--force"),
    "a file for a model": OLD.replace(b'"model":"SmolLM2"', b'"model":"/tmp/evil.gguf"'),
    **{f"escape {name}": openai(title=text) for name, text in CORPUS.items() if len(text) < 900},
}


@pytest.fixture
def chatkv(tmp_path, monkeypatch):
    """Run a command on a store of its own, at a terminal; what it showed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str]:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        code = cli.run(["--data-dir", str(tmp_path / "data"), *args])
        assert safe_text(terminal.text) == terminal.text
        return code, terminal.text

    return call


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("what", [*REFUSED, *HARMLESS])
def test_27_hostile_import(chatkv, tmp_path, what):
    data = {**REFUSED, **HARMLESS}[what]
    assert data != OLD, "nothing was changed"
    (tmp_path / "file").write_bytes(data)
    ChatStore(tmp_path / "data" / "chat.db").close()
    before = files(tmp_path)
    tracemalloc.start()
    code, shown = chatkv("import", "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(data) + (4 << 20)
    assert {name for name in files(tmp_path) - before if "chat.db" not in name} == set()
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        rows = store.sessions()
        assert store.check() == []
    if what in REFUSED:
        assert code == 1
        assert "file: Line " in shown
        assert rows == []
        return
    assert (code, len(rows)) == (0, 3 if what == "a file for a model" else 1)
    for args in (["list"], ["list", "--json"], ["show", rows[0].id], ["search", "hello"]):
        assert chatkv(*args)[0] == 0
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        assert "evil" not in str(store.session(rows[0].id).settings)
    code, _ = chatkv("export", rows[0].id, "-o", "out.jsonl")
    assert code == 0
    assert files(tmp_path) - before - {"out.jsonl"} <= {
        name for name in files(tmp_path) if "chat.db" in name
    }
    assert os.listdir(tmp_path / "data") != []
