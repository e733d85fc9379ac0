"""`export`, `import`, `backup` and `recover` on a real chat.db; no model."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from sessions.store import ChatStore
from tui import wiring

EVIL = "\x1b]52;c;cm0=\x07 \x9b2J \u202egnp"


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    class Nothing:
        def close(self):
            pass

    monkeypatch.setenv("CHATKV_MODEL", __file__)
    monkeypatch.setattr(wiring, "make_engine", lambda *_, **__: Nothing())


@pytest.fixture
def chat(tmp_path) -> str:
    """The id of a chat named ada with a fork."""
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        row = store.create_session("ada", "Be brief.")
        begun = store.begin_turn(row.id, row.head_turn_id, row.head_turn_id, f"q {EVIL}", {})
        store.finish_turn(begun.turn_id, "done", "reply", b"t" * 32, [1, 2], ((0, 2),))
        store.fork(row.id, None, "side")
    return row.id


def test_there_and_back(chatkv, chat, tmp_path):
    file = tmp_path / "ada.jsonl"
    assert chatkv("export", chat, "-o", str(file)).code == 0
    again = chatkv("import", str(file), "--json").json
    assert [(c["session"], c["skipped"]) for c in again["chats"]] == [(chat, True)]
    made = chatkv("import", str(file), "--data-dir", str(tmp_path / "b"), "--name", "eve")
    assert (made.code, made.out) == (0, "")
    assert "Imported eve" in made.err
    assert "1 turn, 1 fork." in made.err
    assert "2 messages" not in made.err
    second = chatkv("export", "eve:main", "--data-dir", str(tmp_path / "b")).out
    assert second.replace('"title":"eve"', '"title":"ada"') == file.read_text(encoding="utf-8")
    assert "tokenizer" in made.err


@pytest.mark.parametrize("kind", ["openai", "sharegpt"])
def test_text_formats(chatkv, chat, tmp_path, kind):
    text = chatkv("export", chat, "--format", kind).out
    made = chatkv("import", "-", "--json", stdin=text.encode()).json
    assert made["chats"][0]["skipped"]
    made = chatkv(
        "import", "-", "--json", "--format", kind, "--data-dir", str(tmp_path / "b"),
        stdin=text.encode(),
    ).json  # fmt: skip
    assert (made["chats"][0]["turns"], made["failed"]) == (1, [])
    as_json = chatkv("export", chat, "--format", kind, "--json").json["exports"]
    assert as_json == [{"session": chat, "records": [json.loads(text)]}]


def test_markdown(chatkv, chat):
    text = chatkv("export", chat, "--format", "markdown").out
    assert text.startswith('---\ntitle: "ada"\n---\n')
    assert f"<!-- chatkv turn 1 user -->\n\nq {EVIL}\n" in text
    assert (
        chatkv("export", chat, "--format", "markdown", "--json").json["exports"][0]["text"] == text
    )
    assert chatkv("export", chat, "--format", "yaml").code == 2


def test_what_cannot_be_read_is_an_error_with_its_line(chatkv, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"messages":[{"role":"usr","content":"x"}]}\n')
    ran = chatkv("import", str(file))
    assert (ran.code, ran.out) == (1, "")
    assert f"{file}: Line 1: message 1 has the role 'usr'" in ran.err
    assert "Did you mean 'user'?" in ran.err
    error = chatkv("import", str(file), "--json").json["error"]
    assert (error["code"], error["exit"]) == ("bad_file", 1)
    good = '{"messages":[{"role":"user","content":"x"}]}\n'
    file.write_text(good + "{]\n" + good.replace("x", "y"))
    ran = chatkv("import", str(file), "--json")
    assert ran.code == 1
    assert [c["line"] for c in ran.json["chats"]] == [1, 3]
    assert [(c["line"], c["code"]) for c in ran.json["failed"]] == [(2, "bad_file")]
    assert "Line 2" in chatkv("import", str(file)).err
    assert chatkv("import", str(tmp_path / "none")).code == 2
    assert chatkv("import", str(tmp_path)).code == 2


def test_backup_and_recover(chatkv, chat, tmp_path):
    copy, store = tmp_path / "copy.db", tmp_path / "data" / "chat.db"
    made = chatkv("backup", str(copy), "--json").json
    assert (made["sessions"], made["turns"], made["messages"]) == (2, 2, 3)
    assert chatkv("backup", str(copy)).code == 2
    assert "checked" in chatkv("backup", str(copy), "--force").err
    assert chatkv("backup", str(store), "--force").code == 2
    assert chatkv("backup", str(copy), "--data-dir", str(tmp_path / "none")).code == 6
    assert not (tmp_path / "none").exists()

    store.write_bytes(b"\0" * 100 + store.read_bytes()[100:])
    assert chatkv("list").code == 6
    found = chatkv("recover", "--json").json
    assert (found["read"]["messages"], sum(found["lost"].values())) == (3, 0)
    assert found["file"] == str(store.with_name("chat.db.recovered"))
    assert chatkv("recover").code == 2
    assert chatkv("recover", str(tmp_path / "no.db"), "-o", str(copy), "--force").code == 6
    ran = chatkv("recover", str(store), "-o", str(tmp_path / "c" / "chat.db"))
    assert ran.code == 2
    (tmp_path / "c").mkdir(mode=0o700)
    ran = chatkv("recover", str(store), "-o", str(tmp_path / "c" / "chat.db"))
    assert "Read 2 sessions, 2 turns, 3 messages" in ran.err
    assert "nothing" in ran.err
    shown = chatkv("list", "--json", "--data-dir", str(tmp_path / "c")).json["chats"]
    assert {row["name"] for row in shown} == {"ada"}


@pytest.mark.parametrize(
    "args",
    [
        ["export", "@last"],
        ["export", "@last", "--format", "markdown"],
        ["export", "@last", "--format", "openai"],
        ["import", "FILE"],
        ["import", "FILE", "--format", "openai"],
    ],
    ids=" ".join,
)
def test_no_escape_sequence_reaches_a_terminal(chat, tmp_path, args):
    file = tmp_path / "x.jsonl"
    talk = {"messages": [{"role": "user", "content": EVIL}, {"role": EVIL, "content": "x"}]}
    ok = {"title": EVIL, "messages": [{"role": "user", "content": f"x {EVIL}"}]}
    file.write_text(f"{json.dumps(ok)}\n{json.dumps(talk)}\n{{{EVIL}\n", encoding="utf-8")
    master, slave = pty.openpty()
    code = "import sys; from tui.cli import run; sys.exit(run(sys.argv[1:]))"
    args = [str(file) if arg == "FILE" else arg for arg in args]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    seen = b""
    try:
        while data := os.read(master, 4096):
            seen += data
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(master)
    assert child.wait(30) == ("import" in args)
    text = seen.decode()
    assert "gnp" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
