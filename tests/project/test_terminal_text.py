"""Whatever stands in the store, on the command line or in a file: every command shows it harmless
on a terminal."""

from __future__ import annotations

import json
import sys

import pytest
from data.escape_corpus import CORPUS, KEPT
from terminal import Terminal

from chatkv.events import Delta
from sessions.records import Render
from sessions.store import ChatStore
from tui import cli
from tui.safe_text import safe_text

EVIL = " ".join(text for name, text in CORPUS.items() if name != "long_line") + " ".join(KEPT)
LINE = "".join(char for char in EVIL if char not in "\n\0\ud83d")[:900]
"""As it may stand on a command line."""
FP = b"t" * 32


@pytest.fixture
def store(tmp_path):
    """A chat, its fork and one in the trash, in which every text is hostile."""
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        row = store.create_session("", EVIL, {"model": EVIL, "sampling": {"stop": [EVIL]}})
        for _ in range(2):
            head = store.session(row.id).head_turn_id or 0
            begun = store.begin_turn(
                row.id, head, head, f"needle {EVIL}", {"seed": 1}, render=Render(FP, (1, 2))
            )
            usage = {"reuse_reason": EVIL, "finish_reason": EVIL, "model": EVIL, "cached_tokens": 1}
            usage |= {"prompt_tokens": 2, "prompt_n": 1}
            store.finish_turn(begun.turn_id, "done", EVIL, FP, (3, 4), ((0, 2),), usage)
        store.rename(row.id, LINE)
        fork = store.fork(row.id, None, LINE)
        gone = store.create_session(LINE)
        store.trash(gone.id)
        yield row.id, fork.id, gone.id


@pytest.fixture
def chatkv(tmp_path, monkeypatch):
    """Run a command on a terminal; its status and all that was shown, which must be harmless."""

    def call(*args: str) -> tuple[int, str]:
        terminal = Terminal()
        for name, stream in (
            ("stdout", terminal),
            ("stderr", terminal),
            ("stdin", Terminal("y\n")),
        ):
            monkeypatch.setattr(sys, name, stream)
        code = cli.run(args)
        shown = terminal.text
        assert safe_text(shown).replace("\n", "") == shown.replace("\n", "")  # lines may be folded
        return code, shown

    return call


READING = (
    ["list"],
    ["list", "--json"],
    ["show", "MAIN"],
    ["show", "MAIN", "--turn", "-1"],
    ["show", "MAIN", "--tree"],
    ["show", "MAIN", "--json"],
    ["search", "needle"],
    ["search", "needle", "--json"],
    ["explain", "MAIN"],
    ["explain", "MAIN", "--json"],
    ["export", "MAIN"],
    ["export", "MAIN", "--format", "openai"],
    ["export", "MAIN", "--format", "markdown"],
    ["list", "--trash"],
)
CHANGING = (
    ["rename", "MAIN", LINE],
    ["fork", "MAIN", "--name", LINE],
    ["redact", "MAIN", "1"],
    ["redact", "MAIN", "1", "--purge"],
    ["rm", "MAIN"],
    ["rm", "MAIN", "--forever"],
    ["restore", "GONE"],
    ["trash", "empty"],
)
FAILING = (
    ["show", LINE],
    ["search", " "],
    ["fork", "MAIN", "--turn", LINE],
    ["redact", "MAIN", LINE],
    ["import", LINE],
    ["export", "MAIN", "-o", f"/nowhere/{LINE}"],
    ["models", "show", LINE],
    ["ask", "-m", LINE, "hello"],
    ["ask", "-o", LINE, LINE, "hello"],
    ["ask", f"--{LINE}"],
    ["config", f"--{LINE}"],
    ["list", "--data-dir", f"/proc/{LINE}"],
    ["list", "--config", LINE],
    ["recover", LINE],
)


@pytest.mark.parametrize("args", [*READING, *CHANGING], ids=lambda args: " ".join(args)[:30])
def test_commands_on_hostile_chats(chatkv, store, args):
    names = dict(zip(("MAIN", "FORK", "GONE"), store, strict=True))
    code, shown = chatkv(*(names.get(arg, arg) for arg in args))
    assert code == 0
    assert shown or args[0] == "fork"


@pytest.mark.parametrize("args", FAILING, ids=lambda args: " ".join(args)[:20])
def test_errors_that_quote(chatkv, store, args):
    names = dict(zip(("MAIN", "FORK", "GONE"), store, strict=True))
    code, shown = chatkv(*(names.get(arg, arg) for arg in args))
    assert code != 0
    assert shown.startswith("chatkv: ")


def test_a_hostile_settings_file(chatkv, store, tmp_path):
    file = tmp_path / "settings.toml"
    for text in (f"x = {json.dumps(LINE)}", f"model = {json.dumps(LINE)}", LINE):
        file.write_text(text, encoding="utf-8")
        for command in (["config"], ["list"], ["doctor"]):
            chatkv(*command, "--config", str(file))


@pytest.mark.parametrize("lines", [["ask", "hello"], ["chat", "--plain", "hello"]])
def test_a_reply_cut_anywhere(chatkv, chats, lines):
    text = CORPUS["tmux"] + CORPUS["c1_osc"] + CORPUS["bidi"] + "e" + "\u0301" * 40
    chats.script = lambda _, prompt: (Delta(char, (1,)) for char in text)
    code, shown = chatkv(*lines)
    assert code == 0
    assert "␛" in shown
