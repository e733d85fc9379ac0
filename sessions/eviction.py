"""What leaves `kv.db`, and in which order. SQL inside transactions of its own.

Leaf first, least recently used, deepest first: so every page that stays can still be reached from
its root. No reference counts, which would drift after a crash and between processes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import suppress

from chatkv.kv.keys import page_key, unpack_bits
from sessions.columns import unpack_ids
from sessions.database import transaction

BATCH = 32
"""Pages removed in one transaction."""

_UNREACHABLE = """
WITH RECURSIVE reached(key) AS (
  SELECT key FROM roots
  UNION SELECT p.key FROM pages p JOIN reached r ON p.parent_key = r.key
  UNION SELECT o.key FROM chain_ops o JOIN reached r ON o.parent_key = r.key)
DELETE FROM {table} WHERE key NOT IN (SELECT key FROM reached)
"""

_NO_CHILD = """
NOT EXISTS (SELECT 1 FROM pages c WHERE c.parent_key = p.key)
AND NOT EXISTS (SELECT 1 FROM chain_ops o WHERE o.parent_key = p.key)
"""
_OLDEST = "SELECT id FROM pages ORDER BY last_used, chain_index DESC LIMIT ?"
_OLDEST_LEAF = f"""
SELECT id FROM pages p WHERE {_NO_CHILD} ORDER BY last_used, chain_index DESC LIMIT 1
"""
_DROP_LEAF = f"DELETE FROM pages AS p WHERE id = ? AND {_NO_CHILD}"

_BARREN_OPS = """
DELETE FROM chain_ops WHERE NOT EXISTS (SELECT 1 FROM pages p WHERE p.parent_key = chain_ops.key)
AND NOT EXISTS (SELECT 1 FROM chain_ops o WHERE o.parent_key = chain_ops.key)
"""


def used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of the file that hold something. All that the budget counts, whoever wrote it."""
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    size = db.execute("PRAGMA page_size").fetchone()[0]
    return (pages - free) * size


def shrink_to(db: sqlite3.Connection, target_bytes: int) -> int:
    """Remove pages until at most `target_bytes` are used, or none are left. Returns how many went.

    Quarantined pages go first, then those that no root leads to, then leaf by leaf.
    """
    gone = 0
    for remove in (_drop_quarantined, drop_unreachable):
        if used_bytes(db) <= target_bytes:
            return gone
        with transaction(db):
            gone += remove(db)
    while used_bytes(db) > target_bytes:
        with transaction(db):
            removed, ops = _drop_oldest(db, target_bytes)
        gone += removed
        if not removed and not ops:
            break
    return gone


def _drop_oldest(db: sqlite3.Connection, target_bytes: int) -> tuple[int, int]:
    """Remove up to 32 pages that were used longest ago. Returns how many, and how many ops.

    In that order a page comes after those behind it, since using them used it too: almost always
    each is a leaf when its turn comes. One that is not is passed over.
    """
    removed = 0
    for (page_id,) in db.execute(_OLDEST, (BATCH,)).fetchall():
        removed += db.execute(_DROP_LEAF, (page_id,)).rowcount
        if used_bytes(db) <= target_bytes:
            break
    if not removed:
        for (page_id,) in db.execute(_OLDEST_LEAF).fetchall():
            removed += db.execute(_DROP_LEAF, (page_id,)).rowcount
    return removed, db.execute(_BARREN_OPS).rowcount


def _drop_quarantined(db: sqlite3.Connection) -> int:
    return db.execute("DELETE FROM pages WHERE quarantined IS NOT NULL").rowcount


def drop_unreachable(db: sqlite3.Connection) -> int:
    """Remove pages and ops whose chain is broken before them. Inside the caller's transaction."""
    db.execute(_UNREACHABLE.format(table="pages"))
    pages = db.execute("SELECT changes()").fetchone()[0]  # rowcount is -1 behind a WITH
    db.execute(_UNREACHABLE.format(table="chain_ops"))
    return pages


def descendants(db: sqlite3.Connection, key: bytes) -> list[bytes]:
    """Keys of all pages behind a page, that page left out."""
    rows = db.execute(
        "WITH RECURSIVE behind(key) AS (SELECT ?"
        " UNION SELECT p.key FROM pages p JOIN behind b ON p.parent_key = b.key"
        " UNION SELECT o.key FROM chain_ops o JOIN behind b ON o.parent_key = b.key)"
        " SELECT p.key FROM pages p JOIN behind b ON p.key = b.key WHERE p.key <> ?",
        (key, key),
    )
    return [row[0] for row in rows.fetchall()]


def purge_path(db: sqlite3.Connection, ids: Sequence[int], keep_tokens: int) -> int:
    """Remove what the file knows of a path past `keep_tokens`: pages, ops and snapshots.

    Walks from every root along the ids, whoever sampled them, through every kind of link. A page
    goes if it holds an id past `keep_tokens` and all its ids that the path has are the path's; so
    does what hangs behind it, and what was computed past the end of the path.

    Inside the caller's transaction. Returns the number of pages removed.
    """
    path = tuple(ids)
    frontier = [(row[0], 0) for row in db.execute("SELECT key FROM roots")]
    pages: list[tuple[int]] = []
    seen: set[bytes] = set()
    while frontier:
        parent, offset = frontier.pop()
        if parent in seen:  # only in a damaged file
            continue
        seen.add(parent)
        if offset > keep_tokens:
            db.execute("DELETE FROM snapshots WHERE head_key = ?", (parent,))
        for page_id, key, blob in db.execute(
            "SELECT id, key, token_ids FROM pages WHERE parent_key = ?", (parent,)
        ).fetchall():
            try:
                held = unpack_ids(blob)
            except (TypeError, ValueError):  # damaged: nobody can say that it is not of the path
                pages.append((page_id,))
                continue
            if held[: len(path) - offset] != path[offset : offset + len(held)]:
                continue
            if offset + len(held) > keep_tokens:
                pages.append((page_id,))
            frontier.append((key, min(len(path), offset + len(held))))
        for (key,) in db.execute(
            "SELECT key FROM chain_ops WHERE parent_key = ?", (parent,)
        ).fetchall():
            frontier.append((key, offset))
            if offset > keep_tokens:
                db.execute("DELETE FROM chain_ops WHERE key = ?", (key,))
    db.executemany("DELETE FROM pages WHERE id = ?", pages)
    gone = len(pages) + drop_unreachable(db)
    _drop_lone_snapshots(db)
    return gone


def _drop_lone_snapshots(db: sqlite3.Connection) -> None:
    """Remove the witnesses that no page accounts for.

    A witness outlives its tail page, which the full page in its place begins with. One that not
    even such a page accounts for may be of the purged path, and its best ids tell words too.
    """
    lone: dict[bytes, int] = dict(
        db.execute(
            "SELECT head_key, num_tokens FROM snapshots s"
            " WHERE NOT EXISTS (SELECT 1 FROM pages p WHERE p.key = s.head_key)"
        ).fetchall()
    )
    places = set(lone.values())
    for parent, first, blob, packed in db.execute(
        "SELECT parent_key, first_position, token_ids, sampled FROM pages"
    ):
        with suppress(TypeError, ValueError):  # only in a damaged file
            ids = unpack_ids(blob)
            sampled = unpack_bits(packed, len(ids))
            for count in range(1, len(ids)):
                if first + count in places:
                    lone.pop(page_key(parent, ids[:count], sampled[:count]), None)
    db.executemany("DELETE FROM snapshots WHERE head_key = ?", [(key,) for key in lone])
