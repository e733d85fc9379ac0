"""A long life: 10,000 turns in 2,000 chats, with a page file that is always full. Memory stays
flat, no page leaks, the file keeps to its budget; and then how long the list and a search take.

`make soak` runs and prints it.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from fakes import TinyModel
from program import Program, say

from chatkv.attention.jit import set_threads

CHATS = int(os.environ.get("CHATKV_SOAK", "2000"))
TURNS = 5
LIMIT_BYTES = 8 << 20
GROWTH_BYTES = 24 << 20
"""What a process may grow by once it is warm."""
SAMPLING = {"temperature": 1.0, "max_tokens": 3, "seed": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The rows of so small a model are no work for two: threads would only wait for each other."""
    before = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(before)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def live_for(folder: Path, chats: int) -> None:
    dice = random.Random(1)
    program = Program(
        folder, model=TinyModel(), sampling=SAMPLING, limit_bytes=LIMIT_BYTES, spec="tree:3"
    )
    core, pages = program.core, program.pages
    assert pages is not None
    warm = restored = reused = turns = 0
    largest = 0
    room: list[str] = []
    """Chats whose context is far from full."""
    for number in range(chats):
        chat = program.chats.new(f"chat {number}")
        for turn in range(TURNS):
            if turn == 3 and room:  # the rest is said in an old one, whose pages are gone or not
                chat = program.chats.open(room.pop(dice.randrange(len(room))))
            done = say(chat, f"{dice.randrange(1000)} and {turn}")
            turns += 1
            restored += done.usage.restored_pages
            reused += done.usage.cached_tokens
            assert done.notice == ""
        usage = chat.turns()[-1].usage
        if usage is not None and usage.context_used < 350:
            room.append(chat.id)
        largest = max(largest, (folder / "kv.db").stat().st_size)
        if number == chats // 5:
            warm = resident_bytes()
    grown = resident_bytes() - warm
    program.flush()
    pool, prefix = core.pool, core.prefix
    stats = pages.stats()
    _tell(
        f"{turns:,} turns in {chats:,} chats: {grown / 2**20:+.1f} MiB since turn {turns // 5:,}; "
        f"{restored:,} pages restored, {reused:,} tokens reused, {stats.evicted_pages:,} pages "
        f"evicted; kv.db at most {largest / 2**20:.1f} of {LIMIT_BYTES / 2**20:.0f} MiB; "
        f"{pool.used} pages held, all {prefix.stats().pages} by the cache"
    )
    assert grown < GROWTH_BYTES
    assert largest <= LIMIT_BYTES * 105 // 100
    assert pool.used == prefix.stats().pages
    prefix.clear()
    assert pool.used == 0
    assert program.store.check() == []
    assert pages.take_notices() == []
    _time_lists(program)
    program.close()


def _time_lists(program: Program) -> None:
    chats, store = program.chats, program.store
    last = chats.chats(limit=50)[-1].id
    for what, call in (
        ("the list on the screen (200 chats)", lambda: chats.chats()),
        ("the list of all", lambda: chats.chats(limit=1 << 31)),
        ("search, a word in many", lambda: chats.chats("and")),
        ("search, a word in few", lambda: chats.chats("987 and")),
        ("search, two letters", lambda: chats.chats("98")),
        ("search, a word in none", lambda: chats.chats("nowhere")),
        ("words in messages", lambda: store.search("and 3")),
        ("open by a part of its id", lambda: chats.open(last[:8])),
    ):
        _tell(f"{_median_ms(call):6.1f} ms  {what}")


def _median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(9):
        begun = perf_counter()
        call()
        times.append(1000 * (perf_counter() - begun))
    return statistics.median(times)


def _tell(line: str) -> None:
    sys.stderr.write(f"\n{line}")


def test_a_short_life(tmp_path: Path) -> None:
    live_for(tmp_path, 6)


@pytest.mark.slow
def test_a_long_life(tmp_path: Path) -> None:
    live_for(tmp_path, CHATS)
