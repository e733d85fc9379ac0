"""Search in the words of all messages.

Words of three characters and more go through the trigram index, shorter ones through LIKE. All
words have to occur, in any order. Case does not matter. Runs inside a transaction of its caller.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from sessions.columns import dump_json
from sessions.records import Match

INDEXED = 3
"""Characters of the shortest word the index can find."""
EXCERPT = 160


def search(db: sqlite3.Connection, query: str, *, limit: int, trash: bool = False) -> list[Match]:
    """Messages that hold every word of `query`, newest first."""
    words, where, values = _asked(query, trash)
    if not words:
        return []
    rows = db.execute(
        f"SELECT t.session_id, t.id, m.id, t.depth, m.role, m.content {_FROM} WHERE {where}"
        " ORDER BY m.id DESC LIMIT ?",
        (*values, limit),
    ).fetchall()
    return [_match(row, words) for row in rows]


def newest_hits(
    db: sqlite3.Connection, query: str, *, limit: int, trash: bool = False
) -> dict[str, int]:
    """Sessions with messages that hold every word of `query`, and the id of the newest of each.

    Only the newest `limit` messages are looked at.
    """
    words, where, values = _asked(query, trash)
    if not words:
        return {}
    rows = db.execute(
        "SELECT session_id, max(id) FROM"
        f" (SELECT t.session_id, m.id {_FROM} WHERE {where} ORDER BY m.id DESC LIMIT ?)"
        " GROUP BY session_id",
        (*values, limit),
    )
    return dict(rows.fetchall())


def excerpts(db: sqlite3.Connection, query: str, message_ids: Sequence[int]) -> dict[int, str]:
    """The text around the first hit of each of these messages."""
    words = _words(query)
    rows = db.execute(
        "SELECT id, content FROM messages WHERE id IN (SELECT value FROM json_each(?))",
        (dump_json(list(message_ids)),),
    )
    return {message_id: _excerpt(content, words)[0] for message_id, content in rows.fetchall()}


_FROM = "FROM messages m JOIN turns t ON t.id = m.turn_id JOIN sessions s ON s.id = t.session_id"


def _words(query: str) -> list[str]:
    return query.replace("\0", " ").split()


def _asked(query: str, trash: bool) -> tuple[list[str], str, list[str | int]]:
    """The words of a query, the condition for them and its values."""
    words = _words(query)
    where = [f"t.redacted_at IS NULL AND s.trashed_at IS {'NOT ' if trash else ''}NULL"]
    values: list[str | int] = []
    indexed = [word for word in words if len(word) >= INDEXED]
    if indexed:
        quoted = ('"' + word.replace('"', '""') + '"' for word in indexed)
        where.append("m.id IN (SELECT rowid FROM messages_fts WHERE messages_fts MATCH ?)")
        values.append(" AND ".join(quoted))
    for word in words:
        if len(word) < INDEXED:
            spellings = _spellings(word)
            where.append("(" + " OR ".join(["m.content LIKE ? ESCAPE '\\'"] * len(spellings)) + ")")
            values += [f"%{_escaped(spelling)}%" for spelling in spellings]
    return words, " AND ".join(where), values


def _match(row: Sequence[Any], words: Sequence[str]) -> Match:
    excerpt, span = _excerpt(row[5], words)
    return Match(row[0], row[1], row[2], row[3], row[4], excerpt, span)


def _spellings(word: str) -> list[str]:
    """LIKE knows the case of ASCII letters alone, so other scripts are asked for each case."""
    return sorted({word, word.lower(), word.upper(), word.title()})


def _escaped(word: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", word)


def _excerpt(content: str, words: Sequence[str]) -> tuple[str, tuple[int, int]]:
    """The text around the first hit, and where the hit is in it."""
    hits = [hit for word in words if (hit := re.search(re.escape(word), content, re.IGNORECASE))]
    if not hits:
        return content[:EXCERPT], (0, 0)
    hit = min(hits, key=lambda found: found.start())
    start = max(0, hit.start() - EXCERPT // 4)
    return content[start : start + EXCERPT], (hit.start() - start, hit.end() - start)
