"""Rows 23 and 25 to 29: what happens inside a run, and worlds that are not as one thought."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import pytest
import torch
from conversation import Conversation
from program import PROMPTS, say

from chatkv.errors import StoreError
from chatkv.events import Failed
from chatkv.kv.chain import Chain
from chatkv.kv.layout import Stage
from chatkv.kv.restore import find_prefix
from sessions import pagefile


class FailsAtPage:
    """A page store whose reading ends with an error at page n."""

    def __init__(self, pages, error: BaseException, page: int) -> None:
        self.real, self.error, self.left = pages, error, page

    def __getattr__(self, name):
        return getattr(self.real, name)

    def read(self, keys):
        for image in self.real.read(keys):
            if self.left == 0:
                raise self.error
            self.left -= 1
            yield image


@pytest.mark.parametrize("page", [0, 1, 4])
def test_23_restore_fails_half_way(told, page):
    told.play(2)
    error = StoreError("short read")
    program = told.start(wrap=lambda pages: FailsAtPage(pages, error, page))
    (done,) = told.play(3)  # the answer of a cold start, as every answer here
    assert (done.usage.reuse_reason, done.usage.restored_pages) == ("damaged", page)
    assert program.core.saver.store.left == 0
    told.play(4)
    assert program.core.pool.used == program.core.prefix.stats().pages


def ids_of(program, session_id) -> tuple[list[int], list[bool]]:
    """All ids of a conversation, and which of them the model chose."""
    tokens, flags = [], []
    for turn in program.store.path(session_id):
        for message in turn.messages:
            (render,) = message.renders
            chosen = {i for start, stop in render.sampled for i in range(start, stop)}
            tokens += render.token_ids
            flags += [i in chosen for i in range(len(render.token_ids))]
    return tokens, flags


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), KeyboardInterrupt()])
def test_23_the_pool_is_as_it_was(sampled, error):
    sampled.play(2)
    program = sampled.start()
    say(program.chats.new(), "something else is in the pool")
    pool, prefix = program.core.pool, program.core.prefix
    held = [page for page in range(pool.num_pages) if pool.refs(page)]
    before, used = pool.data[:, held].clone(), pool.used
    chat = next(row for row in program.chats.chats() if row.turns == 2)
    tokens, flags = ids_of(program, chat.id)
    store: Any = FailsAtPage(program.pages, error, 3)
    chain = Chain(program.core.root_key, pool.page_size, tokens, flags)
    with pytest.raises(type(error)):
        find_prefix(pool, prefix, store, chain, [Stage()], len(tokens))
    assert store.left == 0
    assert pool.used == used
    assert torch.equal(pool.data[:, held].view(torch.uint8), before.view(torch.uint8))


class Dies:
    """A page store that takes some pages, and then breaks whoever writes to it."""

    def __init__(self, pages, error: BaseException) -> None:
        self.real, self.error, self.left = pages, error, 2

    def __getattr__(self, name):
        return getattr(self.real, name)

    def write(self, images):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.real.write(images)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), SystemExit(3)])
def test_25_writer_thread_dies(sampled, error):
    program = sampled.start(wrap=lambda pages: Dies(pages, error))
    ends = sampled.play(4)
    program.core.saver.flush(1.0)
    ends.append(say(sampled.chat, "on"))
    (notice,) = sampled.notices(ends)
    assert notice == f"Pages are not saved any more: {type(error).__name__}: {error}"
    assert not program.core.saver.on
    begun = time.monotonic()
    sampled.stop()
    assert time.monotonic() - begun < 2.0
    sampled.start()
    say(sampled.chat, "on")


class OneByOne:
    """A page store that writes each page alone, so that the order of uses is that of the queue."""

    def __init__(self, pages) -> None:
        self.real = pages

    def __getattr__(self, name):
        return getattr(self.real, name)

    def write(self, images):
        return sum(self.real.write([image]) for image in images)


def order_after(folder, clock, monkeypatch) -> tuple[list, list, list]:
    """Three chats, the first one used again at the end: the list, the pages, what is evicted."""
    told = Conversation(folder, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", clock)
        patch.setattr(time, "time", lambda: clock() / 1e9)
        program = told.start(wrap=OneByOne)
        chats = [program.chats.new(name) for name in ("one", "two", "three")]
        for number, chat in enumerate([*chats, chats[0]]):
            say(chat, PROMPTS[number % 3])
            program.flush()
        names = [row.name for row in program.chats.chats()]
        assert program.pages is not None
        program.pages.shrink(1 << 30)  # writes down when pages were used
        with told.pages() as db:
            rows = "SELECT token_ids FROM pages ORDER BY last_used, chain_index DESC"
            pages = [row[0] for row in db.execute(rows)]
        half = program.pages.stats().pages // 2
        used = program.pages.stats().file_bytes
        while program.pages.stats().pages > half:
            used -= 65536
            program.pages.shrink(used)
        with told.pages() as db:
            kept = [row[0] for row in db.execute("SELECT token_ids FROM pages ORDER BY id")]
        told.close()
    return names, pages, kept


def test_26_clock_goes_back(tmp_path, monkeypatch):
    forth, back = iter(range(10**18, 2 * 10**18, 10**9)), iter(range(10**18, 0, -(10**12)))
    usual = order_after(tmp_path / "forth", lambda: next(forth), monkeypatch)
    assert order_after(tmp_path / "back", lambda: next(back), monkeypatch) == usual
    assert usual[0] == ["one", "three", "two"]
    assert len(usual[2]) < len(usual[1])


def test_28_pool_too_small_for_the_run(told):
    told.play(3)
    used = told.chat.turns()[-1].usage.context_used
    told.start(pool_tokens=used // 2)
    (*_, failed) = told.chat.send(PROMPTS[3])
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_pages"
    assert "pages of 16 tokens" in failed.message
    assert failed.hint
    pool = told.running.core.pool
    assert pool.used == told.running.core.prefix.stats().pages
    # A pool that holds one conversation, and is full of others, makes room.
    program = told.start(pool_tokens=used + 80)
    other = program.chats.new("other")
    say(other, "a" * (used - 40))
    chat = program.chats.open(next(row.id for row in program.chats.chats() if row.turns >= 3))
    (*_, done) = chat.again() if len(chat.turns()) == 4 else chat.send(PROMPTS[3])
    assert done.text == told.expected[3]
    assert program.core.prefix.stats().evicted > 0


class NoWal:
    """A connection to a file on a network: SQLite answers `delete` when asked for WAL."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def execute(self, statement, *values):
        return self.real.execute(statement.replace("= WAL", "= DELETE"), *values)


def test_29_network_file_system(told, monkeypatch):
    real = pagefile.connect
    monkeypatch.setattr(pagefile, "connect", lambda *args, **more: NoWal(real(*args, **more)))
    told.start()
    (notice,) = told.running.pages.take_notices()
    assert notice == "kv.db is on a file system without WAL: saving pages is slower."
    assert told.notices(told.play(2)) == []
    told.running.flush()
    mode = told.running.pages._disk._file.writer.execute("PRAGMA journal_mode").fetchone()
    assert mode == ("delete",)
    assert not told.kv_db.with_name("kv.db-wal").exists()
    told.start()
    ends = told.play(4)
    assert ends[0].usage.restored_pages > 0
    assert told.notices(ends) == [notice]
