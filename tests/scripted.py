"""A chat that plays a script and goes on where it was killed. The kill loop runs and kills it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from chatkv.events import Done
from sessions.chat import Chats
from sessions.port import ChatPort, EnginePort
from sessions.store import ChatStore

PROMPTS = ["the cat sat on the mat", "and then?", "the cat sat on the mat again", "why?", "the end"]


def play(folder: Path, number: int, kind: str) -> None:
    """Play conversation `number` to its end; says `ack N` and `done N` on stdout as turns go.

    Args:
        folder: Of the stores.
        number: Names the conversation and makes its seeds.
        kind: `tiny` computes in this process, with the tiny model; `real` is a front with the
            default model in a child process, as users run it.
    """
    engine = _tiny(folder) if kind == "tiny" else _real(folder)
    engine.start()
    engine.wait_ready()
    _say("ready")
    store = ChatStore(folder / "chat.db")
    sampling = {"temperature": 1.0, "max_tokens": 24 if kind == "tiny" else 40}
    chats = Chats(store, engine, settings={"model": kind, "sampling": sampling})
    name = f"script {number}"
    known = [row for row in chats.chats() if row.name == name]
    chat = chats.open(known[0].id) if known else chats.new(name)
    try:
        while (turn := _next(chat)) < len(PROMPTS):
            _one(chat, turn, number)
    finally:
        engine.close()
        store.close()


def _next(chat: ChatPort) -> int:
    """How many turns are whole."""
    return sum(turn.state == "done" for turn in chat.turns())


def _one(chat: ChatPort, turn: int, number: int) -> None:
    chat.set("seed", 1000 * number + turn)
    cut = len(chat.turns()) > turn
    for place, event in enumerate(chat.again() if cut else chat.send(PROMPTS[turn])):
        if place == 0:
            _say(f"ack {turn}")
        if isinstance(event, Done):
            assert event.finish_reason in ("stop", "length"), event
            _say(f"done {turn}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _tiny(folder: Path) -> EnginePort:
    from fakes import TinyModel

    from chatkv.config import EngineConfig
    from chatkv.engine import Engine
    from sessions.local import LocalEngine
    from sessions.pages import SqlitePageStore
    from sessions.service import EngineService

    model: Any = TinyModel()
    identity = model.identity(model.page_size)
    pages = SqlitePageStore(folder / "kv.db", identity, limit_bytes=1 << 30)
    costs = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9}
    config = EngineConfig(spec="tree:3", drafters=("ngram", "random"))
    engine = Engine(model, config, store=pages, salt=pages.salt, costs=costs, guard=False)
    return LocalEngine(EngineService(engine, pages))


def _real(folder: Path) -> EnginePort:
    from sessions.client import ChildEngine

    # One thread: many of these run beside each other, and its number changes no bit.
    options = {
        "model": "SmolLM2-135M-Instruct",
        "device": "cpu",
        "threads": 1,
        "kv_path": str(folder / "kv.db"),
    }
    return ChildEngine(options, folder / "engine.log")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    play(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
