"""Chats that outgrow their context, on the tiny model: forgotten, priced, recalled, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Done, Failed, ForgetEvent, RecallEvent
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.service import EngineService
from sessions.store import ChatStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
LIMIT = 200
POLICIES = [
    "turns",
    "oldest:limit_tokens=160,drop_tokens=40",
    "oldest:limit_tokens=160,drop_tokens=40,edge=token",
    "window:window_tokens=96",
]


class Program:
    """chatkv without its processes; closing it and making another is a restart."""

    def __init__(
        self, folder: Path, policy: str, *, spec: str = "none", limit: int = LIMIT
    ) -> None:
        model: Any = TinyModel(no_rebase="" if policy.startswith("window") else "learned positions")
        self.pages = SqlitePageStore(
            folder / "kv.db", model.identity(model.page_size), limit_bytes=1 << 30
        )
        config = EngineConfig(spec=spec, drafters=("ngram", "random"), context_limit=limit)
        engine = Engine(
            model, config, store=self.pages, salt=self.pages.salt, costs=COSTS, guard=False
        )
        self.engine = LocalEngine(EngineService(engine, self.pages))
        self.engine.start()
        self.store = ChatStore(folder / "chat.db")
        sampling = {"temperature": 1.0, "max_tokens": 20, "seed": 11}
        self.chats = Chats(
            self.store, self.engine, settings={"model": "tiny", "sampling": sampling}, policy=policy
        )

    def close(self) -> None:
        self.engine.close()
        self.pages.close()
        self.store.close()


def say(chat, text: str):
    events = list(chat.send(text))
    assert isinstance(events[-1], Done), events[-1]
    return events


def prompts(count: int) -> list[str]:
    return [f"prompt {n} about something" for n in range(count)]


def texts(chat) -> list[str]:
    return [turn.reply for turn in chat.turns()]


@pytest.fixture
def program(tmp_path):
    made: list[Program] = []

    def start(policy: str, name: str = "one", **options) -> Program:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(Program(tmp_path / name, policy, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_resumed_is_never_quit_and_drafted_is_plain_while_it_forgets(program, policy, tmp_path):
    never = program(policy, "never")
    chat = never.chats.new("ada")
    gone = 0
    for text in prompts(9):
        events = say(chat, text)
        gone += sum(event.num_tokens for event in events if isinstance(event, ForgetEvent))
        assert events[-1].usage.context_used <= LIMIT
    assert gone > 0
    drafted = program(policy, "drafted", spec="tree:3")
    other = drafted.chats.new("ada")
    for text in prompts(9):
        say(other, text)
    assert texts(other) == texts(chat)
    quitting = program(policy, "quitting")
    quitting.chats.new("ada")
    ref = ""
    for number, text in enumerate(prompts(9)):
        again = quitting.chats.open(ref) if ref else quitting.chats.new("ada")
        say(again, text)
        ref = again.id
        quitting.close()
        if number in (4, 7):
            for file in (tmp_path / "quitting").glob("kv.db*"):
                file.unlink()
        quitting = program(policy, "quitting")
    resumed = quitting.chats.open(ref)
    assert texts(resumed) == texts(chat)
    assert [turn.seen for turn in resumed.turns()] == [turn.seen for turn in chat.turns()]


def test_forgotten_and_recalled_is_as_if_nothing_had_been(program):
    plain = program("error", "plain", limit=400)
    chat = plain.chats.new("ada")
    for text in prompts(6):
        say(chat, text)
    changed = program("error", "changed", limit=400)
    other = changed.chats.new("ada")
    for text in prompts(3):
        say(other, text)
    other.forget([1, 2])
    before = texts(other)
    say(other, "something else")
    other.recall([1, 2])
    # The same ids as the plain chat: the turn in between is left by answering it anew.
    list(other.edit(other.turns()[3].id, prompts(4)[3]))
    for text in prompts(6)[4:]:
        say(other, text)
    assert texts(other)[:3] == before
    assert other.context().missing == ()
    assert texts(other) == texts(chat)


def test_the_price_is_what_it_then_costs(program):
    run = program("turns", limit=400)
    chat = run.chats.new("ada")
    for text in prompts(5):
        say(chat, text)
    chat.forget([2])
    for text in ("one more", "and another"):
        say(chat, text)
    price = chat.price((), [2])
    assert price.live == chat.context().used + 41 or price.live > chat.context().used
    chat.recall([2])
    events = say(chat, "x")
    (event,) = [event for event in events if isinstance(event, RecallEvent)]
    assert event.turns == (2,)
    usage = events[-1].usage
    new = usage.cached_tokens + usage.prompt_n - price.live
    assert 0 < new < 12  # the prompt itself
    assert usage.cached_tokens == price.pool + price.disk
    assert usage.prompt_n == price.computed + new
    # After a restart the same pages come from disk.
    chat.forget([3])
    say(chat, "y")
    run.close()
    chat = program("turns", limit=400).chats.open(chat.id)
    price = chat.price((), [3])
    assert price.pool == 0
    assert price.disk > 0
    chat.recall([3])
    usage = say(chat, "z")[-1].usage
    assert usage.cached_tokens == usage.disk_tokens == price.disk


def test_a_preview_is_of_what_the_next_turn_sees(program):
    run = program("turns", limit=400)
    chat = run.chats.new("ada")
    for text in prompts(5):
        say(chat, text)
    chat.forget([2])
    for text in ("one more", "and another"):
        say(chat, text)
    whole = chat.preview()
    assert whole.tokens == chat.context().used
    chat.forget([3])  # waits for the next turn
    less = chat.preview()
    assert less.tokens == chat.context().used_next < whole.tokens
    assert less.computed_tokens < 20
    fork = chat.preview(chat.turns()[3].id)
    assert fork.tokens < less.tokens
    run.close()
    chat = program("turns", limit=400).chats.open(chat.id)
    cold = chat.preview()
    assert (cold.tokens, cold.pool_pages) == (less.tokens, 0)
    assert cold.disk_pages > 0
    usage = say(chat, "z")[-1].usage
    assert usage.restored_pages == cold.disk_pages
    assert usage.disk_tokens * usage.token_bytes == cold.disk_bytes
    assert 0 < usage.prompt_n - cold.computed_tokens < 12  # the prompt itself


def test_a_prompt_larger_than_the_window_is_refused_and_kept(program):
    run = program("turns")
    chat = run.chats.new("ada")
    say(chat, "hello there")
    (*_, failed) = chat.send("x" * 300)
    assert isinstance(failed, Failed)
    assert (failed.code, "200 tokens" in failed.message) == ("context_full", True)
    assert len(chat.turns()) == 1
    say(chat, "still here")


def test_a_chat_is_resumed_in_a_smaller_context(program):
    run = program("turns", limit=400)
    chat = run.chats.new("ada")
    for text in prompts(6):
        say(chat, text)
    assert chat.context().missing == ()
    run.close()
    run = program("turns", limit=160)
    chat = run.chats.open(chat.id)
    events = say(chat, "go on")
    assert any(isinstance(event, ForgetEvent) for event in events)
    assert events[-1].usage.context_used <= 160
    assert chat.context().missing
    replies = texts(chat)
    say(chat, "and on")
    assert texts(chat)[:-1] == replies


def test_redacting_after_forgetting_leaves_no_page(program):
    run = program("window:window_tokens=96")
    chat = run.chats.new("ada")
    for text in prompts(6):
        say(chat, text)
    seen = {turn.number: turn.seen for turn in chat.turns()}
    live = next(number for number in seen if seen[number] == "live")
    run.engine.service.engine.saver.flush(5)
    chat.redact([chat.turns()[live - 1].id], purge=True)
    for text in ("one", "two"):
        say(chat, text)
    assert chat.turns()[live - 1].seen == "redacted"
    assert chat.context().used <= LIMIT
