"""Looking after `kv.db` without a model: is every page what it claims to be, and what may go.

Knows pages, budgets and which models are wanted. Knows no engine and no conversation.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chatkv.errors import StoreError
from sessions import eviction, pagerows
from sessions.cachefile import CacheFile
from sessions.pagemodel import PageModel

READ_PAGES = 16
"""Pages read at once."""
DROP_PAGES = 32
"""Pages of an unwanted model removed in one transaction."""


@dataclass(slots=True)
class Verified:
    """What `verify` found."""

    pages: int = 0
    """Read and checked."""
    payload_bytes: int = 0
    bad: dict[str, int] = field(default_factory=dict[str, int])
    """Pages that failed, by the check: `ids`, `head`, `size`, `checksum`, `no data`, `model`."""
    quarantined: int = 0
    """Pages that had failed before; they are not read again."""
    damaged: bool = False
    """The file itself was damaged and is set aside."""


@dataclass(slots=True)
class Collected:
    """What `collect` removed."""

    quarantined: int = 0
    unreachable: int = 0
    """Pages whose chain is broken before them."""
    other_models: int = 0
    """Pages of models that are not wanted."""
    evicted: int = 0
    """Pages that did not fit the budget."""
    freed_bytes: int = 0
    file_bytes: int = 0
    """Of the file, afterwards."""


def verify(disk: CacheFile) -> Verified:
    """Read every page and check size, key, checksum and model. What fails is quarantined.

    Raises:
        StoreBusy: Another process is writing.
        StoreError: What is bad cannot be marked.
    """
    found = Verified()
    models = disk.ask(_sound_models, None)
    after: int | None = 0
    while models is not None and after is not None:
        rows = disk.ask(partial(_rows_behind, after), None)
        if rows is None:
            models = None
            break
        bad: list[tuple[str, bytes]] = []
        for row in rows:
            if row[2] is not None:
                found.quarantined += 1
                continue
            reason = _check(row, models)
            found.pages += 1
            found.payload_bytes += row[13] if isinstance(row[13], int) else 0
            if reason:
                found.bad[reason] = found.bad.get(reason, 0) + 1
                bad.append((reason, row[3]))
        if bad:
            disk.save(partial(_quarantine, bad), None)
        after = rows[-1][0] if rows else None
    found.damaged = any("set aside" in notice for notice in disk.notices)  # at open, or just now
    if models is None and not found.damaged:
        raise StoreError(f"{disk.path} cannot be read now.", hint="Nothing was changed. Try again.")
    return found


def collect(disk: CacheFile, wanted: Collection[str] | None = None) -> Collected:
    """Remove what is no use, evict down to the budget, and give the space back.

    Args:
        disk: The file.
        wanted: Weight digests of the models to keep; None keeps those of every model.

    Raises:
        StoreError: It cannot be written, or another process is writing.
    """
    if not disk.saving:
        raise StoreError(
            " ".join(disk.notices) or f"{disk.path} cannot be changed.",
            hint="Chats are not touched by it.",
        )
    before, found = disk.path.stat().st_size, Collected()
    found.quarantined = disk.save(_drop_quarantined, 0)
    if wanted is not None:
        for fp in disk.ask(partial(_unwanted, wanted), []):
            while count := disk.save(partial(_drop_some, fp), 0):
                found.other_models += count
            disk.save(partial(_drop_model, fp), None)
    found.unreachable = disk.save(eviction.drop_unreachable, 0)
    found.evicted = disk.shrink(disk.limit_bytes)
    disk.compact()
    found.file_bytes = disk.path.stat().st_size
    found.freed_bytes = max(0, before - found.file_bytes)
    return found


# Inside `ask`: an error of SQLite sets the file aside.


def _sound_models(db: sqlite3.Connection) -> dict[bytes, int]:
    """Bytes of a token for each model whose row is right; also a look at the b-trees."""
    ((said,),) = db.execute("PRAGMA quick_check(1)").fetchall()
    if said != "ok":
        raise sqlite3.DatabaseError(said)
    models: dict[bytes, int] = {}
    for fp, identity, codec in db.execute("SELECT fp, identity, codec FROM models").fetchall():
        try:
            model = PageModel(json.loads(identity), codec, b"")
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        if model.fp == fp:
            models[fp] = model.token_bytes
    return models


def _rows_behind(after: int, db: sqlite3.Connection) -> list[Any]:
    return db.execute(
        f"SELECT p.id, p.model_fp, p.quarantined, {pagerows.HEAD}, p.crc, p.num_bytes, d.data"
        " FROM pages p LEFT JOIN page_data d ON d.page_id = p.id"
        " WHERE p.id > ? ORDER BY p.id LIMIT ?",
        (after, READ_PAGES),
    ).fetchall()


def _unwanted(wanted: Collection[str], db: sqlite3.Connection) -> list[bytes]:
    """Models whose weights are not `wanted`; one that cannot be read is none of them either."""
    found: list[bytes] = []
    for fp, identity in db.execute("SELECT fp, identity FROM models").fetchall():
        try:
            weights = json.loads(identity)["weights"]
        except (KeyError, TypeError, ValueError):
            weights = None
        if weights not in wanted:
            found.append(fp)
    return found


def _check(row: Sequence[Any], models: dict[bytes, int]) -> str:
    """Which check a row of `_rows_behind` fails, or nothing."""
    if row[1] not in models:
        return "model"
    try:
        pagerows.image_of(row[3:], token_bytes=models[row[1]])
    except pagerows.BadPage as bad:
        return str(bad)
    return ""


# Inside `save`: one transaction.


def _quarantine(bad: list[tuple[str, bytes]], db: sqlite3.Connection) -> None:
    for reason, key in bad:
        pagerows.quarantine(db, key, reason)


def _drop_quarantined(db: sqlite3.Connection) -> int:
    return db.execute("DELETE FROM pages WHERE quarantined IS NOT NULL").rowcount


def _drop_some(fp: bytes, db: sqlite3.Connection) -> int:
    return db.execute(
        "DELETE FROM pages WHERE id IN (SELECT id FROM pages WHERE model_fp = ? LIMIT ?)",
        (fp, DROP_PAGES),
    ).rowcount


def _drop_model(fp: bytes, db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM models WHERE fp = ?", (fp,))
