"""Where the tokens of a prompt come from, and why known ones are computed again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Done
from chatkv.kv.planner import Rates
from sessions.chat import Chats
from sessions.explain import explain
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.port import ChatPort
from sessions.service import EngineService
from sessions.store import ChatStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
PROMPTS = ["the cat sat on the mat and looked at all of us", "and then?", "why?"]
SAMPLING = {"temperature": 1.0, "max_tokens": 40, "seed": 5}


class Program:
    """The tiny model on the files of a folder."""

    def __init__(self, folder: Path, *, kv: bool = True, seed: int = 0, **config: object) -> None:
        model: Any = TinyModel(seed)
        self.pages = None
        if kv:
            identity = model.identity(model.page_size)
            self.pages = SqlitePageStore(folder / "kv.db", identity, limit_bytes=1 << 30)
        salt = self.pages.salt if self.pages else b""
        made = EngineConfig(spec="none", **config)  # type: ignore[arg-type]
        engine = Engine(model, made, store=self.pages, salt=salt, costs=COSTS, guard=False)
        self.engine = LocalEngine(EngineService(engine, self.pages))
        self.engine.start()
        self.store = ChatStore(folder / "chat.db")
        settings = {"model": "tiny", "sampling": SAMPLING}
        self.chats = Chats(self.store, self.engine, settings=settings)

    @property
    def tiers(self):
        return self.engine.service.engine.tiers

    def why(self, chat: ChatPort) -> tuple[str, str]:
        report = explain(self.store, chat.id)[-1]
        return report.reason or "", report.note

    def close(self) -> None:
        self.engine.close()
        if self.pages is not None:
            self.pages.close()
        self.store.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def begin(**options: object) -> Program:
        while running:
            running.pop().close()
        running.append(Program(tmp_path, **options))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    while running:
        running.pop().close()


def say(chat: ChatPort, text: str) -> Done:
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """What a chat says that never stopped."""
    folder = tmp_path / "reference"
    folder.mkdir(mode=0o700)
    program = Program(folder, kv=False)
    chat = program.chats.new()
    said = [say(chat, prompt).text for prompt in PROMPTS]
    program.close()
    return said


def begun(program: Program) -> list[str]:
    chat = program.chats.new()
    return [say(chat, prompt).text for prompt in PROMPTS[:2]]


def test_computing_is_chosen_where_it_is_faster_and_gives_the_same(start, texts):
    said = begun(start())
    program = start()
    program.tiers.rates = Rates(1.0, 1e9, 1e9)
    chat = program.chats.open("@last")
    done = say(chat, PROMPTS[2])
    assert [*said, done.text] == texts
    assert (done.usage.reuse_reason, done.usage.restored_pages) == ("faster", 0)
    assert done.usage.cached_tokens == 0
    assert "stored tokens: reading" in done.usage.reuse_detail
    assert program.why(chat) == ("faster", done.usage.reuse_detail)


def test_reading_is_chosen_where_it_is_faster_or_nothing_is_known(start, texts):
    for rates in (Rates(), Rates(1e12, 10.0, 10.0)):
        said = begun(start())
        program = start()
        program.tiers.rates = rates
        done = say(program.chats.open("@last"), PROMPTS[2])
        assert [*said, done.text] == texts
        assert done.usage.reuse_reason == "new"
        assert done.usage.restored_pages > 0


@pytest.mark.parametrize(("restore", "reason"), [("always", "new"), ("never", "off")])
def test_what_the_user_says_wins(start, texts, restore, reason):
    said = begun(start())
    program = start(restore=restore)
    program.tiers.rates = Rates(1.0, 1e9, 1e9)
    chat = program.chats.open("@last")
    done = say(chat, PROMPTS[2])
    assert [*said, done.text] == texts
    assert done.usage.reuse_reason == reason
    assert (done.usage.restored_pages > 0) == (restore == "always")
    # What was computed is in the pool, whatever is read from disk.
    assert say(chat, "more").usage.reuse_reason == "new"


def test_rates_are_measured_and_kept(start, tmp_path):
    program = start()
    chat = program.chats.new()
    say(chat, PROMPTS[0] * 3)
    assert program.tiers.rates.given_tokens_s
    kept = program.tiers.rates.to_json()
    program = start()
    assert program.tiers.rates.to_json() == kept
    say(program.chats.open("@last"), "x")
    assert start(seed=1).tiers.rates == Rates()


def test_a_first_prompt_is_new_whatever_is_off(start):
    program = start(kv=False)
    chat = program.chats.new()
    assert say(chat, PROMPTS[0]).usage.reuse_reason == "new"
    assert say(chat, PROMPTS[1]).usage.reuse_reason == "new"


def test_without_a_store_known_tokens_are_computed(start):
    begun(start())
    program = start(kv=False)
    chat = program.chats.open("@last")
    assert say(chat, PROMPTS[2]).usage.reuse_reason == "off"
    assert program.why(chat) == ("off", "pages are not stored")


def test_a_preview_says_what_then_happens(start):
    begun(start())
    program = start()
    chat = program.chats.open("@last")
    cost = chat.preview()
    half = chat.preview(chat.turns()[0].id)
    assert 0 < half.tokens < cost.tokens
    assert (cost.pool_pages, cost.host_pages) == (0, 0)
    assert 0 < half.disk_pages < cost.disk_pages
    token_bytes = program.engine.service.engine.pool.payload_bytes(1)
    assert cost.disk_bytes == token_bytes * (cost.tokens - cost.computed_tokens)
    assert 0 < cost.computed_tokens < 16
    assert program.pages.stats().read_pages == 0  # it only looked
    done = say(chat, PROMPTS[2])
    assert done.usage.restored_pages == cost.disk_pages
    assert done.usage.disk_tokens == cost.tokens - cost.computed_tokens
    cost = chat.preview()
    assert (cost.disk_pages, cost.disk_bytes) == (0, 0)
    assert cost.pool_pages > 0
    program = start()
    program.tiers.rates = Rates(1.0, 1000.0, 500.0)
    cost = program.chats.open("@last").preview()
    assert (cost.disk_pages, cost.computed_tokens) == (0, cost.tokens)
    assert cost.tokens < cost.ms < 2 * cost.tokens
    cost = start(kv=False).chats.open("@last").preview()
    assert (cost.disk_pages, cost.computed_tokens) == (0, cost.tokens)
    assert start().chats.new().preview().tokens == 0


def test_evicted_and_never_stored_are_told_apart(start):
    begun(start(kv=False))
    chat = start().chats.open("@last")
    assert say(chat, PROMPTS[2]).usage.reuse_reason == "not_stored"
    program = start()
    program.pages.shrink(0)
    done = say(program.chats.open("@last"), "more")
    assert (done.usage.reuse_reason, done.usage.cached_tokens) == ("evicted", 0)


def test_pages_of_another_identity_are_named_with_the_field(start):
    begun(start())
    program = start(seed=1)
    chat = program.chats.open("@last")
    done = say(chat, PROMPTS[2])
    assert (done.usage.reuse_reason, done.usage.reuse_detail) == ("fingerprint", "weights")
    assert program.why(chat) == ("fingerprint", "other weights")


def test_a_damaged_page_is_named_with_its_check_also_after_a_restart(start, texts, tmp_path):
    said = begun(start())
    start(kv=False)
    with sqlite3.connect(tmp_path / "kv.db") as db:
        (page,) = db.execute("SELECT id FROM pages ORDER BY chain_index LIMIT 1").fetchone()
        db.execute("UPDATE pages SET crc = crc + 1 WHERE id = ?", (page,))
    db.close()
    program = start()
    (key, *_) = keys_of(tmp_path)
    assert list(program.pages.read([key])) == []  # somebody found it
    program = start()  # the mark is in the file
    chat = program.chats.open("@last")
    done = say(chat, PROMPTS[2])
    assert [*said, done.text] == texts
    assert (done.usage.reuse_reason, done.usage.reuse_detail) == ("damaged", "checksum")
    assert program.pages.stats().quarantined == 0  # the page was made anew
    # And is good from now on.
    chat = start().chats.open("@last")
    assert say(chat, "more").usage.reuse_reason == "new"


def keys_of(folder: Path) -> list[bytes]:
    db = sqlite3.connect(folder / "kv.db")
    rows = db.execute("SELECT key FROM pages ORDER BY chain_index").fetchall()
    db.close()
    return [key for (key,) in rows]


@pytest.mark.parametrize("kv", [False, True])
def test_idle_chats_come_back_from_host_memory(start, texts, kv):
    """The pool is smaller than what was talked about; what leaves it returns without the disk."""
    program = start(kv=kv, host_bytes=1 << 20, pool_tokens=16 * 14)
    first = program.chats.new("a")
    said = [say(first, prompt).text for prompt in PROMPTS[:2]]
    other = program.chats.new("b")
    for number in range(3):
        say(other, f"{number} something else altogether, and quite long")
    assert program.tiers.host.stats().taken > 0
    read = 0
    if program.pages is not None:
        program.engine.service.engine.saver.flush(5)
        read = program.pages.stats().read_pages
    done = say(first, PROMPTS[2])
    assert [*said, done.text] == texts
    assert done.usage.host_pages > 0
    # Those of the last page that are not of this path are not reused.
    size = program.engine.service.engine.pool.page_size
    assert 0 <= size * done.usage.host_pages - done.usage.host_tokens < size
    assert (done.usage.disk_tokens, done.usage.token_bytes) == (0, 1024)
    assert (done.usage.restored_pages, done.usage.verified) == (0, None)
    assert done.usage.reuse_reason == "new"
    if program.pages is not None:
        assert program.pages.stats().read_pages == read
    stats = program.engine.call("kv_stats")["host"]
    assert stats["given"] >= done.usage.host_pages
    assert 0 < stats["payload_bytes"] <= stats["limit_bytes"]


def test_a_purge_takes_what_is_in_host_memory_too(start):
    program = start(host_bytes=1 << 20, pool_tokens=16 * 14)
    chat = program.chats.new("a")
    say(chat, PROMPTS[0])
    other = program.chats.new("b")
    for number in range(3):
        say(other, f"{number} something else altogether, and quite long")
    assert len(program.tiers.host) > 0
    program.engine.call("purge", ids=[1, 2, 3], keep_tokens=0)
    assert len(program.tiers.host) == 0
