"""The list of conversations, and which one a name means.

Knows session rows and numbers about their paths. Runs inside a transaction of its caller.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from chatkv.errors import UnknownSession
from sessions.columns import dump_json, load_object
from sessions.records import SessionRow, SessionSummary
from sessions.tree import get_session

Sort = Literal["updated", "size", "name"]
MIN_PREFIX = 4
MAIN = "main"
_NEWEST = "updated_at DESC, rowid DESC"

# One walk from each head to its root, in small rows: with 2,000 chats a list is mostly this.
_NUMBERS = """
WITH RECURSIVE path(session, parent, depth, turns, tokens, first) AS (
  SELECT s.rowid, t.parent_id, t.depth, t.depth, coalesce(n.num_tokens, 0),
    iif(t.depth = 0, NULL, t.id)
  FROM sessions s JOIN turns t ON t.id = s.head_turn_id LEFT JOIN turn_tokens n ON n.turn_id = t.id
  WHERE s.id IN (SELECT value FROM json_each(?))
  UNION ALL
  SELECT p.session, t.parent_id, t.depth, p.turns, p.tokens + coalesce(n.num_tokens, 0),
    iif(t.depth = 0, p.first, t.id)
  FROM path p CROSS JOIN turns t ON t.id = p.parent LEFT JOIN turn_tokens n ON n.turn_id = t.id
  WHERE t.depth < p.depth
  ORDER BY 1)
SELECT session, turns, tokens, first FROM path WHERE parent IS NULL
"""

_PROMPTS = """
SELECT turn_id, substr(content, 1, 400) FROM messages
WHERE seq = 0 AND turn_id IN (SELECT value FROM json_each(?))
"""

# From the head of each fork up to the first turn that is another's.
_SHARED = """
WITH RECURSIVE path(session, parent, depth, owner) AS (
  SELECT s.id, t.parent_id, t.depth, t.session_id
  FROM sessions s JOIN turns t ON t.id = s.head_turn_id
  WHERE s.forked_from IS NOT NULL AND s.id IN (SELECT value FROM json_each(?))
  UNION ALL
  SELECT p.session, t.parent_id, t.depth, t.session_id
  FROM path p JOIN turns t ON t.id = p.parent WHERE p.owner = p.session AND t.depth < p.depth)
SELECT session, depth FROM path WHERE owner <> session
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
    those = [
        head
        for head in every.values()
        if (head.trashed_at is not None) == trash and (among is None or head.id in among)
    ]
    if sort == "updated":
        those = those[:limit]
    ids = dump_json([head.id for head in those])
    numbers = {row[0]: row[1:] for row in db.execute(_NUMBERS, (ids,))}
    titles = {head.id: chat_title(head, every) for head in those}
    untitled = [
        numbers[head.rowid][2] for head in those if not titles[head.id] and head.rowid in numbers
    ]
    prompts: dict[int, str] = dict(db.execute(_PROMPTS, (dump_json(untitled),)).fetchall())
    shared: dict[str, int] = dict(db.execute(_SHARED, (ids,)).fetchall())
    models: dict[str, str] = {}
    """By the text of the settings, which many chats have in common."""
    found: list[SessionSummary] = []
    for head in those:
        if head.settings not in models:
            model = load_object(head.settings, f"session {head.id}").get("model", "")
            models[head.settings] = model if isinstance(model, str) else ""
        turns, tokens, first = numbers.get(head.rowid, (0, 0, 0))
        found.append(
            SessionSummary(
                id=head.id,
                title=titles[head.id],
                fork=MAIN if head.forked_from is None else head.title,
                turns=turns,
                tokens=tokens,
                created_at=head.created_at,
                updated_at=head.updated_at,
                trashed_at=head.trashed_at,
                model=models[head.settings],
                first_line=first_line(prompts.get(first, "")),
                forked_from=head.forked_from,
                forked_at=shared.get(head.id),
            )
        )
    if sort == "size":
        found.sort(key=lambda summary: -summary.tokens)
    elif sort == "name":
        found.sort(key=lambda summary: (summary.title or summary.first_line, summary.fork))
    return found[:limit]


class SessionHead(NamedTuple):
    """The row of a session, as it is read for all of them."""

    rowid: int
    id: str
    title: str
    trashed_at: int | None
    forked_from: str | None
    created_at: int
    updated_at: int
    settings: str
    """JSON."""


def heads(db: sqlite3.Connection) -> list[SessionHead]:
    """Every session, newest first."""
    columns = ", ".join(SessionHead._fields)
    rows = db.execute(f"SELECT {columns} FROM sessions ORDER BY {_NEWEST}")
    return [SessionHead._make(row) for row in rows]


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
    """The session that `ref` means: `@last`, an id, a name, `name:fork`, a fork's own name, what
    the list shows of an untitled chat in their place, or a prefix of an id.

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
    for found in _meant(db, rows, {row.id: row for row in everything}, ref, trash):
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


def _meant(
    db: sqlite3.Connection,
    rows: Sequence[SessionHead],
    every: Mapping[str, SessionHead],
    ref: str,
    trash: bool,
) -> Iterator[list[SessionHead]]:
    """Sessions by one reading of `ref` after another; the costly one is made only if it is read."""
    yield [row for row in rows if row.id == ref]
    yield [row for row in rows if row.forked_from is None and row.title == ref]
    yield _forks_named(rows, every, ref)
    yield [row for row in rows if row.forked_from is not None and row.title == ref]
    yield [row for row in rows if len(ref) >= MIN_PREFIX and row.id.startswith(ref)]
    yield _shown_as(db, rows, ref, trash)


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


def _shown_as(
    db: sqlite3.Connection, rows: Sequence[SessionHead], ref: str, trash: bool
) -> list[SessionHead]:
    """Untitled chats and their forks by the first line of their first prompt."""
    shown = summaries(db, trash=trash, limit=None, sort="updated")
    names = {s.id: s.first_line for s in shown if s.first_line and not s.title}
    forks = {s.id: s.fork for s in shown}
    return [
        row
        for row in rows
        if (name := names.get(row.id))
        and ref in (f"{name}:{forks[row.id]}", name if row.forked_from is None else None)
    ]


def _ids(rows: Sequence[SessionHead]) -> str:
    shown = ", ".join(row.id[:8] for row in rows[:5])
    return shown if len(rows) <= 5 else f"{shown}, ..."


def _trash_hint(rows: Sequence[SessionHead], ref: str) -> str:
    for row in rows:
        is_meant = ref in (row.id, row.title or None)
        is_meant = is_meant or (len(ref) >= MIN_PREFIX and row.id.startswith(ref))
        if row.trashed_at is not None and is_meant:
            return f"It is in the trash, as {row.id}: restore it first."
    return ""
