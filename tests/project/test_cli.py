"""Words, flags, errors and exit statuses of the command line."""

from __future__ import annotations

import pytest

from chatkv.errors import StoreError
from tui import cli, wiring


@pytest.mark.parametrize(
    "word", ["lits", "shwo", "chatt", "model", "doctr", "fork-", "hlep", "ls", "Delete"]
)
def test_a_near_miss_of_a_command_is_refused(chatkv, chats, word):
    ran = chatkv(word)
    assert ran.code == 2
    assert "Did you mean" in ran.err
    assert f'chatkv chat "{word}"' in ran.err
    assert chats.rows == []


def test_help_and_version_are_commands_too(chatkv, chats):
    assert chatkv("help").out == chatkv("--help").out
    assert chatkv("help", "kv", "gc").out == chatkv("kv", "gc", "--help").out
    assert chatkv("version").out == chatkv("--version").out
    assert chatkv("help", "nothing").code == 2
    assert chats.rows == []


@pytest.mark.parametrize("text", ["Hello", "Tell me more", "hi", "list the capitals", "What?"])
def test_a_first_word_that_is_no_command_is_a_prompt(chatkv, chats, text):
    ran = chatkv(text, stdin=b"")
    assert ran.code == 0
    assert [turn.prompt for turn in chats.rows[0].told] == [text]


def test_a_command_word_is_a_prompt_behind_two_dashes(chatkv, chats):
    assert chatkv("--", "list", stdin=b"").code == 0
    assert chats.rows[0].told[0].prompt == "list"


def test_options_of_chat_need_no_command(chatkv, chats):
    chats.add("old")
    assert chatkv("--data-dir", "somewhere", "-c", "And then?", stdin=b"").code == 0
    assert [len(chat.told) for chat in chats.rows] == [1]


def test_global_options_may_stand_on_both_sides(chatkv, tmp_path):
    before = chatkv("--data-dir", str(tmp_path / "a"), "config", "path", "--json").json
    behind = chatkv("config", "path", "--json", "--data-dir", str(tmp_path / "a")).json
    assert before == behind
    assert before["data"] == str(tmp_path / "a")


def test_words_without_quotes_get_a_hint(chatkv, chats):
    ran = chatkv("ask", "what", "is", "this")
    assert ran.code == 2
    assert "quotes" in ran.err
    assert chats.rows == []


@pytest.mark.parametrize(
    "args",
    [
        ("ask", "hi", "--max-tokens", "0"),
        ("ask", "hi", "-o", "temprature", "0"),
        ("ask", "hi", "-o", "temperature", "hot"),
        ("ask", "hi", "--spec", "tree"),
        ("ask", "hi", "--timeout", "0"),
        ("ask", "hi", "--no-such-flag"),
        ("ask", "hi", "--raw", "-x"),
        ("ask", "hi", "-c", "-r", "x"),
        ("ask", "hi", "--fork"),
        ("ask", "hi", "-c", "--ephemeral"),
        ("ask", "hi", "-c", "-s", "Be brief."),
        ("ask", ""),
        ("ask", " \n"),
        ("ask",),
        ("list", "--sort", "colour"),
        ("search", " "),
        ("config", "shwo"),
        ("verify", "--temperature", "warm"),
    ],
    ids=" ".join,
)
def test_usage_and_settings_errors_end_with_2_and_one_sentence(chatkv, chats, args):
    chats.add("old")
    ran = chatkv(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("chatkv: ")
    assert "Traceback" not in ran.err
    assert chats.rows[0].told == []
    assert len(chats.rows) == 1


@pytest.mark.parametrize(
    "args", [("ask", "hi", "--max-tokens", "0"), ("ask", "--zzz"), ("list", "-n", "0")]
)
def test_errors_are_json_on_stdout_with_json(chatkv, chats, args):
    ran = chatkv(*args, "--json")
    assert ran.code == 2
    assert ran.err == ""
    error = ran.json["error"]
    assert error["exit"] == 2
    assert error["message"]
    assert set(error) == {"code", "exit", "message", "hint"}


def test_json_behind_two_dashes_is_no_flag(chatkv, chats):
    ran = chatkv("ask", "--max-tokens", "0", "--", "--json")
    assert ran.out == ""


@pytest.mark.parametrize(
    "args", [("show", "nobody"), ("ask", "hi", "-r", "nobody"), ("rm", "nobody")]
)
def test_what_is_not_found_ends_with_3(chatkv, chats, args):
    assert chatkv(*args).code == 3


def test_a_store_that_cannot_be_opened_ends_with_6(chatkv, monkeypatch):
    def refuse(*_, **__):
        raise StoreError("chat.db is damaged.", hint="Keep it.")

    monkeypatch.setattr(wiring, "open_workspace", refuse)
    ran = chatkv("list")
    assert (ran.code, ran.err) == (6, "chatkv: chat.db is damaged.\n  Keep it.\n")


def test_a_bug_is_not_hidden(chatkv, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("bug")

    monkeypatch.setattr(wiring, "open_workspace", broken)
    with pytest.raises(RuntimeError, match="bug"):
        chatkv("list")


def test_help_and_version(chatkv):
    assert chatkv("--version").out.startswith("chatkv ")
    helped = chatkv("--help").out
    assert all(name in helped for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_has_the_help_line_of_the_table(chatkv, name):
    command = cli.cli.get_command(None, name)
    assert command.short_help == cli.COMMANDS[name][1]
    assert command.name == name
    assert chatkv(name, "-h").code == 0
