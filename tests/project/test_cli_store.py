"""The commands on a real chat.db; only the engine is scripted."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator

import pytest

from chatkv.events import Delta, Done, Event, MessageIds, Prefill, Ready, Rendered, Usage
from sessions.port import EngineState, Watchers
from sessions.request import Request
from tui import wiring

TOK_FP = "ab" * 32


class Scripted(Watchers):
    """An engine that repeats the prompt, word by word; ids count up."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.cancelled = False
        self.signal: int | None = None

    def watch(self, callback) -> None:
        self.callbacks.append(callback)

    def start(self) -> None:
        ready = Ready("Toy", "cpu", "cpu", "exact", 4096, "auto", TOK_FP)
        self.move(EngineState("ready", ready=ready))

    def wait_ready(self, timeout_s=None) -> Ready:
        assert self.state.ready is not None
        return self.state.ready

    def cancel(self) -> None:
        self.cancelled = True

    def call(self, op, **args):
        return {}

    def close(self) -> None:
        self.move(EngineState("absent"))

    def generate(self, request: Request) -> Iterator[Event]:
        self.requests.append(request)
        self.cancelled = False
        missing = [n for n, message in enumerate(request.messages) if message.ids is None]
        yield Rendered(tuple(MessageIds(n, (100 + n,), ()) for n in missing))
        yield Prefill(0, 1, 1)
        said = ""
        for number, word in enumerate(request.messages[-1].content.split()):
            said += word + " "
            yield Delta(word + " ", (number,))
            if self.signal and number == 0:
                os.kill(os.getpid(), self.signal)
                while not self.cancelled:
                    time.sleep(0.01)
            if self.cancelled:
                break
        ids = tuple(range(len(said.split())))
        reason = "cancelled" if self.cancelled else "stop"
        usage = Usage(prompt_tokens=9, predicted_n=len(ids), steps=1, context_limit=4096)
        yield Done(reason, said, ids, ((0, len(ids)),), usage)


@pytest.fixture(autouse=True)
def engine(monkeypatch) -> Scripted:
    monkeypatch.setenv("CHATKV_MODEL", __file__)
    monkeypatch.setattr("chatkv.models.catalog.find", lambda name: None)
    scripted = Scripted()
    monkeypatch.setattr(wiring, "make_engine", lambda *_, **__: scripted)
    return scripted


def names(chatkv, *args: str) -> list[tuple[str, str, int]]:
    rows = chatkv("list", "--json", *args).json["chats"]
    return [(row["name"], row["fork"], row["turns"]) for row in rows]


def test_a_life(chatkv, engine, tmp_path):
    first = chatkv("ask", "one fish", "--json", "-s", "Be brief.", "-o", "temperature", "0").json
    assert (first["text"], first["turn"], first["name"]) == ("one fish ", 1, "one fish")
    second = chatkv("ask", "two fish", "-c", "--json", "--seed", "5").json
    assert (second["session"], second["turn"], second["seed"]) == (first["session"], 2, 5)
    messages = engine.requests[-1].messages
    assert [m.content for m in messages] == ["Be brief.", "one fish", "one fish ", "two fish"]
    assert engine.requests[-1].sampling["temperature"] == 0
    assert chatkv("rename", first["session"][:6], "fish").code == 0
    forked = chatkv("ask", "red fish", "-r", "fish", "--fork", "1", "--json").json
    assert forked["turn"] == 2
    assert {name for name, _, _ in names(chatkv)} == {"fish"}
    assert len(names(chatkv)) == 2
    made = chatkv("fork", "fish:main", "--name", "side", "--json").json
    assert (made["name"], made["fork"], made["turns"]) == ("fish", "side", 2)
    shown = chatkv("show", "fish:side", "--json").json
    assert [turn["prompt"] for turn in shown["turns"]] == ["one fish", "two fish"]
    assert (shown["name"], shown["fork"]) == ("fish", "side")
    assert chatkv("show", "@last", "--json").json["session"] == made["session"]
    found = chatkv("search", "red", "--json").json["chats"]
    assert [row["id"] for row in found] == [forked["session"]]
    assert "red" in found[0]["match"]
    lines = [json.loads(line) for line in chatkv("export", "fish:main").out.splitlines()]
    assert lines[0]["format"] == "chatkv/1"
    path = tmp_path / "data" / "chat.db"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_trash(chatkv):
    session = chatkv("ask", "hello", "--json").json["session"]
    assert chatkv("rm", "@last", "--yes", "--json").json["trashed"] == [session]
    assert names(chatkv) == []
    assert names(chatkv, "--trash") == [("hello", "main", 1)]
    missing = chatkv("show", session)
    assert (missing.code, "restore" in missing.err) == (3, True)
    assert chatkv("restore", session).code == 0
    assert names(chatkv) == [("hello", "main", 1)]


def test_a_new_chat_keeps_no_trace_until_something_is_sent(chatkv):
    assert chatkv("chat", "--plain", stdin=b"/new x\n").code == 0
    assert names(chatkv) == []


def test_ephemeral_leaves_nothing(chatkv, tmp_path):
    assert chatkv("ask", "hello", "--ephemeral").out == "hello "
    assert not (tmp_path / "data").exists()


def test_lines(chatkv, engine):
    script = (
        b"one\n/again\n/edit\ntwo\n/spec none\n/set top_k 5\nthree\n/fork 1 side\nfour\n/stats\n"
    )
    ran = chatkv("chat", stdin=script)
    assert ran.code == 0, ran.err
    assert ran.out == "one \none \ntwo \nthree \nfour \n"
    assert engine.requests[3].spec == "none"
    assert engine.requests[3].sampling["top_k"] == 5
    assert sorted(names(chatkv)) == [("two", "main", 2), ("two", "side", 2)]


def test_a_signal_keeps_the_partial(chatkv, engine):
    engine.signal = signal.SIGINT
    ran = chatkv("ask", "one two three", "--json")
    assert (ran.code, ran.json["text"]) == (130, "one ")
    engine.signal = None
    (turn,) = chatkv("show", "@last", "--json").json["turns"]
    assert (turn["text"], turn["state"]) == ("one ", "interrupted")
    assert chatkv("ask", "go on", "-c").code == 0


def test_a_store_of_another_program_is_refused(chatkv, tmp_path):
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "chat.db").write_bytes(b"not a database" * 999)
    ran = chatkv("ask", "hello")
    assert (ran.code, ran.out) == (6, "")
    assert ran.err.startswith("chatkv: ")
    assert chatkv("list", "--json").json["error"]["exit"] == 6
