"""Scripted ports behind `tui.wiring`: the commands run, no model does."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from chatkv.errors import ConfigError, UnknownSession
from chatkv.events import Delta, Done, Event, ForgetPlanned, Prefill, Ready, Rendered, Usage
from sessions.port import (
    ChatRow,
    ContextTurn,
    ContextView,
    EngineState,
    Preview,
    TreeTurn,
    TurnView,
)
from tui import wiring
from tui.cli import run

WORDS = ("Paris", " is", " the", " capital", ".")
USAGE = Usage(
    prompt_tokens=40,
    cached_tokens=30,
    prompt_n=10,
    prompt_ms=5.0,
    predicted_n=5,
    predicted_ms=50.0,
    steps=2,
    draft_n=6,
    draft_n_accepted=3,
    context_limit=4096,
    context_used=46,
    context_reserved=1024,
)


class FakeEngine:
    """Ready once started."""

    def __init__(self) -> None:
        self.state = EngineState()
        self.started = self.closed = False

    def watch(self, callback: Callable[[EngineState], None]) -> None:
        pass

    def start(self) -> None:
        self.started = True
        ready = Ready("Toy", "cpu", "cpu", "exact", 4096, "auto", "00")
        self.state = EngineState("ready", ready=ready)

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        assert self.state.ready is not None
        return self.state.ready

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        assert op == "explain_drafting"
        return {"text": "Drafting is on (auto). Drafters: ngram."}

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeChat:
    """Replies with WORDS, one a delta; `script` may put other events in their place."""

    id: str
    name: str = ""
    fork_name: str = "main"
    system: str | None = None
    forked_from: str | None = None
    trashed: bool = False
    sampling: dict[str, Any] = field(
        default_factory=lambda: {"temperature": 0.7, "max_tokens": None, "seed": None}
    )
    told: list[TurnView] = field(default_factory=list)
    owner: Any = None
    spec: str = "auto"
    cancelled: bool = False
    expected: bool = False
    policy: str = "error"
    missing: tuple[int, ...] = ()

    def set_policy(self, policy: str) -> None:
        self.policy = policy

    def context(self) -> ContextView:
        turns = tuple(
            ContextTurn(t.number, t.id, t.prompt, 10, "forgotten" if t.number in self.missing
                        else "live", "turns" if t.number in self.missing else "")
            for t in self.told
        )  # fmt: skip
        why = dict.fromkeys(self.missing, "turns")
        return ContextView(4096, 46, 46, 512, self.policy, 5, turns, self.missing, why)

    def plan(self, text: str, beside: int | None = None) -> list[ForgetPlanned]:
        if len(text) < 40:
            return []
        return [ForgetPlanned("turns", "limit", (1,), (), 10, 4000, 3990, 4096, 0, 0)]

    def turns(self) -> list[TurnView]:
        return list(self.told)

    def preview(self, turn_id: int | None = None) -> Preview:
        return Preview(2700 if turn_id is None else turn_id, 150, 1, 12, 4_300_000, 57, 4, 290.0)

    def expect(self) -> None:
        self.expected = True

    def tree(self) -> list[TreeTurn]:
        return [
            TreeTurn(turn.id, turn.id - 1 if turn.number > 1 else None, turn.number, self.id,
                     turn.prompt, turn.state, True)
            for turn in self.told
        ]  # fmt: skip

    def send(self, text: str) -> Iterator[Event]:
        self.cancelled, said = False, ""
        number = len(self.told) + 1
        self.told.append(TurnView(10 + number, number, text, "", "open", 1_700_000_000_000, seed=7))
        yield Rendered(())
        yield Prefill(30, 40, 40)
        try:
            for event in self.owner.script(self, text):
                if isinstance(event, Delta):
                    said += event.text
                yield event
                if self.cancelled:
                    break
        finally:
            state = "interrupted" if self.cancelled else "done"
            self.told[-1] = TurnView(
                10 + number, number, text, said, state, 1_700_000_000_000, USAGE, "stop", 7
            )
        reason = "cancelled" if self.cancelled else "stop"
        yield Done(reason, said, (1, 2), ((0, 2),), USAGE, self.owner.notice)

    def again(self) -> Iterator[Event]:
        prompt = self.told.pop().prompt
        return self.send(prompt)

    def edit(self, turn_id: int, text: str) -> Iterator[Event]:
        del self.told[[turn.id for turn in self.told].index(turn_id) :]
        return self.send(text)

    def fork(self, turn_id: int | None = None, name: str = "") -> FakeChat:
        made = self.owner.add(self.name, fork=name or f"fork-{len(self.owner.rows)}")
        made.forked_from = self.id
        stop = len(self.told) if turn_id is None else [t.id for t in self.told].index(turn_id) + 1
        made.told = self.told[:stop]
        return made

    def rename(self, name: str) -> None:
        self.name = name

    def set_spec(self, mode: str) -> None:
        self.spec = mode

    def explain_spec(self) -> str:
        return f"Drafting ({self.spec}): ngram guessed."

    def set(self, key: str, value: Any) -> None:
        if key == "top_p" and value == 0.123:
            raise ConfigError("No top_p of 0.123 here.")
        self.sampling[key] = value

    def cancel(self) -> None:
        self.cancelled = True


class FakeChats:
    """Chats in a list, the newest last."""

    Engine = FakeEngine

    def __init__(self) -> None:
        self.rows: list[FakeChat] = []
        self.script: Callable[[FakeChat, str], Iterator[Event]] = words
        self.notice = ""
        self.engines: list[FakeEngine] = []
        self.ephemeral = False

    def add(self, name: str = "", *, fork: str = "main") -> FakeChat:
        chat = FakeChat(f"chat{len(self.rows):08}x", name, fork, owner=self)
        self.rows.append(chat)
        return chat

    def chats(self, query: str = "", *, limit: int = 200, trash: bool = False) -> list[ChatRow]:
        found = [
            ChatRow(
                chat.id,
                chat.name,
                chat.fork_name,
                len(chat.told),
                100 * len(chat.told),
                1_700_000_000_000 + number,
                "Toy",
                chat.forked_from,
                match=chat.told[0].prompt if query else "",
            )
            for number, chat in enumerate(self.rows)
            if chat.trashed == trash and query in " ".join(t.prompt for t in chat.told)
        ]
        return found[::-1][:limit]

    def open(self, ref: str) -> FakeChat:
        live = [chat for chat in self.rows if not chat.trashed]
        if ref == "@last" and live:
            return live[-1]
        for chat in live:
            if ref in (chat.id, chat.name, f"{chat.name}:{chat.fork_name}"):
                return chat
        raise UnknownSession(f"There is no conversation {ref!r}.", hint="chatkv list")

    def new(self, name: str = "", *, system: str | None = None) -> FakeChat:
        chat = self.add(name)
        chat.system = system
        return chat

    def trash(self, ref: str) -> None:
        self.open(ref).trashed = True

    def restore(self, ref: str) -> None:
        for chat in self.rows:
            if chat.trashed and ref in (chat.id, chat.name):
                chat.trashed = False
                return
        raise UnknownSession(f"There is no conversation {ref!r} in the trash.")


class FakeStore:
    def close(self) -> None:
        pass


def words(chat: FakeChat, text: str) -> Iterator[Event]:
    """The script of a chat that nobody gave one."""
    for number, word in enumerate(WORDS):
        yield Delta(word, (number,))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> None:
    """No test sees the user's files or settings."""
    for name in [name for name in os.environ if name.startswith("CHATKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CHATKV_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def chats(monkeypatch) -> FakeChats:
    """The conversations that every command of the test sees."""
    fake = FakeChats()
    engines = fake.engines

    def open_workspace(settings, *, ephemeral=False, resume=None, policy="error"):
        engines.append(FakeEngine())
        fake.ephemeral = ephemeral
        model = settings["model"]
        store: Any = FakeStore()
        engine: Any = engines[-1]
        chats: Any = fake
        return wiring.Workspace(settings, store, engine, chats, model, ephemeral)

    monkeypatch.setattr(wiring, "open_workspace", open_workspace)
    return fake


class Stdin(io.TextIOWrapper):
    """Bytes on a pipe, or a terminal that says nothing."""

    def __init__(self, data: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="surrogateescape")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@dataclass
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        (line,) = self.out.splitlines()
        data = json.loads(line)
        assert data["v"] == 1
        return data

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def chatkv(capfd, monkeypatch) -> Callable[..., Ran]:
    """Run a command line in this process."""

    def call(*args: str, stdin: bytes | None = None) -> Ran:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin or b"", stdin is None))
        code = run(args)
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return call
