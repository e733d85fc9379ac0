"""The tiny model on real files, and what of a text stands in them."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Done
from chatkv.spec.token_log import GIVEN
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.service import EngineService
from sessions.store import ChatStore
from sessions.token_log import StoredLog

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}


@contextmanager
def program(data: Path) -> Iterator[Chats]:
    """The tiny model on the files of `data`: conversations, pages and token log."""
    model = TinyModel()
    store = ChatStore(data / "chat.db")
    identity = model.identity(model.page_size)
    pages = SqlitePageStore(data / "kv" / "kv.db", identity, limit_bytes=1 << 30)
    log = StoredLog(data / "chat.db", model.tokenizer.tok_fp())
    engine = Engine(
        model, EngineConfig(spec="none"), store=pages, salt=pages.salt, costs=COSTS, guard=False
    )
    local = LocalEngine(EngineService(engine, pages, log))
    local.start()
    sampling = {"temperature": 1.0, "max_tokens": 30, "seed": 3}
    try:
        yield Chats(store, local, settings={"model": "tiny", "sampling": sampling})
        log.look()
    finally:
        local.close()
        pages.close()
        store.close()


def say(chat, text: str) -> Done:
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done


def packed(text: str, flag: int = 0) -> bytes:
    return struct.pack(f"<{len(text)}I", *(byte | flag for byte in text.encode()))


def files_with(data: Path, *traces: bytes) -> list[str]:
    """Names of the files in which one of these stands, whatever the files are."""
    return sorted(
        path.name
        for path in data.rglob("*")
        if path.is_file() and any(trace in path.read_bytes() for trace in traces)
    )


def traces_of(text: str) -> list[bytes]:
    """As text, as ids of a render, a page and a purge, and as given ids of a token log.

    Eight ids in a row: a page edge may fall anywhere.
    """
    short = [text[start : start + 8] for start in range(0, len(text) - 8)]
    ids = [packed(part, flag) for part in short for flag in (0, GIVEN)]
    return [text.encode(), *(part.encode() for part in short), *ids]


def payloads(data: Path, text: str) -> list[bytes]:
    """64 bytes from the rows of each page that holds a piece of `text`."""
    db = sqlite3.connect(data / "kv" / "kv.db")
    rows = db.execute(
        "SELECT p.token_ids, d.data FROM pages p JOIN page_data d ON d.page_id = p.id"
    ).fetchall()
    db.close()
    parts = [packed(text[start : start + 8]) for start in range(0, len(text) - 8)]
    return [data[64:128] for ids, data in rows if any(part in ids for part in parts)]
