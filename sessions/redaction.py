"""Redacting turns: the model and every stored page lose them, at a purge the store too.

Runs inside the caller's transaction. Knows the tree of turns, the token logs beside the file, and
what `kv.db` has to be told; never opens `kv.db` itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from sessions.columns import dump_json, pack_ids
from sessions.records import SessionRow, TurnPath
from sessions.removal import erase_from_logs
from sessions.tree import SESSION, get_turn, load_turns, now_ms, path_ids, unindex

_BEHIND = """
WITH RECURSIVE behind(id) AS (
  SELECT value FROM json_each(:turns)
  UNION SELECT t.id FROM turns t JOIN behind b ON t.parent_id = b.id)
"""


def versions(db: sqlite3.Connection, turn_ids: Sequence[int]) -> list[int]:
    """These turns and those beside them with the same prompt: other replies to it.

    Raises UnknownSession.
    """
    found: list[int] = []
    for turn_id in turn_ids:
        get_turn(db, turn_id)
        rows = db.execute(
            "SELECT o.id FROM turns t JOIN messages m ON m.turn_id = t.id AND m.role = 'user'"
            " JOIN turns o ON o.parent_id = t.parent_id"
            " JOIN messages n ON n.turn_id = o.id AND n.role = 'user' AND n.content = m.content"
            " WHERE t.id = ? AND m.content <> '' ORDER BY o.id",
            (turn_id,),
        )
        found += [turn_id, *(row[0] for row in rows)]
    return list(dict.fromkeys(found))


def sharers(db: sqlite3.Connection, turn_ids: Sequence[int], *, but: str) -> list[SessionRow]:
    """The other sessions whose path goes through one of these turns."""
    rows = db.execute(
        f"{_BEHIND} SELECT {SESSION} FROM sessions"
        " WHERE id <> :but AND head_turn_id IN (SELECT id FROM behind) ORDER BY rowid",
        {"turns": dump_json(turn_ids), "but": but},
    )
    return [SessionRow.of(row) for row in rows.fetchall()]


def redact(db: sqlite3.Connection, turn_ids: Sequence[int], *, purge: bool) -> None:
    """Mark turns as redacted, write down which pages must go, take their ids out of token logs.

    Args:
        db: In a transaction.
        turn_ids: Which; none of them the system prompt.
        purge: Blank their text and ids as well.

    Raises:
        UnknownSession: One of them is gone.
        StoreError: A log cannot be changed.
    """
    for turn_id in turn_ids:
        path = load_turns(db, path_ids(db, turn_id))
        for tok_fp in sorted({r.tok_fp for m in path[-1].messages for r in m.renders}):
            _add_purge(db, path, tok_fp)
    erase_from_logs(db, turn_ids)
    turns = dump_json(turn_ids)
    db.execute(
        "UPDATE turns SET redacted_at = :now"
        " WHERE id IN (SELECT value FROM json_each(:turns)) AND redacted_at IS NULL",
        {"turns": turns, "now": now_ms()},
    )
    if purge:
        _blank(db, turns)


def _add_purge(db: sqlite3.Connection, path: Sequence[TurnPath], tok_fp: bytes) -> None:
    """Write that pages past the beginning of the last turn must go, with all behind them.

    Whoever else begins with the same ids computes them again: no page that saw them stays.
    """
    before, own = list[int](), list[int]()
    for turn in path:
        last = turn is path[-1]
        if not turn.shown and not last:
            continue  # the model does not see it, or not any more
        for message in turn.messages:
            render = message.render(tok_fp)
            if render is None and not last:
                return  # under this tokenizer the model never came so far
            (own if last else before).extend(() if render is None else render.token_ids)
    db.execute(
        "INSERT INTO purges(tok_fp, token_ids, keep_tokens, ops, created_at)"
        " VALUES(?, ?, ?, '[]', ?)",
        (tok_fp, pack_ids([*before, *own]), len(before), now_ms()),
    )


def _blank(db: sqlite3.Connection, turns: str) -> None:
    """Text and ids of these turns, and what was measured about forgetting behind them."""
    marks = {"turns": turns}
    among = "turn_id IN (SELECT value FROM json_each(:turns))"
    for message_id, content in db.execute(
        f"SELECT id, content FROM messages WHERE {among}", marks
    ).fetchall():
        unindex(db, message_id, content)
        db.execute("INSERT INTO messages_fts(rowid, content) VALUES(?, '')", (message_id,))
    db.execute(
        f"DELETE FROM renders WHERE message_id IN (SELECT id FROM messages WHERE {among})", marks
    )
    db.execute(f"UPDATE messages SET content = '', meta = '{{}}' WHERE {among}", marks)
    db.execute(
        f"{_BEHIND} UPDATE forgets SET receipt = '{{}}' WHERE at_turn_id IN"
        " (SELECT id FROM behind)",
        marks,
    )
