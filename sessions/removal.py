"""Deleting a conversation (T8): what no other needs goes, what others share finds a new owner.

Runs inside the caller's transaction. Knows the tree of turns, the token logs beside the file, and
what `kv.db` has to be told; never opens `kv.db` itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sessions.chains import restarted
from sessions.columns import dump_json, pack_ids, unpack_ids
from sessions.logfile import erase_turns, turn_key
from sessions.tree import load_turns, now_ms, path_ids, unindex

_KEPT = """
WITH RECURSIVE kept(id) AS (
  SELECT head_turn_id FROM sessions WHERE id <> :s AND head_turn_id IS NOT NULL
  UNION SELECT id FROM turns WHERE session_id <> :s
  UNION SELECT t.parent_id FROM turns t JOIN kept k ON t.id = k.id WHERE t.parent_id IS NOT NULL)
"""

_NEW_OWNERS = """
WITH RECURSIVE path(id, owner) AS (
  SELECT head_turn_id, id FROM sessions WHERE id <> :s AND head_turn_id IS NOT NULL
  UNION SELECT id, session_id FROM turns WHERE session_id <> :s
  UNION SELECT t.parent_id, p.owner FROM turns t JOIN path p ON t.id = p.id
  WHERE t.parent_id IS NOT NULL)
UPDATE turns SET session_id = (SELECT min(owner) FROM path WHERE path.id = turns.id)
WHERE session_id = :s
"""


@dataclass(frozen=True, slots=True)
class _Removed:
    """The ids of one removed path, as they were put before the model."""

    tok_fp: bytes
    token_ids: tuple[int, ...]
    ops: list[object]


def remove_session(db: sqlite3.Connection, session_id: str) -> int:
    """Delete a session and what only it needs, its ids in token logs too.

    Returns the number of `purges` rows written. Raises StoreError if a log cannot be changed.
    """
    marks = {"s": session_id}
    db.execute("UPDATE sessions SET head_turn_id = NULL WHERE id = :s", marks)
    doomed = [
        row[0]
        for row in db.execute(
            f"{_KEPT} SELECT id FROM turns WHERE session_id = :s"
            " AND id NOT IN (SELECT id FROM kept) ORDER BY id",
            marks,
        )
    ]
    removed = _removed_paths(db, doomed)
    erase_from_logs(db, doomed)
    for message_id, content in db.execute(
        "SELECT id, content FROM messages WHERE turn_id IN (SELECT value FROM json_each(?))",
        (dump_json(doomed),),
    ).fetchall():
        unindex(db, message_id, content)
    db.execute(
        f"{_KEPT} DELETE FROM turns WHERE session_id = :s AND id NOT IN (SELECT id FROM kept)",
        marks,
    )
    db.execute(_NEW_OWNERS, marks)
    db.execute(  # forks of a fork stay in their chat
        "UPDATE sessions SET forked_from = (SELECT forked_from FROM sessions WHERE id = :s)"
        " WHERE forked_from = :s",
        marks,
    )
    db.execute("DELETE FROM sessions WHERE id = :s", marks)
    return sum(_add_purge(db, path) for path in removed)


def rebuild_index(db: sqlite3.Connection) -> None:
    """Make the search index anew: deleting from it may leave words behind."""
    db.execute("INSERT INTO messages_fts(messages_fts) VALUES('rebuild')")


def erase_from_logs(db: sqlite3.Connection, doomed: Sequence[int]) -> None:
    """Gone from the logs before they are gone from here; a rollback costs the log some turns."""
    (_, _, file) = db.execute("PRAGMA database_list").fetchone()
    if not file or not doomed:
        return
    rows = db.execute(
        "SELECT id, created_at FROM turns WHERE id IN (SELECT value FROM json_each(?))",
        (dump_json(doomed),),
    )
    erase_turns(Path(file).resolve().parent, [turn_key(*row) for row in rows])


def _removed_paths(db: sqlite3.Connection, doomed: Sequence[int]) -> list[_Removed]:
    """One entry for each removed leaf and tokenizer: all ids from the root on."""
    parents = {
        row[0]
        for row in db.execute(
            "SELECT parent_id FROM turns WHERE id IN (SELECT value FROM json_each(?))",
            (dump_json(doomed),),
        )
    }
    removed: list[_Removed] = []
    for last in load_turns(db, doomed):
        if last.turn.id in parents and last.shown:
            continue
        # A turn without a reply was shown to the model at the end of its own path only.
        path = load_turns(db, path_ids(db, last.turn.id))
        path = [*(turn for turn in path[:-1] if turn.shown), path[-1]]
        messages = [message for turn in path for message in turn.messages]
        ops: list[object] = [forget.op for turn in path for forget in turn.forgets]
        for tok_fp in sorted({r.tok_fp for message in messages for r in message.renders}):
            ids: list[int] = []
            for message in messages:
                render = message.render(tok_fp)
                if render is None:
                    break  # the model never saw more of it under this tokenizer
                ids += render.token_ids
            if ids:
                removed.append(_Removed(tok_fp, tuple(ids), ops))
            removed += [_Removed(tok_fp, other, ops) for other, _ in restarted(path, tok_fp)]
    return removed


def _add_purge(db: sqlite3.Connection, path: _Removed) -> int:
    """Write what `kv.db` must forget of `path`, if anything. Runs when the turns are gone."""
    keep = _shared_tokens(db, path)
    if keep == len(path.token_ids):
        return 0
    db.execute(
        "INSERT INTO purges(tok_fp, token_ids, keep_tokens, ops, created_at) VALUES(?, ?, ?, ?, ?)",
        (path.tok_fp, pack_ids(path.token_ids), keep, dump_json(path.ops), now_ms()),
    )
    return 1


def _shared_tokens(db: sqlite3.Connection, path: _Removed) -> int:
    """How many leading ids some other conversation still begins with.

    Two chats with one system prompt share pages though no turn of theirs is shared. Purging those
    would leave all other chats without the start of their chain.
    """
    best = 0
    columns = "id, state <> 'done' OR redacted_at IS NOT NULL"
    roots = db.execute(f"SELECT {columns} FROM turns WHERE depth = 0")
    frontier = [(turn_id, doubtful, 0) for turn_id, doubtful in roots]
    while frontier:
        turn_id, doubtful, before = frontier.pop()
        turn = load_turns(db, [turn_id])[0] if doubtful else None
        passed = turn is not None and not turn.shown  # those behind it do not see it
        offset, complete = before, True
        if turn is None or turn.turn.redacted_at is None:
            offset, complete = _along(db, turn_id, path, before)
            best = max(best, offset)
        if complete or passed:
            start = before if passed else offset
            children = db.execute(f"SELECT {columns} FROM turns WHERE parent_id = ?", (turn_id,))
            frontier += [(child, maybe, start) for child, maybe in children]
    return best


def _along(db: sqlite3.Connection, turn_id: int, path: _Removed, offset: int) -> tuple[int, bool]:
    """How far the ids of a turn follow `path` from `offset` on, and whether all of them do."""
    for (blob,) in db.execute(
        "SELECT r.token_ids FROM messages m LEFT JOIN renders r"
        " ON r.message_id = m.id AND r.tok_fp = ? WHERE m.turn_id = ? ORDER BY m.seq",
        (path.tok_fp, turn_id),
    ).fetchall():
        ids = () if blob is None else unpack_ids(blob)
        same = _common(ids, path.token_ids[offset : offset + len(ids)])
        offset += same
        if blob is None or same < len(ids):
            return offset, False
    return offset, True


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine != other:
            return index
    return min(len(left), len(right))
