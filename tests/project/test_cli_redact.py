"""`redact` on real files: no page that saw the words is left, after --purge no trace at all."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from fakes import TinyModel
from project.program import files_with, payloads, program, say, traces_of

from tui import output

SECRET = "the xylophone is buried under the old oak"
AFTER = "zebras of the turn behind it"


@pytest.fixture
def data(tmp_path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def told(data) -> dict[str, str]:
    """Three turns, the secret in the second; a fork that shares it; another chat that does not."""
    with program(data) as chats:
        chat = chats.new("ada")
        say(chat, "first words of all")
        say(chat, SECRET)
        list(chat.again())
        side = chat.fork(name="side")
        say(chat, AFTER)
        other = chats.new("bob")
        say(other, "first words of all")
        return {"ada": chat.id, "side": side.id, "bob": other.id}


def test_no_page_that_saw_it_is_left_and_the_text_stays_readable(chatkv, told, data):
    rows = [*payloads(data, SECRET), *payloads(data, AFTER)]
    assert len(rows) > 3
    ran = chatkv("redact", told["ada"], "2", "--yes", "--json")
    assert ran.code == 0
    assert ran.json["redacted"] == [2]
    assert ran.json["versions"] == 1
    assert ran.json["forks"] == ["ada:side"]
    assert ran.json["pages"] >= len(rows)
    assert files_with(data, *rows) == []
    assert files_with(data, *traces_of(SECRET)) == ["chat.db"]
    turns = chatkv("show", told["ada"], "--json").json["turns"]
    assert [turn["prompt"] for turn in turns] == ["first words of all", SECRET, AFTER]
    assert [turn["redacted"] for turn in turns] == [False, True, False]
    # What comes before it, in every chat, is still there.
    with program(data) as chats:
        assert say(chats.open(told["bob"]), "and on").usage.restored_pages > 0


def test_after_purge_no_file_holds_text_or_ids(chatkv, told, data):
    (data / "chat.db.bak-0").write_bytes(SECRET.encode())
    (data / "kv" / "kv.db.damaged").write_bytes(SECRET.encode())
    ran = chatkv("redact", told["ada"], "2", "--purge", "--yes", "--json").json
    assert [Path(file).name for file in ran["files"]] == ["chat.db.bak-0"]
    assert files_with(data, *traces_of(SECRET)) == []
    assert "chat.db" in files_with(data, AFTER.encode())
    turns = chatkv("show", told["ada"], "--json").json["turns"]
    assert [turn["prompt"] for turn in turns] == ["first words of all", "", AFTER]
    assert chatkv("search", "xylophone", "--json").json["chats"] == []


def test_what_the_model_is_shown_later_holds_none_of_it(chatkv, told, data, monkeypatch):
    chatkv("redact", told["ada"], "2", "--yes")
    seen: list[int] = []
    for name in ("step", "prefill"):
        inner = getattr(TinyModel, name)

        def note(self, first, *args, inner=inner, **kwargs):
            seen.extend(first.tokens if hasattr(first, "tokens") else first)
            return inner(self, first, *args, **kwargs)

        monkeypatch.setattr(TinyModel, name, note)
    with program(data) as chats:
        for name in ("ada", "side"):
            say(chats.open(told[name]), "go on from here")
    text = bytes(token for token in seen if token < 256).decode("utf-8", "replace")
    assert "go on from here" in text
    assert AFTER in text
    assert "xylophone" not in text
    # A later redaction finds the pages that were made without the first one's words.
    rows = payloads(data, AFTER)
    assert rows
    assert chatkv("redact", told["ada"], "3", "--yes").code == 0
    assert files_with(data, *rows) == []


def test_in_an_open_chat_memory_forgets_too(told, data):
    with program(data) as chats:
        chat = chats.open(told["ada"])
        say(chat, "it is in the pool now")
        pool = chats.engine.service.engine.pool
        secret = payloads(data, SECRET)[0]
        assert secret in _raw(pool)
        turn = chat.turns()[1]
        assert chat.shared_with([turn.id]) == ("ada:side",)
        assert chat.redact([turn.id], purge=True).pages > 0
        assert secret not in _raw(pool)
        assert files_with(data, *traces_of(SECRET)) == []
        assert chat.turns()[1].redacted
        say(chat, "and on")
    assert files_with(data, *traces_of(SECRET)) == []


def _raw(pool) -> bytes:
    return pool.data.transpose(0, 1).contiguous().numpy().tobytes()


def test_a_second_time_with_purge_blanks_what_was_kept(chatkv, told, data):
    assert chatkv("redact", told["ada"], "2", "--yes").code == 0
    assert chatkv("redact", told["side"], "2", "--purge", "--yes").code == 0
    assert files_with(data, *traces_of(SECRET)) == []


def test_it_has_to_be_confirmed(chatkv, told, data, monkeypatch):
    without = chatkv("redact", told["ada"], "2", stdin=b"")
    assert without.code == 2
    assert "shared with ada:side" in without.err
    asked = []

    def refuse(text, **_):
        asked.append(text)
        raise click.Abort

    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setattr("click.confirm", refuse)
    ran = chatkv("redact", told["ada"], "-2--1")
    assert ran.code == 130
    assert "turns 2-3?" in asked[0]
    assert "Shared with ada:side" in ran.err
    assert "1 other reply to" in ran.err
    assert not chatkv("show", told["ada"], "--json").json["turns"][1]["redacted"]


@pytest.mark.parametrize(
    ("turns", "code", "says"),
    [
        ("0", 3, "no turn 0"),
        ("9", 3, "This chat has 3 turns"),
        ("two", 2, "'two' is no turn"),
        ("3-1", 2, "Write 1-3"),
        ("-4", 3, "no turn -4"),
        ("--purg", 2, "'--purg' is no turn"),
    ],
)
def test_bad_turns_are_named(chatkv, told, turns, code, says):
    ran = chatkv("redact", told["ada"], turns, "--yes")
    assert (ran.code, says in ran.err) == (code, True), ran.err


def test_a_running_turn_is_refused(told, data):
    with program(data) as chats:
        chat = chats.open(told["ada"])
        events = chat.send("still running")
        next(events)
        ran = chat.turns()[-1]
        with pytest.raises(Exception, match="being answered"):
            chat.redact([ran.id])
        events.close()
