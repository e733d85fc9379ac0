"""The model that stored pages belong to: its name, the size of its rows, the root of its chains.

Knows what `ModelSpec.identity` says. Knows no file.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from chatkv.kv.keys import canonical_json, fingerprint, page_key, root_key
from chatkv.kv.store import PageImage

Identity = Mapping[str, object]

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class PageModel:
    """One model under one salt.

    Args:
        identity: Fields of the fingerprint; of these, `layers`, `kv_heads`, `head_dim`,
            `page_tokens` and `pool_dtype` say how large a page is, `token_bytes` where rows are
            quantised.
        codec: How rows are stored.
        salt: Of the store.
    """

    def __init__(self, identity: Identity, codec: str, salt: bytes) -> None:
        self.identity = identity
        self.codec = codec
        self.fp = fingerprint(identity)
        """32 bytes."""
        self.root = root_key(self.fp, salt)
        """Parent key of the first page of every chain, 32 bytes."""
        self.page_tokens = self._number("page_tokens")
        """Slots of a full page."""
        self.layers, self.kv_heads = self._number("layers"), self._number("kv_heads")
        self.head_dim = self._number("head_dim")
        if "token_bytes" in identity:
            self.token_bytes = self._number("token_bytes")
        else:
            item_bytes = ITEM_BYTES[str(identity["pool_dtype"])]
            self.token_bytes = self.layers * 2 * self.kv_heads * self.head_dim * item_bytes
        """What the rows of one token take."""

    def register(self, db: sqlite3.Connection) -> None:
        """Write down the model and its root. Inside the caller's transaction."""
        numbers = (self.page_tokens, self.layers, self.kv_heads, self.head_dim)
        db.execute(
            "INSERT OR IGNORE INTO models VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.fp,
                canonical_json(self.identity).decode(),
                self.codec,
                *numbers,
                time.time_ns() // 1_000_000,
            ),
        )
        db.execute("INSERT OR IGNORE INTO roots VALUES(?, ?, 'local')", (self.root, self.fp))

    def recognise(self, db: sqlite3.Connection, name: str) -> int | None:
        """Note that the model is used under that name. Inside the caller's transaction.

        Returns:
            When other weights were last used under it, in Unix milliseconds; None if these were, or
            none.
        """
        key, now = f"model {name}", time.time_ns() // 1_000_000
        weights = str(self.identity.get("weights"))
        row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, f"{now} {weights}"))
        before, _, theirs = ("", "", "") if row is None else str(row[0]).partition(" ")
        return int(before) if before.isdecimal() and theirs != weights else None

    def check(self, image: PageImage) -> None:
        """Refuse a page that could never be read again: a bug of the caller. Raises ValueError."""
        if image.num_tokens > self.page_tokens:
            raise ValueError(f"{image.num_tokens} tokens in a page of {self.page_tokens}.")
        if len(image.payload) != self.token_bytes * image.num_tokens:
            raise ValueError(
                f"{len(image.payload)} bytes for {image.num_tokens} tokens of {self.token_bytes}."
            )
        if not image.key_fits:
            raise ValueError(f"Key {image.key.hex()} is not that of its ids.")

    def _number(self, name: str) -> int:
        return int(str(self.identity[name]))


def differing(
    db: sqlite3.Connection,
    model: PageModel,
    salt: bytes,
    ids: Sequence[int],
    sampled: Sequence[bool],
) -> list[str]:
    """Names of the identity's fields in which another model differs that has the first page of
    `ids`; of several the one that differs least. Empty if there is none."""
    mine = json.loads(canonical_json(model.identity))
    best: list[str] = []
    for fp, identity, size in db.execute(
        "SELECT fp, identity, page_tokens FROM models WHERE fp <> ?", (model.fp,)
    ).fetchall():
        if len(ids) < size:
            continue
        key = page_key(root_key(fp, salt), ids[:size], sampled[:size])
        if db.execute("SELECT 1 FROM pages WHERE key = ?", (key,)).fetchone() is None:
            continue
        with suppress(ValueError, AttributeError):
            theirs = cast("dict[str, Any]", json.loads(identity))
            names = sorted(mine.keys() | theirs.keys())
            fields = [name for name in names if mine.get(name) != theirs.get(name)]
            if fields and (not best or len(fields) < len(best)):
                best = fields
    return best


def get_rates(db: sqlite3.Connection, fp: bytes) -> dict[str, object]:
    """Rates kept for a model; none if they cannot be read."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (_rates(fp),)).fetchone()
    with suppress(ValueError):
        found: object = json.loads(row[0]) if row is not None else None
        return cast("dict[str, object]", found) if isinstance(found, dict) else {}
    return {}


def put_rates(db: sqlite3.Connection, fp: bytes, rates: Mapping[str, float | None]) -> None:
    """Keep what was measured. Inside the caller's transaction."""
    db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (_rates(fp), json.dumps(dict(rates))))


def _rates(fp: bytes) -> str:
    return f"rates {fp.hex()[:32]}"
