"""Stored pages of chats as a safetensors file beside their JSON lines: `chatkv-kv/1`.

One uint8 tensor a page, and in the metadata whose pages they are: the model's identity, the digest
of the JSON lines, and for each page the page before it, its ids, who chose them, and a digest. No
key is in it: whoever reads the file makes keys of their own from the ids.

Knows the format and `kv.db`. Whether rows belong to their ids only a model can tell.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, BinaryIO

from chatkv.errors import StoreError
from chatkv.kv.keys import pack_bits, page_keys
from chatkv.kv.store import PageHead
from sessions import pagerows
from sessions.cachefile import CacheFile
from sessions.pagemodel import PageModel
from sessions.records import TurnPath

FORMAT = "chatkv-kv/1"
HEADER_BYTES = 16 << 20
"""The longest header that is written or read."""

ModelPath = tuple[list[int], list[bool]]
"""All ids of one path as the model sees them, and which of them it chose."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Pages of one model that are stored for some paths, parents first."""

    identity: str
    """Canonical JSON."""
    page_tokens: int
    token_bytes: int
    heads: list[PageHead]


def digest(data: bytes) -> str:
    """The digest of JSON lines or of a page's rows, in hex."""
    return blake2b(data, digest_size=32).hexdigest()


def digest_of(file: BinaryIO) -> str:
    """The same of a file, which may be large."""
    found = blake2b(digest_size=32)
    while part := file.read(1 << 20):
        found.update(part)
    return found.hexdigest()


def paths_of(turns: Sequence[TurnPath]) -> Iterator[ModelPath]:
    """Every path of a tree of turns that ends in a leaf, under each tokenizer it has ids of."""
    known = {turn.turn.id: turn for turn in turns}
    inner = {turn.turn.parent_id for turn in turns}
    for leaf in turns:
        if leaf.turn.id in inner:
            continue
        path: list[TurnPath] = []
        at: TurnPath | None = leaf
        while at is not None:
            if at is leaf or at.shown:
                path.insert(0, at)
            at = known.get(at.turn.parent_id or 0)
        messages = [message for turn in path for message in turn.messages]
        for tok_fp in sorted({r.tok_fp for message in messages for r in message.renders}):
            ids: list[int] = []
            sampled: list[bool] = []
            for message in messages:
                if (render := message.render(tok_fp)) is None:
                    break
                flags = [False] * len(render.token_ids)
                for start, stop in render.sampled:
                    flags[start:stop] = [True] * (stop - start)
                ids += render.token_ids
                sampled += flags
            yield ids, sampled


def stored_run(disk: CacheFile, paths: Sequence[ModelPath]) -> StoredRun | None:
    """The stored pages of these paths, of the model and salt that have most of their tokens."""
    return disk.ask(partial(_best_run, paths), None)


def _best_run(paths: Sequence[ModelPath], db: sqlite3.Connection) -> StoredRun | None:
    best: StoredRun | None = None
    for root, identity, model in _models(db):
        heads: dict[bytes, PageHead] = {}
        for ids, sampled in paths:
            heads |= _run(db, root, ids, sampled, model.page_tokens)
        run = StoredRun(identity, model.page_tokens, model.token_bytes, list(heads.values()))
        if heads and (best is None or _tokens(run) > _tokens(best)):
            best = run
    return best


def _models(db: sqlite3.Connection) -> Iterator[tuple[bytes, str, PageModel]]:
    """Roots with what their model's pages look like."""
    for root, fp, identity, codec in db.execute(
        "SELECT r.key, m.fp, m.identity, m.codec FROM roots r JOIN models m ON m.fp = r.model_fp"
        " WHERE m.codec = 'exact' ORDER BY r.key"
    ).fetchall():
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # a row that is no model
            model = PageModel(json.loads(identity), codec, b"")
            if model.fp == fp:
                yield root, identity, model


def _run(
    db: sqlite3.Connection, root: bytes, ids: list[int], sampled: list[bool], page_tokens: int
) -> dict[bytes, PageHead]:
    """The stored pages of one path: whole ones up to the first that is missing, then tails."""
    found: dict[bytes, PageHead] = {}
    whole = len(ids) // page_tokens * page_tokens
    parent = root
    for key in page_keys(root, ids[:whole], sampled[:whole], page_tokens):
        heads = _heads(db, "p.key = ?", key)
        if not heads:
            break
        found[key], parent = heads[0], key
    start = page_tokens * len(found)
    for head in sorted(_heads(db, "p.parent_key = ?", parent), key=lambda head: head.num_tokens):
        stop = start + head.num_tokens
        mine = tuple(ids[start:stop]), tuple(sampled[start:stop])
        if (head.token_ids, head.sampled) == mine:
            found[head.key] = head
    return found


def _heads(db: sqlite3.Connection, where: str, value: bytes) -> list[PageHead]:
    rows = db.execute(
        f"SELECT {pagerows.HEAD} FROM pages p WHERE {where} AND p.quarantined IS NULL", (value,)
    ).fetchall()
    try:
        return [pagerows.head_of(row) for row in rows]
    except pagerows.BadPage:
        return []


def _tokens(run: StoredRun) -> int:
    return sum(head.num_tokens for head in run.heads)


def write_pages(disk: CacheFile, run: StoredRun, jsonl: bytes, file: BinaryIO) -> int:
    """Write the file of pages. Returns its number of bytes.

    Args:
        disk: Where they are read, twice: first for their digests.
        run: Which.
        jsonl: The JSON lines that the file belongs to.
        file: Where to.

    Raises:
        StoreError: A page went, or proved wrong, meanwhile; or the header would be too long.
    """
    places = {head.key: place for place, head in enumerate(run.heads)}
    header: dict[str, Any] = {}
    pages: list[list[Any]] = []
    end = 0
    for place, head in enumerate(run.heads):
        payload = _payload(disk, head, run.token_bytes)
        bits = pack_bits(head.sampled).hex()
        parent = places.get(head.parent_key, -1)
        pages.append([parent, list(head.token_ids), bits, digest(payload)])
        offsets = [end, end := end + len(payload)]
        header[f"page.{place}"] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": offsets}
    header["__metadata__"] = {
        "format": FORMAT,
        "identity": run.identity,
        "codec": "exact",
        "page_tokens": str(run.page_tokens),
        "jsonl": digest(jsonl),
        "pages": json.dumps(pages, separators=(",", ":")),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise StoreError(
            f"{len(pages):,} pages are too many for one file.", hint="Export fewer chats at once."
        )
    file.write(struct.pack("<Q", len(text)) + text)
    for head in run.heads:
        file.write(_payload(disk, head, run.token_bytes))
    return 8 + len(text) + end


def _payload(disk: CacheFile, head: PageHead, token_bytes: int) -> bytes:
    row = disk.ask(
        lambda db: db.execute(
            f"SELECT {pagerows.HEAD}, p.crc, p.num_bytes, d.data FROM pages p"
            " JOIN page_data d ON d.page_id = p.id WHERE p.key = ?",
            (head.key,),
        ).fetchone(),
        None,
    )
    try:
        if row is not None:
            return pagerows.image_of(row, token_bytes=token_bytes).payload
        why = "is gone"
    except pagerows.BadPage as bad:
        why = f"failed a check ({bad})"
    raise StoreError(
        f"A stored page of this chat {why}.", hint="Try again, or export without --with-kv."
    )
