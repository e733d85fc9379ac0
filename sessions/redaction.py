"""Redacting turns: the model and every stored page lose them, at a purge the store too.

Runs inside the caller's transaction. Knows the tree of turns, the token logs beside the file, and
what `kv.db` has to be told; never opens `kv.db` itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from sessions.branches import copies, summaries_of
from sessions.chains import restarted
from sessions.columns import dump_json, load_object, pack_ids
from sessions.context import moved, spans_of_path
from sessions.records import SessionRow, TurnPath
from sessions.removal import erase_from_logs
from sessions.tree import SESSION, get_turn, load_turns, now_ms, path_ids, unindex

_BEHIND = """
WITH RECURSIVE behind(id) AS (
  SELECT value FROM json_each(:turns)
  UNION SELECT t.id FROM turns t JOIN behind b ON t.parent_id = b.id)
"""


def versions(db: sqlite3.Connection, turn_ids: Sequence[int]) -> list[int]:
    """These turns and all that say the same: other replies to their prompts, copies of them behind
    a summary, and summaries of them.

    Raises UnknownSession.
    """
    found = dict.fromkeys(turn_ids)
    left = list(found)
    while left:
        turn_id = left.pop(0)
        get_turn(db, turn_id)
        rows = db.execute(
            "SELECT o.id FROM turns t JOIN messages m ON m.turn_id = t.id AND m.role = 'user'"
            " JOIN turns o ON o.parent_id = t.parent_id"
            " JOIN messages n ON n.turn_id = o.id AND n.role = 'user' AND n.content = m.content"
            " WHERE t.id = ? AND m.content <> '' ORDER BY o.id",
            (turn_id,),
        )
        beside = [row[0] for row in rows.fetchall()]
        fresh = {*beside, *copies(db, turn_id), *summaries_of(db, turn_id)} - found.keys()
        found |= dict.fromkeys(sorted(fresh))
        left += sorted(fresh)
    return list(found)


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
    paths = [load_turns(db, path_ids(db, turn_id)) for turn_id in turn_ids]
    for path in paths:
        for tok_fp in sorted({r.tok_fp for m in path[-1].messages for r in m.renders}):
            _add_purge(db, path, tok_fp)
            for ids, keep in _restarts(db, path[-1], tok_fp):
                _insert_purge(db, tok_fp, ids, keep)
    for path in sorted(paths, key=len, reverse=True):  # places before it stay what they are
        _move_ops(db, path)
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
    _insert_purge(db, tok_fp, [*before, *own], len(before))


def _insert_purge(
    db: sqlite3.Connection, tok_fp: bytes, ids: Sequence[int], keep_tokens: int
) -> None:
    db.execute(
        "INSERT INTO purges(tok_fp, token_ids, keep_tokens, ops, created_at)"
        " VALUES(?, ?, ?, '[]', ?)",
        (tok_fp, pack_ids(ids), keep_tokens, now_ms()),
    )


def _restarts(
    db: sqlite3.Connection, turn: TurnPath, tok_fp: bytes
) -> list[tuple[tuple[int, ...], int]]:
    """The chains that restarts behind a turn began with its ids in sight."""
    marks = {"turns": dump_json([turn.turn.id])}
    leaves = db.execute(
        f"{_BEHIND} SELECT b.id FROM behind b"
        " WHERE NOT EXISTS (SELECT 1 FROM turns t WHERE t.parent_id = b.id)",
        marks,
    ).fetchall()
    found: list[tuple[tuple[int, ...], int]] = []
    for (leaf,) in leaves:
        found += restarted(load_turns(db, path_ids(db, leaf)), tok_fp, turn)
    return list(dict.fromkeys(found))


def _move_ops(db: sqlite3.Connection, path: Sequence[TurnPath]) -> None:
    """Forget records that count ids count without those of the last turn from now on.

    The other records name turns, and stay as they are.
    """
    if not path[-1].shown:
        return
    marks = {"turns": dump_json([path[-1].turn.id])}
    for forget_id, text in db.execute(
        f"{_BEHIND} SELECT id, op FROM forgets WHERE at_turn_id IN (SELECT id FROM behind)", marks
    ).fetchall():
        op = load_object(text, f"forget record {forget_id}")
        if "at" not in op:
            continue
        spans = spans_of_path(path, bytes.fromhex(str(op.get("tok_fp", ""))))
        if spans is not None:
            op = moved(op, spans[-1].start, spans[-1].stop)
            db.execute("UPDATE forgets SET op = ? WHERE id = ?", (dump_json(op), forget_id))


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
