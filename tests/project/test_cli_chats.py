"""`list, show, search, rename, fork, rm, restore`, and the chat without a screen."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from chatkv.errors import EngineLost
from chatkv.events import Delta
from sessions.port import Preview
from tui import actions, answer, output, plain, wiring


@pytest.fixture
def told(chatkv, chats):
    """Two chats, of two turns and one."""
    for name, prompts in (("ada", ("one", "two")), ("bob", ("three",))):
        chats.add(name)
        for prompt in prompts:
            assert chatkv("ask", prompt, "-c").code == 0
    return chats


def test_list(chatkv, told):
    rows = chatkv("list", "--json").json["chats"]
    assert [row["name"] for row in rows] == ["bob", "ada"]
    assert set(rows[0]) == {
        "id",
        "name",
        "fork",
        "turns",
        "tokens",
        "updated_at",
        "model",
        "forked_from",
        "forked_at",
    }
    assert [r["name"] for r in chatkv("list", "-n", "1", "--json").json["chats"]] == ["bob"]
    biggest = chatkv("list", "--sort", "size", "-n", "1", "--json").json["chats"]
    assert [row["name"] for row in biggest] == ["ada"]
    names = chatkv("list", "--sort", "name", "--json").json["chats"]
    assert [row["name"] for row in names] == ["ada", "bob"]
    head, first, _ = chatkv("list").out.splitlines()
    assert head.split()[:3] == ["name", "turns", "tok"]
    assert first.split()[:3] == ["bob", "1", "100"]


@pytest.mark.parametrize("wide", [60, 80, 130])
def test_a_list_is_as_wide_as_the_terminal(chatkv, told, monkeypatch, wide):
    name = "a very long name of a chat that says all that was talked about in it"
    chatkv("rename", "ada", name)
    assert chatkv("fork", name, "--name", "side-track").code == 0
    whole = chatkv("list").out
    assert "talked about in it:side-track" in whole  # a pipe gets names that can be used
    monkeypatch.setattr("tui.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", str(wide))
    lines = chatkv("list").out.splitlines()
    assert max(map(len, lines)) <= wide
    assert sum(":side-track " in line for line in lines) == 1
    assert ("model" in lines[0]) == (wide > 60)


def test_an_empty_list(chatkv, chats):
    ran = chatkv("list")
    assert (ran.code, ran.out) == (0, "")
    assert "no chats" in ran.err
    assert chatkv("-q", "list").err == ""
    assert chatkv("list", "--json").json == {"v": 1, "chats": []}


def test_show(chatkv, told):
    data = chatkv("show", "ada", "--json").json
    assert (data["session"], data["name"], data["fork"]) == (told.rows[0].id, "ada", "main")
    assert [(t["turn"], t["prompt"]) for t in data["turns"]] == [(1, "one"), (2, "two")]
    assert data["turns"][0]["timings"]["prompt_n"] == 10
    assert data["turns"][0]["text"] == "Paris is the capital."
    last = chatkv("show", "ada", "--turn", "-1", "--json").json["turns"]
    assert [turn["prompt"] for turn in last] == ["two"]
    assert chatkv("show", "@last").out.splitlines()[1] == "three"
    assert chatkv("show", "ada", "--turn", "9").code == 3
    assert chatkv("show", "ada", "--turn", "x").code == 2


def test_show_the_tree(chatkv, told):
    assert chatkv("show", "ada", "--tree").out.splitlines()[0] == "● 1 one"
    (turn, *_) = chatkv("show", "ada", "--tree", "--json").json["tree"]
    assert (turn["number"], turn["parent_id"], turn["on_path"]) == (1, None, True)
    assert chatkv("show", "ada", "--tree", "--turn", "1").code == 2


def test_what_going_on_would_cost(chatkv, told, monkeypatch):
    monkeypatch.setattr(wiring.Workspace, "start", lambda work: work.engine.start())
    ran = chatkv("explain", "ada", "--preview")
    assert ran.out == (
        "2,700 tokens: about 290 ms, pages: 151 in memory, 12 from disk (4 MiB), "
        "4 to compute (57 tokens)\n"
    )
    ran = chatkv("explain", "ada", "--preview", "--at", "1", "--json")
    assert (ran.json["preview"]["tokens"], ran.json["preview"]["disk_pages"]) == (11, 12)
    assert chatkv("explain", "ada", "--at", "1").code == 2
    nothing = Preview(0, 0, 0, 0, 0, 0, 0, 1500.0)
    assert answer.preview_words(nothing) == "about 1.5 s, nothing to read or compute"
    assert answer.preview_words(replace(nothing, pool_pages=1, ms=None)) == "pages: 1 in memory"


def test_search(chatkv, told):
    rows = chatkv("search", "three", "--json").json["chats"]
    assert [(row["name"], row["match"]) for row in rows] == [("bob", "three")]
    assert "bob" in chatkv("search", "three").out
    assert chatkv("search", "absent", "--json").json["chats"] == []


def test_rename(chatkv, told):
    assert chatkv("rename", "ada", "lovelace", "--json").json["name"] == "lovelace"
    assert told.rows[0].name == "lovelace"
    assert chatkv("rename", "lovelace", " ").code == 2


def test_fork(chatkv, told):
    data = chatkv("fork", "ada", "--at", "1", "--name", "short", "--json").json
    assert (data["fork"], data["turns"], data["forked_from"]) == ("short", 1, told.rows[0].id)
    assert data["session"] == told.rows[2].id
    assert [turn.prompt for turn in told.rows[0].told] == ["one", "two"]
    assert chatkv("fork", "ada", "--at", "7").code == 3


def test_rm_and_restore(chatkv, told):
    assert chatkv("rm", "ada", "bob", "--yes", "--json").json["trashed"] == [
        told.rows[0].id,
        told.rows[1].id,
    ]
    assert chatkv("list", "--json").json["chats"] == []
    assert len(chatkv("list", "--trash", "--json").json["chats"]) == 2
    assert chatkv("restore", "ada").code == 0
    assert [row["name"] for row in chatkv("list", "--json").json["chats"]] == ["ada"]


def test_rm_of_one_that_is_missing_removes_none(chatkv, told):
    assert chatkv("rm", "ada", "nobody", "--yes").code == 3
    assert not told.rows[0].trashed


def test_rm_asks_a_person(chatkv, told, monkeypatch):
    monkeypatch.setattr("click.confirm", _refuse)
    assert chatkv("rm", "ada").code == 130
    assert not told.rows[0].trashed
    assert chatkv("rm", "ada", stdin=b"").code == 0
    assert told.rows[0].trashed


def _refuse(*_, **__):
    import click

    raise click.Abort


def test_lines_are_prompts(chatkv, chats):
    ran = chatkv("chat", "first", "-o", "temperature", "0", stdin=b"second\n\ncaf\xe9\n")
    assert ran.code == 0
    assert [t.prompt for t in chats.rows[0].told] == ["first", "second", "caf\ufffd"]
    assert ran.out == 3 * "Paris is the capital.\n"
    assert chats.rows[0].sampling["temperature"] == 0
    assert "not valid UTF-8" in ran.err


def test_slash_commands(chatkv, told):
    script = b"""
/open ada
/rename lovelace
/fork 1 side
//literal
/again
/edit
changed
/tree
/set temperature 0.5
/spec none
/spec
/copy
/stats
/new fresh
hello
/exit
never
"""
    ran = chatkv("chat", "-c", "--plain", stdin=script)
    assert ran.code == 0
    ada, _, side, fresh = told.rows
    assert (ada.name, side.fork_name) == ("lovelace", "side")
    assert [turn.prompt for turn in side.told] == ["one", "changed"]
    assert (side.sampling["temperature"], side.spec) == (0.5, "none")
    assert [turn.prompt for turn in fresh.told] == ["hello"]
    assert "was: /literal" in ran.err
    assert "● 1 one\n● 2 changed\n" in ran.err
    assert "Drafting (none): ngram guessed." in ran.err


@pytest.mark.parametrize(
    "line", ["/forkk", "/open", "/open nobody", "/set temprature 1", "/spec x"]
)
def test_a_wrong_slash_command_ends_a_script(chatkv, chats, line):
    ran = chatkv("chat", stdin=line.encode())
    assert ran.code in (2, 3)
    assert ran.err.startswith("chatkv: ")
    assert all(not chat.told for chat in chats.rows)


def test_a_person_stays_in_the_chat_after_an_error(chatkv, chats, monkeypatch):
    lines = iter(["/forkk", "hello", "again"])

    def script(chat, text):
        yield Delta("Hi.", (1,))
        if text == "hello":
            raise EngineLost("The engine process ended (signal 9).")

    def type_line(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    chats.script = script
    monkeypatch.setattr("builtins.input", type_line)
    ran = chatkv("chat", "--plain")
    assert ran.code == 0
    assert "Did you mean /fork?" in ran.err
    assert "signal 9" in ran.err
    assert [turn.prompt for turn in chats.rows[0].told] == ["hello", "again"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_the_reply_and_term_the_chat(chatkv, chats, monkeypatch, number, code):
    def script(chat, text):
        yield Delta("Par", (1,))
        if text == "one":
            os.kill(os.getpid(), number)
        yield from (Delta(".", (2,)) for _ in range(9))

    lines = iter(["one", "two"])
    chats.script = script
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or _end())
    assert chatkv("chat", "--plain").code == code
    states = [turn.state for turn in chats.rows[0].told]
    assert states == ["interrupted", "done"][: 2 if code == 0 else 1]


def _end():
    raise EOFError


@pytest.mark.parametrize("person", [True, False])
def test_the_engine_hears_which_chat_a_person_has_open(chatkv, told, monkeypatch, person):
    ada, bob = (next(row for row in told.rows if row.name == name) for name in ("ada", "bob"))

    def type_line(prompt):
        while not bob.expected:
            time.sleep(0.01)
        return "/exit"

    monkeypatch.setattr("builtins.input", type_line)
    assert chatkv("chat", "--plain", "-c", stdin=None if person else b"").code == 0
    assert (ada.expected, bob.expected) == (False, person)


def test_every_slash_command_of_the_screen_works_without_it():
    assert all(hasattr(plain.PlainChat, f"_do_{line.name}") for line in actions.COMMANDS)


@pytest.fixture
def screen(monkeypatch):
    """Both ends are a terminal; the screen is not drawn. What it was given."""
    given = {}

    def run_screen(work, chat, **words):
        given.update(words, chat=chat, settings=work.settings)
        assert work.engine.started
        return 0

    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setattr(wiring, "run_screen", run_screen)
    monkeypatch.setenv("TERM", "xterm")
    return given


def test_the_screen_gets_what_the_flags_say(chatkv, chats, screen):
    chats.add("old")
    assert chatkv("-c", "--theme", "nord", "--ascii", "Hello?").code == 0
    assert (screen["chat"].name, screen["prompt"], screen["pick"]) == ("old", "Hello?", False)
    assert (screen["settings"]["ui.theme"], screen["settings"]["ui.ascii"]) == ("nord", True)
    assert chatkv("-r").code == 0
    assert screen["pick"]
    assert chatkv("-r", "old").code == 0
    assert (screen["chat"].name, screen["pick"]) == ("old", False)


def test_themes_and_keys_are_checked_before_anything_starts(chatkv, chats, screen, tmp_path):
    ran = chatkv("chat", "--theme", "nrd")
    assert (ran.code, "Did you mean nord?" in ran.err) == (2, True)
    path = tmp_path / "keys.toml"
    path.write_text('[keys]\n"chat.stopp" = "f5"\n')
    ran = chatkv("chat", "--config", str(path))
    assert (ran.code, "Did you mean chat.stop?" in ran.err) == (2, True)
    assert chats.engines == []


@pytest.mark.parametrize("how", ["--plain", "TERM"])
def test_lines_where_a_screen_cannot_be(chatkv, chats, screen, monkeypatch, how):
    monkeypatch.setattr("builtins.input", lambda prompt: _end())
    if how == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    assert chatkv("chat", *(["--plain"] if how == "--plain" else [])).code == 0
    assert screen == {}
    assert chatkv("chat", "--plain", "-r").code == 2
