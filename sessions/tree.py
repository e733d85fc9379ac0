"""The tree of turns as SQL: reading paths, adding turns and messages. Every function runs inside a
transaction that its caller opened.

Knows rows and ids. Knows no file, no lock and no session list.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from chatkv.errors import StoreError, UnknownSession
from sessions.columns import dump_json, new_id, pack_ids, storable
from sessions.records import (
    ForgetRow,
    MessageRow,
    Render,
    RenderRow,
    Role,
    SessionRow,
    StoredMessage,
    TurnPath,
    TurnRow,
)

SESSION = (
    "id, title, created_at, updated_at, trashed_at, head_turn_id, forked_from, settings, "
    "pending_ops"
)
TURN = "id, parent_id, depth, session_id, state, pinned, redacted_at, created_at, sampling, usage"
MESSAGE = "id, turn_id, seq, role, content, state, meta, created_at"
FORGET = "id, at_turn_id, policy, reason, op, num_tokens, cancels, receipt, created_at"

ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool", "summary")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def next_update(db: sqlite3.Connection) -> int:
    """When a session changes now: later than any other, whatever the clock says.

    `@last` is the newest, so a clock that goes back must not make an older one the last.
    """
    newest = db.execute("SELECT coalesce(max(updated_at), 0) FROM sessions").fetchone()[0]
    return max(now_ms(), newest + 1)


def get_session(db: sqlite3.Connection, session_id: str) -> SessionRow:
    row = db.execute(f"SELECT {SESSION} FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        raise UnknownSession(
            f"There is no conversation {session_id}.",
            hint="`chatkv list` shows what there is; it may have been deleted meanwhile.",
        )
    return SessionRow.of(row)


def get_turn(db: sqlite3.Connection, turn_id: int) -> TurnRow:
    row = db.execute(f"SELECT {TURN} FROM turns WHERE id = ?", (turn_id,)).fetchone()
    if row is None:
        raise UnknownSession(
            f"There is no turn with the id {turn_id}.",
            hint="Its conversation may have been deleted meanwhile.",
        )
    return TurnRow.of(row)


def path_ids(db: sqlite3.Connection, turn_id: int) -> list[int]:
    """Ids from the root to `turn_id`."""
    rows = db.execute(
        "WITH RECURSIVE path(id, parent_id, depth) AS ("
        "  SELECT id, parent_id, depth FROM turns WHERE id = ?"
        "  UNION ALL SELECT t.id, t.parent_id, t.depth"
        "  FROM turns t JOIN path ON t.id = path.parent_id"
        # So that not even a damaged file makes it go round.
        "  WHERE t.depth < path.depth)"
        " SELECT id, depth FROM path ORDER BY depth",
        (turn_id,),
    ).fetchall()
    if [depth for _, depth in rows] != list(range(len(rows))):
        raise StoreError(
            f"The path to turn {turn_id} has a gap.",
            hint="The session store is damaged. Keep the file and look for a backup.",
        )
    return [row[0] for row in rows]


def closure(db: sqlite3.Connection, owners: Sequence[str], heads: Sequence[int]) -> list[int]:
    """Ids of the turns that these sessions own, these heads, and all turns above them.

    Parents first: a turn's id is higher than its parent's.
    """
    rows = db.execute(
        "WITH RECURSIVE need(id) AS ("
        "  SELECT value FROM json_each(?)"
        "  UNION SELECT id FROM turns WHERE session_id IN (SELECT value FROM json_each(?))"
        "  UNION SELECT t.parent_id FROM turns t JOIN need ON t.id = need.id"
        "  WHERE t.parent_id IS NOT NULL)"
        " SELECT id FROM need ORDER BY id",
        (dump_json(heads), dump_json(owners)),
    )
    return [row[0] for row in rows.fetchall()]


def load_turns(db: sqlite3.Connection, ids: Sequence[int]) -> list[TurnPath]:
    """All that is stored of these turns, in the order given."""
    marks = dump_json(ids)
    turns = {
        turn.id: turn
        for turn in map(TurnRow.of, _among(db, TURN, "turns", "id", marks, order="id"))
    }
    messages: defaultdict[int, list[MessageRow]] = defaultdict(list)
    for row in _among(db, MESSAGE, "messages", "turn_id", marks, order="turn_id, seq"):
        messages[row[1]].append(MessageRow.of(row))
    renders: defaultdict[int, list[RenderRow]] = defaultdict(list)
    for row in db.execute(
        "SELECT r.message_id, r.tok_fp, r.token_ids, r.sampled FROM messages m"
        " JOIN renders r ON r.message_id = m.id"
        " WHERE m.turn_id IN (SELECT value FROM json_each(?)) ORDER BY r.message_id, r.tok_fp",
        (marks,),
    ):
        renders[row[0]].append(RenderRow.of(row))
    forgets: defaultdict[int, list[ForgetRow]] = defaultdict(list)
    for row in _among(db, FORGET, "forgets", "at_turn_id", marks, order="id"):
        forgets[row[1]].append(ForgetRow.of(row))
    return [
        TurnPath(
            turns[turn_id],
            tuple(StoredMessage(row, tuple(renders[row.id])) for row in messages[turn_id]),
            tuple(forgets[turn_id]),
        )
        for turn_id in ids
    ]


def _among(
    db: sqlite3.Connection, columns: str, table: str, column: str, marks: str, *, order: str
) -> list[Any]:
    return db.execute(
        f"SELECT {columns} FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))"
        f" ORDER BY {order}",
        (marks,),
    ).fetchall()


def add_session(
    db: sqlite3.Connection,
    *,
    title: str,
    settings: Mapping[str, Any],
    forked_from: str | None = None,
    head: int | None = None,
) -> str:
    """Add a session row and return its id."""
    session_id = new_id()
    db.execute(
        "INSERT INTO sessions(id, title, created_at, updated_at, head_turn_id, forked_from,"
        " settings) VALUES(?, ?, ?, ?, ?, ?, ?)",
        (
            session_id,
            clean_title(title),
            now_ms(),
            next_update(db),
            head,
            forked_from,
            dump_json(settings),
        ),
    )
    return session_id


def add_turn(
    db: sqlite3.Connection,
    *,
    session_id: str,
    parent: TurnRow | None,
    state: str,
    sampling: Mapping[str, Any],
    usage: Mapping[str, Any],
) -> int:
    """Add a turn below `parent` (None: a root) and return its id."""
    cursor = db.execute(
        "INSERT INTO turns(parent_id, depth, session_id, state, created_at, sampling, usage)"
        " VALUES(?, ?, ?, ?, ?, ?, ?)",
        (
            parent.id if parent else None,
            parent.depth + 1 if parent else 0,
            session_id,
            state,
            now_ms(),
            dump_json(sampling),
            dump_json(usage),
        ),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def put_message(
    db: sqlite3.Connection,
    *,
    turn_id: int,
    seq: int,
    role: Role,
    content: str,
    state: str,
    render: Render | None,
) -> int:
    """Add or replace a message, its words in the search index, and its ids if given.

    Returns its id.
    """
    content = storable(content)
    held = db.execute(
        "SELECT id, content FROM messages WHERE turn_id = ? AND seq = ?", (turn_id, seq)
    ).fetchone()
    if held is None:
        cursor = db.execute(
            "INSERT INTO messages(turn_id, seq, role, content, state, created_at)"
            " VALUES(?, ?, ?, ?, ?, ?)",
            (turn_id, seq, role, content, state, now_ms()),
        )
        assert cursor.lastrowid is not None
        message_id = cursor.lastrowid
    else:
        message_id = held[0]
        unindex(db, message_id, held[1])
        db.execute(
            "UPDATE messages SET content = ?, state = ? WHERE id = ?", (content, state, message_id)
        )
    db.execute("INSERT INTO messages_fts(rowid, content) VALUES(?, ?)", (message_id, content))
    if render is not None:
        put_render(db, message_id, render)
    return message_id


def unindex(db: sqlite3.Connection, message_id: int, content: str) -> None:
    """Take a message out of the search index; `content` must be what was indexed."""
    db.execute(
        "INSERT INTO messages_fts(messages_fts, rowid, content) VALUES('delete', ?, ?)",
        (message_id, content),
    )


def put_render(db: sqlite3.Connection, message_id: int, render: Render) -> None:
    """Add or replace the ids of a message under one tokenizer."""
    db.execute(
        "INSERT INTO renders(message_id, tok_fp, token_ids, sampled) VALUES(?, ?, ?, ?)"
        " ON CONFLICT(message_id, tok_fp)"
        " DO UPDATE SET token_ids = excluded.token_ids, sampled = excluded.sampled",
        (message_id, render.tok_fp, pack_ids(render.token_ids), dump_json(list(render.sampled))),
    )


def add_forgets(db: sqlite3.Connection, turn_id: int, ops: Sequence[Mapping[str, Any]]) -> None:
    """Write what was typed since the last turn (`pending_ops`) as records of `turn_id`."""
    for op in ops:
        db.execute(
            "INSERT INTO forgets(at_turn_id, policy, reason, op, num_tokens, cancels, created_at)"
            " VALUES(?, ?, ?, ?, ?, ?, ?)",
            (
                turn_id,
                op["policy"],
                op["reason"],
                dump_json(op["op"]),
                op["num_tokens"],
                op.get("cancels"),
                now_ms(),
            ),
        )


def free_fork_title(db: sqlite3.Connection, session_id: str) -> str:
    """`fork-2`, `fork-3`, ...: the first that no fork of the same chat has."""
    taken = {row[0] for row in db.execute(f"{_FAMILY} SELECT title FROM family", (session_id,))}
    number = 2
    while f"fork-{number}" in taken:
        number += 1
    return f"fork-{number}"


def family(db: sqlite3.Connection, session_id: str) -> list[SessionRow]:
    """The chat that `session_id` is part of: its first session, then every fork, parents first."""
    rows = db.execute(
        f"{_FAMILY} SELECT {SESSION} FROM sessions WHERE id IN (SELECT id FROM family)"
        " ORDER BY rowid",
        (session_id,),
    )
    return [SessionRow.of(row) for row in rows.fetchall()]


_FAMILY = (
    "WITH RECURSIVE up(id, forked_from) AS ("
    "  SELECT id, forked_from FROM sessions WHERE id = ?"
    "  UNION SELECT s.id, s.forked_from FROM sessions s JOIN up ON s.id = up.forked_from),"
    " family(id, title) AS ("
    "  SELECT s.id, s.title FROM sessions s JOIN up ON s.id = up.id WHERE s.forked_from IS NULL"
    "  UNION SELECT s.id, s.title FROM sessions s JOIN family ON s.forked_from = family.id)"
)


def clean_title(title: str) -> str:
    """One line, no spaces at the ends."""
    return " ".join(storable(title).split())
