"""The list of conversations, and which one a name means.

Knows session rows and numbers about their paths. Runs inside a transaction of its caller.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from chatkv.errors import UnknownSession
from sessions.columns import dump_json
from sessions.records import SessionRow, SessionSummary
from sessions.tree import SESSION, get_session

Sort = Literal["updated", "size", "name"]
MIN_PREFIX = 4
MAIN = "main"
_NEWEST = "updated_at DESC, rowid DESC"

# One walk from each head to its root: tokens, the first prompt, and the last turn others own.
_PATHS = """
WITH RECURSIVE path(session, turn, parent, depth, owner) AS (
  SELECT s.id, t.id, t.parent_id, t.depth, t.session_id
  FROM sessions s JOIN turns t ON t.id = s.head_turn_id
  WHERE s.id IN (SELECT value FROM json_each(?))
  UNION ALL
  SELECT p.session, t.id, t.parent_id, t.depth, t.session_id
  FROM path p JOIN turns t ON t.id = p.parent WHERE t.depth < p.depth)
SELECT session, max(depth),
  sum((SELECT total(tokens) FROM (
    SELECT max(length(r.token_ids)) / 4 AS tokens
    FROM messages m JOIN renders r ON r.message_id = m.id WHERE m.turn_id = path.turn
    GROUP BY m.id))),
  max(CASE WHEN owner <> session THEN depth END),
  max(CASE WHEN depth = 1 THEN (
    SELECT substr(content, 1, 400) FROM messages m WHERE m.turn_id = path.turn AND m.seq = 0) END)
FROM path GROUP BY session
"""


def summaries(
    db: sqlite3.Connection,
    *,
    trash: bool,
    limit: int | None,
    sort: Sort,
    among: Collection[str] | None = None,
) -> list[SessionSummary]:
    """Conversations in order, newest first by default.

    Args:
        db: Inside a transaction.
        trash: Those in the trash instead of the others.
        limit: At most so many.
        sort: `updated`, `size` (tokens) or `name`.
        among: Only these ids.
    """
    every = {head.id: head for head in heads(db)}
    ids = [
        head.id
        for head in every.values()
        if (head.trashed_at is not None) == trash and (among is None or head.id in among)
    ]
    if sort == "updated":
        ids = ids[:limit]
    these = dump_json(ids)
    numbers = {row[0]: row[1:] for row in db.execute(_PATHS, (these,))}
    rows = db.execute(
        f"SELECT {SESSION} FROM sessions WHERE id IN (SELECT value FROM json_each(?))"
        f" ORDER BY {_NEWEST}",
        (these,),
    )
    found: list[SessionSummary] = []
    for row in map(SessionRow.of, rows.fetchall()):
        turns, tokens, shared, prompt = numbers.get(row.id, (0, 0, None, None))
        model = row.settings.get("model", "")
        found.append(
            SessionSummary(
                id=row.id,
                title=chat_title(every[row.id], every),
                fork=MAIN if row.forked_from is None else row.title,
                turns=turns,
                tokens=int(tokens),
                created_at=row.created_at,
                updated_at=row.updated_at,
                trashed_at=row.trashed_at,
                model=model if isinstance(model, str) else "",
                first_line=first_line(prompt or ""),
                forked_from=row.forked_from,
                forked_at=None if row.forked_from is None else shared,
            )
        )
    if sort == "size":
        found.sort(key=lambda summary: -summary.tokens)
    elif sort == "name":
        found.sort(key=lambda summary: (summary.title or summary.first_line, summary.fork))
    return found[:limit]


class SessionHead(NamedTuple):
    """What of a session is read for all of them: enough to name it."""

    id: str
    title: str
    trashed_at: int | None
    forked_from: str | None


def heads(db: sqlite3.Connection) -> list[SessionHead]:
    """Every session, newest first."""
    rows = db.execute(f"SELECT id, title, trashed_at, forked_from FROM sessions ORDER BY {_NEWEST}")
    return [SessionHead(*row) for row in rows]


def chat_title(head: SessionHead, every: Mapping[str, SessionHead]) -> str:
    """The title of the chat that a session or fork belongs to."""
    seen = {head.id}
    while head.forked_from is not None and head.forked_from not in seen:
        head = every[head.forked_from]
        seen.add(head.id)
    return head.title


def first_line(text: str) -> str:
    """The first line that holds something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def find_session(db: sqlite3.Connection, ref: str, *, trash: bool) -> SessionRow:
    """The session that `ref` means: `@last`, an id, a name, `name:fork`, or a prefix of an id.

    Raises:
        UnknownSession: None, or more than one.
    """
    everything = heads(db)
    rows = [row for row in everything if (row.trashed_at is not None) == trash]
    if ref == "@last":
        if not rows:
            raise UnknownSession(
                "There is no conversation yet.", hint="Start one with `chatkv` or `chatkv ask`."
            )
        return get_session(db, rows[0].id)
    every = {row.id: row for row in everything}
    for found in (
        [row for row in rows if row.id == ref],
        [row for row in rows if row.forked_from is None and row.title == ref],
        _forks_named(rows, every, ref),
        [row for row in rows if len(ref) >= MIN_PREFIX and row.id.startswith(ref)],
    ):
        if len(found) == 1:
            return get_session(db, found[0].id)
        if found:
            raise UnknownSession(
                f"{ref!r} is the name of {len(found)} conversations: {_ids(found)}.",
                hint=f"Use an id, or its first {MIN_PREFIX} or more characters.",
            )
    elsewhere = "" if trash else _trash_hint(everything, ref)
    raise UnknownSession(
        f"There is no conversation {ref!r}{' in the trash' if trash else ''}.",
        hint=elsewhere or "`chatkv list` shows names and ids.",
    )


def _forks_named(
    rows: Sequence[SessionHead], every: Mapping[str, SessionHead], ref: str
) -> list[SessionHead]:
    name, colon, fork = ref.rpartition(":")
    if not colon:
        return []
    return [
        row
        for row in rows
        if chat_title(row, every) == name
        and (MAIN if row.forked_from is None else row.title) == fork
    ]


def _ids(rows: Sequence[SessionHead]) -> str:
    shown = ", ".join(row.id[:8] for row in rows[:5])
    return shown if len(rows) <= 5 else f"{shown}, ..."


def _trash_hint(rows: Sequence[SessionHead], ref: str) -> str:
    for row in rows:
        if row.trashed_at is not None and ref in (row.id, row.title or None):
            return f"It is in the trash, as {row.id}: restore it first."
    return ""
