"""`chatkv explain` on a chat that was really computed, by the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import ByteTokenizer, TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import EngineLost
from chatkv.events import Done
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.service import EngineService
from sessions.store import ChatStore
from tui import installed

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}


@contextmanager
def program(data: Path) -> Iterator[Chats]:
    model: Any = TinyModel(context_limit=1024)
    store = ChatStore(data / "chat.db")
    identity = model.identity(model.page_size)
    pages = SqlitePageStore(data / "kv" / "kv.db", identity, limit_bytes=1 << 30)
    engine = Engine(
        model, EngineConfig(spec="none"), store=pages, salt=pages.salt, costs=COSTS, guard=False
    )
    local = LocalEngine(EngineService(engine, pages))
    local.start()
    sampling = {"temperature": 1.0, "max_tokens": 10, "seed": 3}
    try:
        yield Chats(store, local, settings={"model": "tiny", "sampling": sampling})
    finally:
        local.close()
        pages.close()
        store.close()


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    known = {"tiny": ByteTokenizer()}
    monkeypatch.setattr(installed, "tokenizer_of", known.get)
    return known


@pytest.fixture
def edited(tmp_path) -> dict[str, int]:
    """A chat of eight turns whose third was changed after a restart; what its reply cost."""
    with program(tmp_path / "data") as chats:
        chat = chats.new("planning")
        for number in range(8):
            list(chat.send(f"Is {number} prime?"))
    with program(tmp_path / "data") as chats:
        chat = chats.open("planning")
        (*_, done) = chat.edit(chat.turns()[2].id, "Is it prime?")
    assert isinstance(done, Done)
    return {"reused": done.usage.cached_tokens, "prompt": done.usage.prompt_tokens}


def test_an_edit_of_turn_3_of_8_names_the_position_and_both_texts(chatkv, edited):
    data = chatkv("explain", "planning", "--json").json
    assert (data["name"], data["model"]) == ("planning", "tiny")
    assert [turn["reason"] for turn in data["turns"]] == ["new", "new", "diverged"]
    third = data["turns"][2]
    assert (third["turn"], third["prompt_tokens"]) == (3, edited["prompt"])
    assert third["reused"] == third["divergence"]["position"] == edited["reused"]
    assert third["reused"] + third["computed"] == third["prompt_tokens"]
    assert (third["restored_pages"] > 0, third["verified"]) == (True, True)
    found = third["divergence"]
    assert found["cause"] == "edit"
    assert found["stored"]["before"] == found["now"]["before"]
    assert found["stored"]["before"].endswith("<user>Is ")
    assert found["stored"]["text"] == "2 prime?<reply>"
    assert found["now"]["text"] == "it prime?"
    assert [span["reason"] for span in third["spans"]] == ["reused", "diverged"]


def test_for_people_it_is_a_table_and_both_texts(chatkv, edited):
    out = chatkv("explain", "planning").out
    head, *rows = out.splitlines()
    assert head.split() == ["turn", "prompt", "reused", "hit", "computed", "time", "why"]
    assert f"diverged at token {edited['reused']}: edit" in rows[2]
    assert "pages from disk, verified" in rows[2]
    assert f"turn 3 differs at token {edited['reused']} (edit)" in out
    assert '<user>Is " then "2 prime?<reply>"' in out
    assert '<user>Is " then "it prime?"' in out


def test_without_the_tokenizer_ids_are_shown(chatkv, edited, tokenizer):
    tokenizer.clear()
    found = chatkv("explain", "planning", "--json").json["turns"][2]["divergence"]
    assert (found["now"]["text"], found["now"]["before"]) == (None, None)
    assert ord("i") in found["now"]["ids"]
    assert "ids [" in chatkv("explain", "planning").out


def test_turns_that_nobody_counted(chatkv, tmp_path, monkeypatch):
    with program(tmp_path / "data") as chats:
        chat = chats.new("lost")
        monkeypatch.setattr(chats.engine, "wait_ready", _lost)
        with pytest.raises(EngineLost):
            list(chat.send("hello"))
    (turn,) = chatkv("explain", "lost", "--json").json["turns"]
    assert (turn["reason"], turn["reused"], turn["state"]) == (None, None, "interrupted")
    assert "interrupted" in chatkv("explain", "lost").out
    assert chatkv("explain", "nobody").code == 3


def _lost(timeout_s=None):
    raise EngineLost("killed")


def test_a_chat_without_a_turn(chatkv, tmp_path):
    with ChatStore(tmp_path / "data" / "chat.db") as store:
        store.create_session("empty")
    ran = chatkv("explain", "empty")
    assert (ran.code, ran.out) == (0, "")
    assert "no turn yet" in ran.err
