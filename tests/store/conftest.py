"""Stores in temporary folders, and short ways to fill them."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from copied import FP
from faulty import Countdown, Faulty

from chatkv.kv.keys import page_key
from chatkv.kv.store import PageImage
from sessions.pages import SqlitePageStore
from sessions.records import Render
from sessions.store import MEMORY, ChatStore
from sessions.token_log import StoredLog

ROOT = Path(__file__).parents[2]


class Talk:
    """Fills a store with turns whose ids are made from their text."""

    FP = b"t" * 32

    def __init__(self, store: ChatStore) -> None:
        self.store = store

    def start(self, title: str = "", system: str = "be brief", **settings: Any) -> str:
        row = self.store.create_session(title, system, settings)
        message = self.store.path(row.id)[0].messages[0].row
        self.store.set_render(message.id, self.FP, self.ids(system), ())
        return row.id

    def turn(self, session: str, prompt: str, reply: str, parent: int | None = None) -> int:
        """One whole turn below the head (or `parent`); returns its id."""
        head = self.store.session(session).head_turn_id
        assert head is not None
        render = Render(self.FP, self.ids(prompt))
        begun = self.store.begin_turn(
            session, head, parent or head, prompt, {"seed": 7}, render=render
        )
        ids = self.ids(reply)
        self.store.finish_turn(
            begun.turn_id, "done", reply, self.FP, ids, ((0, len(ids)),), {"predicted_n": len(ids)}
        )
        return begun.turn_id

    def texts(self, session: str) -> list[str]:
        return [m.row.content for turn in self.store.path(session) for m in turn.messages]

    @staticmethod
    def ids(text: str) -> list[int]:
        return [ord(letter) for letter in text]


class PageMaker:
    """Chains of pages of random bytes for one small model."""

    TOKENS = 4
    TOKEN_BYTES = 2 * 2 * 1 * 64 * 2
    IDENTITY = {  # noqa: RUF012 - read only
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "page_tokens": TOKENS,
        "pool_dtype": "bfloat16",
        "weights": "one",
    }

    def __init__(self) -> None:
        self.random = random.Random(5)

    def open(self, path: Path, limit_bytes: int = 1 << 30, **identity: Any) -> SqlitePageStore:
        return SqlitePageStore(path, {**self.IDENTITY, **identity}, limit_bytes=limit_bytes)

    def image(self, parent: bytes, index: int, ids: tuple[int, ...], sampled: int = 0) -> PageImage:
        """The page of `ids`, the last `sampled` of them chosen by the model."""
        flags = tuple(place >= len(ids) - sampled for place in range(len(ids)))
        key = page_key(parent, ids, flags)
        payload = self.random.randbytes(self.TOKEN_BYTES * len(ids))
        return PageImage(key, parent, index, index * self.TOKENS, ids, flags, "chunk", payload)

    def chain(self, root: bytes, ids: list[int]) -> list[PageImage]:
        """All pages of `ids`, the tail included."""
        images: list[PageImage] = []
        for start in range(0, len(ids), self.TOKENS):
            parent = images[-1].key if images else root
            images.append(self.image(parent, len(images), tuple(ids[start : start + self.TOKENS])))
        return images


@pytest.fixture
def failing() -> Callable[[Any, int], Faulty]:
    """A connection whose disk fails from its n-th statement on."""
    return lambda real, left: Faulty(real, Countdown(left))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chat.db"


_MISCOUNTED = """
SELECT t.id, n.num_tokens FROM turns t LEFT JOIN turn_tokens n ON n.turn_id = t.id
WHERE coalesce(n.num_tokens, 0) <> coalesce((
  SELECT sum((SELECT max(length(r.token_ids)) / 4 FROM renders r WHERE r.message_id = m.id))
  FROM messages m WHERE m.turn_id = t.id), 0)
"""


def miscounted(store: ChatStore) -> list[Any]:
    """Turns whose stored number of tokens is not that of their ids."""
    return store._db.execute(_MISCOUNTED).fetchall()


@pytest.fixture
def store(path: Path) -> Iterator[ChatStore]:
    with ChatStore(path) as opened:
        yield opened


@pytest.fixture
def memory() -> Iterator[ChatStore]:
    with ChatStore(MEMORY) as opened:
        yield opened
        assert miscounted(opened) == []  # whatever the test did


@pytest.fixture
def talk(memory: ChatStore) -> Talk:
    return Talk(memory)


@pytest.fixture
def talk_on() -> type[Talk]:
    return Talk


@pytest.fixture
def maker() -> PageMaker:
    return PageMaker()


@pytest.fixture
def kv_path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kv.db"


@pytest.fixture
def pages(kv_path: Path, maker: PageMaker) -> Iterator[SqlitePageStore]:
    opened = maker.open(kv_path)
    yield opened
    opened.close()


@pytest.fixture
def start_child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python on a script, its stdout a pipe; what still runs at the end is killed."""
    children: list[subprocess.Popen[str]] = []

    def start(script: str, *args: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def open_log(chat_path: Path) -> Iterator[Callable[..., StoredLog]]:
    opened: list[StoredLog] = []

    def begin(tok_fp: bytes = FP) -> StoredLog:
        opened.append(StoredLog(chat_path, tok_fp))
        opened[-1].look()
        return opened[-1]

    yield begin
    for log in opened:
        log.close()


@pytest.fixture
def chat_path(store: ChatStore) -> Path:
    assert store.file is not None
    return store.file
