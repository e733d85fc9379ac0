"""Single pages and snapshots as rows of `kv.db`, and the proof that a row is what it claims to be.

Knows columns and checksums. Knows no file, no lock and no budget.
"""

from __future__ import annotations

import sqlite3
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

from chatkv.kv.chain import Link
from chatkv.kv.keys import canonical_json, pack_bits, unpack_bits
from chatkv.kv.store import PageHead, PageImage, Snapshot
from sessions.columns import pack_ids, unpack_ids

HEAD = (
    "p.key, p.parent_key, p.chain_index, p.first_position, p.token_ids, p.sampled, p.origin, "
    "p.num_tokens, p.head_crc"
)


class BadPage(Exception):
    """A row that fails a check; the text names it. Never leaves `sessions`."""


def checksum(key: bytes, payload: bytes) -> int:
    """CRC-32 of key and payload: a payload served under another row's key fails it."""
    return zlib.crc32(payload, zlib.crc32(key))


def head_checksum(key: bytes, chain_index: int, first_position: int, origin: str) -> int:
    """CRC-32 of what a head says beyond what its key proves."""
    return zlib.crc32(
        struct.pack("<qq", chain_index, first_position) + origin.encode(), zlib.crc32(key)
    )


def head_of(row: Sequence[Any]) -> PageHead:
    """The columns `HEAD` as a record. Raises BadPage if key, ids and sampled bits do not agree, or
    another column is not what was stored."""
    fields: list[Any] = _head(row)
    return PageHead(*fields)


def image_of(row: Sequence[Any], *, token_bytes: int) -> PageImage:
    """`HEAD`, then crc, num_bytes and data, as a record.

    Args:
        row: The columns.
        token_bytes: What the rows of one token take.

    Raises:
        BadPage: Any check fails: ids, size or checksum.
    """
    fields = _head(row)
    crc, size, payload = row[9:12]
    if not isinstance(payload, bytes):
        raise BadPage("no data")
    if len(payload) != size or size != token_bytes * len(fields[4]):
        raise BadPage("size")
    if checksum(fields[0], payload) != crc:
        raise BadPage("checksum")
    columns: list[Any] = [*fields, payload]
    return PageImage(*columns)


def _head(row: Sequence[Any]) -> list[Any]:
    try:
        ids = unpack_ids(row[4])
        fields: list[Any] = [*row[:4], ids, unpack_bits(row[5], len(ids)), row[6]]
        head = PageHead(*fields)
        fits = len(ids) == row[7] and head.key_fits
        proved = head_checksum(row[0], row[2], row[3], row[6]) == row[8]
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        raise BadPage("ids") from error
    if not fits:
        raise BadPage("ids")
    if not proved:
        raise BadPage("head")
    return fields


def put_page(
    db: sqlite3.Connection, image: PageImage, *, model_fp: bytes, clock: int, page_tokens: int
) -> bool:
    """Store a page unless a good one is there. Returns whether it was new.

    A quarantined row is replaced. A full page takes the place of the tails it continues.
    """
    held = db.execute("SELECT id, quarantined FROM pages WHERE key = ?", (image.key,)).fetchone()
    if held is not None:
        if held[1] is None:
            return False
        db.execute("DELETE FROM pages WHERE id = ?", (held[0],))
    cursor = db.execute(
        "INSERT INTO pages(key, parent_key, model_fp, chain_index, first_position, num_tokens,"
        " token_ids, sampled, origin, head_crc, crc, num_bytes, last_used)"
        " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            image.key,
            image.parent_key,
            model_fp,
            image.chain_index,
            image.first_position,
            image.num_tokens,
            pack_ids(image.token_ids),
            pack_bits(image.sampled),
            image.origin,
            head_checksum(image.key, image.chain_index, image.first_position, image.origin),
            checksum(image.key, image.payload),
            len(image.payload),
            clock,
        ),
    )
    db.execute(
        "INSERT INTO page_data(page_id, data) VALUES(?, ?)", (cursor.lastrowid, image.payload)
    )
    if image.num_tokens == page_tokens:
        _drop_tails(db, image)
    return True


def quarantine(db: sqlite3.Connection, key: bytes, reason: str) -> int:
    """Mark a page as bad, unless it is. Returns how many were marked.

    Its head proves nothing any more: a mark that a damaged file loses is still a refusal.
    """
    return db.execute(
        "UPDATE pages SET quarantined = ?, head_crc = -1 WHERE key = ? AND quarantined IS NULL",
        (reason, key),
    ).rowcount


def _drop_tails(db: sqlite3.Connection, full: PageImage) -> None:
    """Remove the shorter pages beside a full one that hold only what it holds.

    One that something hangs on (an op closes the page it falls in) stays.
    """
    for page_id, ids, sampled in db.execute(
        "SELECT p.id, p.token_ids, p.sampled FROM pages p WHERE parent_key = ? AND num_tokens < ?"
        " AND NOT EXISTS (SELECT 1 FROM chain_ops o WHERE o.parent_key = p.key)"
        " AND NOT EXISTS (SELECT 1 FROM pages c WHERE c.parent_key = p.key)",
        (full.parent_key, full.num_tokens),
    ).fetchall():
        count = len(ids) // 4
        if (ids, sampled) == (pack_ids(full.token_ids[:count]), pack_bits(full.sampled[:count])):
            db.execute("DELETE FROM pages WHERE id = ?", (page_id,))


def put_snapshot(db: sqlite3.Connection, snapshot: Snapshot, *, model_fp: bytes) -> None:
    """Store or replace the witness of a page."""
    db.execute(
        "INSERT OR REPLACE INTO snapshots(head_key, model_fp, num_tokens, logits_hash, top_ids,"
        " top_values, backend, created_at) VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
        (
            snapshot.head_key,
            model_fp,
            snapshot.num_tokens,
            snapshot.logits_hash,
            pack_ids(snapshot.top_ids),
            struct.pack("<8f", *snapshot.top_values),
            snapshot.backend,
            time.time_ns() // 1_000_000,
        ),
    )


def put_link(db: sqlite3.Connection, link: Link, *, model_fp: bytes) -> None:
    """Store an op between pages, unless it is there."""
    db.execute(
        "INSERT OR IGNORE INTO chain_ops(key, parent_key, model_fp, op) VALUES(?, ?, ?, ?)",
        (link.key, link.parent, model_fp, canonical_json(link.op.to_json()).decode()),
    )


def get_snapshot(db: sqlite3.Connection, head_key: bytes, *, model_fp: bytes) -> Snapshot | None:
    """The witness of a page, or None; also for a row that makes none. Values come back as the
    float32 they were."""
    row = db.execute(
        "SELECT num_tokens, logits_hash, top_ids, top_values, backend FROM snapshots"
        " WHERE head_key = ? AND model_fp = ?",
        (head_key, model_fp),
    ).fetchone()
    if row is None:
        return None
    try:
        values = struct.unpack("<8f", row[3])
        return Snapshot(head_key, row[0], row[1], unpack_ids(row[2]), values, row[4])
    except (TypeError, ValueError, struct.error):  # only in a damaged file
        return None
