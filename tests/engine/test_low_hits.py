"""A turn that finds little of what was there says so, with the reason; the gauges come back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Done
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.port import ChatPort
from sessions.service import EngineService
from sessions.store import ChatStore

LONG = "the cat sat on the mat and the dog lay on the rug, " * 5
SAMPLING = {"temperature": 1.0, "max_tokens": 30, "seed": 11}


def engine() -> LocalEngine:
    model: Any = TinyModel()
    made = Engine(model, EngineConfig(spec="none"), costs={1: 1.0}, guard=False)
    local = LocalEngine(EngineService(made))
    local.start()
    return local


def say(chat: ChatPort, text: str) -> Done:
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done


def test_a_turn_that_finds_little_of_what_was_there_says_why(tmp_path: Path) -> None:
    settings = {"model": "tiny", "sampling": SAMPLING}
    with ChatStore(tmp_path / "chat.db") as store:
        with closing(engine()) as first:
            chat = Chats(store, first, settings=settings).new()
            done = say(chat, LONG)
            assert (done.usage.reusable_tokens, done.usage.hit_rate) == (0, None)
            done = say(chat, "and then?")
            assert done.usage.hit_rate == 1
            assert "hit" not in done.notice
        with closing(engine()) as second:  # nothing was stored
            done = say(Chats(store, second, settings=settings).open("@last"), "why?")
            assert done.usage.reusable_tokens > 256
            assert done.usage.hit_rate == 0
            assert "hit 0 %: " in done.notice
            stats = second.call("kv_stats")
    assert (stats["window"]["turns"], stats["window"]["hit_rate"]) == (1, 0)
    parts = [stats[f"{name}_bytes"] for name in ("used", "cached", "free")]
    assert sum(parts) == stats["pages_total"] * stats["page_bytes"]
    assert stats["used_bytes"] == 0
