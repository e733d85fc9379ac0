"""A branch on which a summary stands for turns: they stay above it, what followed them is copied.

Runs inside the caller's transaction. Knows rows; no token budget and no engine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sessions.columns import dump_json
from sessions.records import Render, Role
from sessions.tree import (
    add_forgets,
    add_turn,
    get_turn,
    next_update,
    path_ids,
    put_message,
    unindex,
)

Ops = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SummaryTurn:
    """What stands for the turns up to `after`."""

    after: int
    """Id of the last turn it stands for, or of one behind it: the parent of its own."""
    prompt: str
    reply: str
    prompt_ids: Render
    reply_ids: Render
    sampling: Mapping[str, Any]
    usage: Mapping[str, Any]
    kept: tuple[int, ...]
    """Ids of the turns that follow it, the one to be answered last."""
    ops: tuple[Ops, ...]
    """Forget records of the summary's turn, then of each that follows."""


def add_branch(db: sqlite3.Connection, session_id: str, made: SummaryTurn) -> int:
    """Add the summary with copies of the turns behind it, and make the last one the head.

    The prompt to be answered moves: its turn on the old branch goes unless somebody stands on it.

    Returns:
        Id of the turn to be answered.
    """
    parent = get_turn(db, made.after)
    turn = add_turn(
        db,
        session_id=session_id,
        parent=parent,
        state="done",
        sampling=made.sampling,
        usage=made.usage,
    )
    said: tuple[tuple[Role, str, Render], ...] = (
        ("user", made.prompt, made.prompt_ids),
        ("summary", made.reply, made.reply_ids),
    )
    for seq, (role, text, ids) in enumerate(said):
        put_message(db, turn_id=turn, seq=seq, role=role, content=text, state="done", render=ids)
    add_forgets(db, turn, made.ops[0])
    for source, ops in zip(made.kept, made.ops[1:], strict=True):
        turn = _copy(db, session_id, source, turn)
        add_forgets(db, turn, ops)
    old = made.kept[-1]
    db.execute(
        "UPDATE sessions SET head_turn_id = ?, updated_at = ? WHERE id = ? AND head_turn_id = ?",
        (turn, next_update(db), session_id, old),
    )
    _remove(db, old)
    return turn


def _copy(db: sqlite3.Connection, session_id: str, source: int, parent: int) -> int:
    """A copy of a turn below another parent, with its messages and ids. Returns its id.

    It keeps the time of the first, by which `redact` finds it, and says in `usage` that it is one,
    so that nothing is counted twice.
    """
    depth = get_turn(db, parent).depth + 1
    turn = db.execute(
        "INSERT INTO turns(parent_id, depth, session_id, state, pinned, redacted_at, created_at,"
        " sampling, usage) SELECT ?, ?, ?, state, pinned, redacted_at, created_at, sampling,"
        " json_set(usage, '$.copy', json('true')) FROM turns WHERE id = ?",
        (parent, depth, session_id, source),
    ).lastrowid
    assert turn is not None
    rows = db.execute(
        "SELECT id, seq, role, content, state, meta, created_at FROM messages"
        " WHERE turn_id = ? ORDER BY seq",
        (source,),
    ).fetchall()
    for message, *row in rows:
        copy = db.execute(
            "INSERT INTO messages(turn_id, seq, role, content, state, meta, created_at)"
            " VALUES(?, ?, ?, ?, ?, ?, ?)",
            (turn, *row),
        ).lastrowid
        db.execute("INSERT INTO messages_fts(rowid, content) VALUES(?, ?)", (copy, row[2]))
        db.execute(
            "INSERT INTO renders(message_id, tok_fp, token_ids, sampled)"
            " SELECT ?, tok_fp, token_ids, sampled FROM renders WHERE message_id = ?",
            (copy, message),
        )
    return turn


def _remove(db: sqlite3.Connection, turn: int) -> None:
    """Delete a turn whose prompt has moved, or close it where somebody stands on it."""
    held = db.execute(
        "SELECT 1 FROM sessions WHERE head_turn_id = :turn"
        " UNION ALL SELECT 1 FROM turns WHERE parent_id = :turn",
        {"turn": turn},
    ).fetchone()
    if held is not None:
        db.execute(
            "UPDATE turns SET state = 'interrupted', usage = ? WHERE id = ?", (dump_json({}), turn)
        )
        return
    for message, content in db.execute(
        "SELECT id, content FROM messages WHERE turn_id = ?", (turn,)
    ).fetchall():
        unindex(db, message, content)
    db.execute("DELETE FROM turns WHERE id = ?", (turn,))


def copies(db: sqlite3.Connection, turn_id: int) -> list[int]:
    """The turns of the same chat that are copies of this one, or that it is a copy of."""
    rows = db.execute(
        "WITH RECURSIVE tree(id) AS (VALUES(:root)"
        "  UNION SELECT t.id FROM turns t JOIN tree ON t.parent_id = tree.id)"
        " SELECT o.id FROM turns t"
        " JOIN messages m ON m.turn_id = t.id AND m.role = 'user' AND m.content <> ''"
        " JOIN turns o ON o.created_at = t.created_at AND o.id IN (SELECT id FROM tree)"
        " JOIN messages n ON n.turn_id = o.id AND n.role = 'user' AND n.content = m.content"
        " WHERE t.id = :turn AND o.id <> t.id ORDER BY o.id",
        {"turn": turn_id, "root": path_ids(db, turn_id)[0]},
    )
    return [row[0] for row in rows]


def summaries_of(db: sqlite3.Connection, turn_id: int) -> list[int]:
    """The summaries behind a turn that stand for it."""
    rows = db.execute(
        "WITH RECURSIVE behind(id) AS ("
        "  SELECT id FROM turns WHERE parent_id = :turn"
        # No UNION ALL: a damaged file may go round.
        "  UNION SELECT t.id FROM turns t JOIN behind b ON t.parent_id = b.id)"
        " SELECT m.turn_id FROM messages m WHERE m.role = 'summary'"
        " AND m.turn_id IN (SELECT id FROM behind)"
        " AND EXISTS (SELECT 1 FROM forgets f, json_each(f.op, '$.turns') n"
        "  WHERE f.at_turn_id = m.turn_id AND f.policy = 'summarize'"
        "  AND n.value = (SELECT depth FROM turns WHERE id = :turn)) ORDER BY m.turn_id",
        {"turn": turn_id},
    )
    return [row[0] for row in rows]
