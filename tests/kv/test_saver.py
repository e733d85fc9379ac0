"""When pages reach the store: between replies; of a long one what half the queue cannot hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from chatkv.kv.saver import BATCH, PageSaver
from chatkv.kv.store import PageHead

PAGE = 100
ROOM = 40


class Slow:
    """A store that can be told to wait, and notes what came in which commit."""

    def __init__(self) -> None:
        self.commits: list[list[int]] = []
        self.go = threading.Event()
        self.go.set()

    def write(self, images: list[Any]) -> int:
        assert self.go.wait(10)
        self.commits.append([image.chain_index for image in images])
        return len(images)

    @property
    def pages(self) -> list[int]:
        return [index for commit in self.commits for index in commit]


@pytest.fixture
def store() -> Slow:
    return Slow()


@pytest.fixture
def saver(store: Slow) -> Iterator[PageSaver]:
    made = PageSaver(store, queue_bytes=ROOM * PAGE)  # pyright: ignore
    yield made
    store.go.set()
    made.close()


def put(saver: PageSaver, pages: range) -> int:
    """How many were taken."""
    taken = 0
    for index in pages:
        key = index.to_bytes(32, "little")
        head = PageHead(key, bytes(32), index, index, (1,), (True,), "step")
        taken += saver.put(head, PAGE, lambda: lambda: bytes(PAGE))
    return taken


def settle(saver: PageSaver, store: Slow, pages: int) -> None:
    """Wait until so many are written, and then for more that should not come."""
    for _ in range(500):
        if len(store.pages) >= pages and not saver._doing:  # pyright: ignore
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)


def test_pages_wait_for_the_end_of_the_reply_and_go_in_few_commits(saver, store):
    saver.hold()
    put(saver, range(20))
    settle(saver, store, 0)
    assert store.commits == []
    saver.release()
    settle(saver, store, 20)
    assert store.pages == list(range(20))
    assert [len(commit) for commit in store.commits] == [BATCH, BATCH, 4]


def test_at_most_half_the_queue_waits_while_a_reply_runs(saver, store):
    saver.hold()
    for index in range(100):
        assert put(saver, range(index, index + 1)) == 1
        settle_below_half(saver)
    assert store.pages == list(range(len(store.pages)))
    assert ROOM // 2 - BATCH < 100 - len(store.pages) <= ROOM // 2
    assert {len(commit) for commit in store.commits} == {BATCH}


def settle_below_half(saver: PageSaver) -> None:
    for _ in range(1000):
        with saver._wake:  # pyright: ignore
            if not saver._has_work() and not saver._doing:  # pyright: ignore
                return
        threading.Event().wait(0.002)
    raise AssertionError("more than half the queue waits")


def test_whoever_flushes_does_not_wait_for_the_reply(saver, store):
    saver.hold()
    put(saver, range(3))
    assert saver.flush(5)
    assert store.pages == [0, 1, 2]
    put(saver, range(3, 5))
    settle(saver, store, 3)
    assert store.pages == [0, 1, 2]  # the reply still runs
    saver.close()
    assert store.pages == [0, 1, 2, 3, 4]


def test_any_waits_knows_what_is_not_written(saver, store):
    saver.hold()
    put(saver, range(3))
    one = (1).to_bytes(32, "little")
    assert saver.any_waits(lambda key: key == one)
    assert not saver.any_waits(lambda key: False)
    store.go.clear()
    saver.release()  # they have left the queue and are not in the store
    threading.Event().wait(0.05)
    assert saver.any_waits(lambda key: key == one)
    store.go.set()
    assert saver.flush(5)
    assert not saver.any_waits(lambda key: True)


def test_a_full_queue_skips_the_newest(saver, store):
    store.go.clear()
    saver.hold()
    taken = put(saver, range(ROOM + BATCH + 5))
    assert ROOM <= taken <= ROOM + BATCH
    assert saver.skipped == ROOM + BATCH + 5 - taken
    store.go.set()
    saver.release()
    assert saver.flush(5)
    assert store.pages == list(range(taken))
