"""Rows of a damaged `chat.db`, told apart by their form, and made a whole tree again.

Knows the tables of schema 1. A turn whose row is lost, and that others refer to, gets a stand-in:
empty and redacted, so that neither a person nor a model takes it for something that was said.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from chatkv.errors import StoreError
from sessions.columns import load_list, load_object, new_id, storable
from sessions.records import ForgetRow, PurgeRow, RenderRow
from sessions.recovery_pages import Row
from sessions.tree import FORGET, MESSAGE, ROLES, SESSION, TURN, now_ms

_TURN_STATES = ("open", "done", "interrupted", "error")
_MESSAGE_STATES = ("partial", "done", "interrupted", "error")

Columns = list[Any]


@dataclass(slots=True)
class Salvage:
    """Rows by their key, each as the columns of its table."""

    sessions: dict[str, Columns] = field(default_factory=dict[str, Columns])
    turns: dict[int, Columns] = field(default_factory=dict[int, Columns])
    messages: dict[int, Columns] = field(default_factory=dict[int, Columns])
    renders: dict[tuple[int, bytes], Columns] = field(
        default_factory=dict[tuple[int, bytes], Columns]
    )
    forgets: dict[int, Columns] = field(default_factory=dict[int, Columns])
    purges: dict[int, Columns] = field(default_factory=dict[int, Columns])
    lost: Counter[str] = field(default_factory=Counter[str])

    def add(self, row: Row) -> None:
        """Keep the row if it is one of ours and makes sense."""
        columns: Columns = [storable(x) if isinstance(x, str) else x for x in row.columns]
        with_id: Columns = [row.rowid, *columns[1:]]
        if (row.rowid is None) == (len(columns) != 4):
            return  # renders are the one table without rowids
        match len(columns), columns[:1]:
            case 9, [str()] if _is_session(columns):
                self.sessions.setdefault(columns[0], columns)
            case 10, [None] if _is_turn(with_id):
                self.turns.setdefault(with_id[0], with_id)
            case 8, [None] if _is_message(with_id):
                self.messages.setdefault(with_id[0], with_id)
                self.lost["texts"] += columns[4] != row.columns[4]
            case 9, [None] if _is_forget(with_id):
                self.forgets.setdefault(with_id[0], with_id)
            case 4, [int()] if _is_render(columns):
                self.renders.setdefault((columns[0], columns[1]), columns)
            case 6, [None] if _is(PurgeRow.of, with_id, int, bytes, bytes, int, str, int):
                self.purges.setdefault(with_id[0], with_id)
            case _:
                pass  # an index, the words of the search, or no row of ours


def _is(check: Callable[[Columns], object], columns: Columns, *kinds: type) -> bool:
    if any(type(column) is not kind for column, kind in zip(columns, kinds, strict=False)):
        return False
    try:
        check(columns)
    except (StoreError, TypeError, ValueError):
        return False
    return True


def _json(load: Callable[[str, str], Any], text: Any, empty: str) -> str:
    """A column of JSON, or an empty one if it is unreadable."""
    try:
        load(text, "")
    except (StoreError, RecursionError):
        return empty
    return text if isinstance(text, str) else empty


def _is_session(row: Columns) -> bool:
    fits = (
        0 < len(row[0]) <= 64
        and type(row[1]) is str
        and all(type(time) is int for time in row[2:4])
        and all(type(value) in (int, type(None)) for value in row[4:6])
        and type(row[6]) in (str, type(None))
    )
    row[7:9] = _json(load_object, row[7], "{}"), _json(load_list, row[8], "[]")
    return fits


def _is_turn(row: Columns) -> bool:
    fits = (
        (row[1] is None or (type(row[1]) is int and row[1] < row[0]))
        and type(row[2]) is int
        and row[2] >= 0
        and (row[1] is None) == (row[2] == 0)
        and type(row[3]) is str
        and row[4] in _TURN_STATES
        and type(row[5]) is int
        and type(row[6]) in (int, type(None))
        and type(row[7]) is int
    )
    row[8:10] = _json(load_object, row[8], "{}"), _json(load_object, row[9], "{}")
    return fits


def _is_message(row: Columns) -> bool:
    fits = (
        type(row[1]) is int
        and type(row[2]) is int
        and row[3] in ROLES
        and type(row[4]) is str
        and row[5] in _MESSAGE_STATES
        and type(row[7]) is int
    )
    row[6] = _json(load_object, row[6], "{}")
    return fits


def _is_forget(row: Columns) -> bool:
    return (
        _is(ForgetRow.of, row, int, int, str, str, str, int)
        and type(row[6]) in (int, type(None))
        and type(row[7]) is str
        and type(row[8]) is int
    )


def _is_render(row: Columns) -> bool:
    return (
        _is(RenderRow.of, row, int, bytes, bytes, str) and len(row[1]) == 32 and not len(row[2]) % 4
    )


def mended(found: Salvage) -> Salvage:
    """`found` with a row for everything that another refers to. Changes and returns it."""
    _drop_strangers(found)
    by_turn: defaultdict[int, list[Columns]] = defaultdict(list)
    for message in found.messages.values():
        by_turn[message[1]].append(message)
    owners: dict[int, str] = {}
    for turn in found.turns.values():
        if turn[1] is not None:
            owners.setdefault(turn[1], turn[3])
    for row in found.sessions.values():
        if row[5] is not None:
            owners.setdefault(row[5], row[0])
    missing = sorted(set(owners) - set(found.turns))
    roots = {turn[3]: turn[0] for turn in found.turns.values() if turn[2] == 0}
    loose = sorted(set(by_turn) - set(found.turns) - set(missing))
    for turn_id in missing:
        owner = owners[turn_id]
        root = _root(found, roots, owner)
        _stand_in(found, turn_id, owner, root if root and root < turn_id else None, by_turn)
        if found.turns[turn_id][1] is None:
            roots[owner] = turn_id
    if loose:
        _collect(found, loose, by_turn)
    _place(found)
    _mend_sessions(found)
    for turn in found.turns.values():
        _count_messages(found, turn, by_turn[turn[0]])
    return found


def _drop_strangers(found: Salvage) -> None:
    """Rows that contradict others go: their own bytes must be what is damaged."""
    seen: set[tuple[int, int]] = set()
    for message in list(found.messages.values()):
        if (key := (message[1], message[2])) in seen:
            del found.messages[message[0]]
            found.lost["messages"] += 1
        seen.add(key)
    for turn in sorted(found.turns.values(), key=lambda row: row[0]):
        parent = found.turns.get(turn[1] or 0)
        if parent is not None and parent[2] + 1 != turn[2]:
            del found.turns[turn[0]]
    orphans = [key for key in found.renders if key[0] not in found.messages]
    for key in orphans:
        del found.renders[key]
    found.lost["renders"] += len(orphans)


def _root(found: Salvage, roots: dict[str, int], owner: str) -> int | None:
    """The first turn of the chat that a session is part of."""
    seen: set[str] = set()
    while owner not in roots and owner in found.sessions and owner not in seen:
        seen.add(owner)
        owner = found.sessions[owner][6] or owner
    return roots.get(owner)


def _stand_in(
    found: Salvage,
    turn_id: int,
    owner: str,
    parent: int | None,
    by_turn: dict[int, list[Columns]],
) -> None:
    """A row for a turn whose own is lost; what was said in it is kept if it is there."""
    now = now_ms()
    if parent is None and not by_turn.get(turn_id):
        # Every path begins with a system prompt, empty or not.
        message_id = max(found.messages, default=0) + 1
        found.messages[message_id] = [message_id, turn_id, 0, "system", "", "done", "{}", now]
        by_turn[turn_id] = [found.messages[message_id]]
    redacted_at = None if by_turn.get(turn_id) else now
    found.turns[turn_id] = [turn_id, parent, 0, owner, "error", 0, redacted_at, now, "{}", "{}"]
    found.lost["turns"] += 1


def _collect(found: Salvage, loose: Iterable[int], by_turn: dict[int, list[Columns]]) -> None:
    """A chat of its own for what nothing else refers to, in the order it was said."""
    now, owner = now_ms(), new_id()
    found.sessions[owner] = [owner, "recovered", now, now, None, None, None, "{}", "[]"]
    before = None
    for turn_id in loose:
        _stand_in(found, turn_id, owner, before, by_turn)
        before = turn_id
    found.sessions[owner][5] = before


def _place(found: Salvage) -> None:
    """Depths from parents: a stand-in may stand higher than the turn that is lost."""
    for turn_id in sorted(found.turns):
        turn = found.turns[turn_id]
        turn[2] = 0 if turn[1] is None else found.turns[turn[1]][2] + 1


def _mend_sessions(found: Salvage) -> None:
    """Every owner is there, every head is a turn, every chat comes from one that is there."""
    newest: dict[str, int] = {}
    for turn in found.turns.values():
        newest[turn[3]] = max(turn[0], newest.get(turn[3], 0))
    for owner, head in newest.items():
        if owner not in found.sessions:
            now = now_ms()
            found.sessions[owner] = [owner, "recovered", now, now, None, head, None, "{}", "[]"]
            found.lost["sessions"] += 1
    for row in found.sessions.values():
        if row[5] not in found.turns:
            row[5] = newest.get(row[0])
        if row[6] not in found.sessions or row[6] == row[0]:
            row[6] = None
    lost: list[int] = []
    for forget_id, forget in sorted(found.forgets.items()):
        cancels = forget[6]
        if forget[1] not in found.turns or not (cancels is None or cancels in found.forgets):
            lost.append(forget_id)  # a recall of nothing must not become a forget
    for forget_id in lost:
        del found.forgets[forget_id]
    for forget_id in [k for k, row in found.forgets.items() if row[6] in lost]:
        del found.forgets[forget_id]
    found.lost["forgets"] += len(lost)


def _count_messages(found: Salvage, turn: Columns, messages: list[Columns]) -> None:
    roles = {message[3] for message in messages}
    wanted = {"system"} if turn[2] == 0 else {"user"}
    if turn[2] and turn[4] == "done" and "summary" not in roles:
        wanted.add("assistant")
    if turn[6] is None:
        found.lost["messages"] += len(wanted - roles)
        if wanted - roles and turn[2]:
            turn[4] = "error"


def write(db: sqlite3.Connection, tree: Salvage) -> None:
    """Put mended rows into an empty store, inside the caller's transaction."""
    db.execute("PRAGMA defer_foreign_keys = ON")
    for table, columns, rows in (
        ("sessions", SESSION, tree.sessions.values()),
        ("turns", TURN, (tree.turns[turn_id] for turn_id in sorted(tree.turns))),
        ("messages", MESSAGE, tree.messages.values()),
        ("renders", "message_id, tok_fp, token_ids, sampled", tree.renders.values()),
        ("forgets", FORGET, tree.forgets.values()),
        ("purges", "id, tok_fp, token_ids, keep_tokens, ops, created_at", tree.purges.values()),
    ):
        marks = ", ".join("?" * len(columns.split(",")))
        db.executemany(f"INSERT INTO {table}({columns}) VALUES({marks})", rows)
    db.execute("INSERT INTO messages_fts(messages_fts) VALUES('rebuild')")
