"""The schema of `chat.db` in numbered steps. A released step is left alone; a change is a new one.

`import sqlite_utils` costs 0.1 to 0.3 s, so it waits until there is something to migrate.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sessions.database import connect, transaction, versions
from sessions.paths import private_file

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID = 0x43484B31

SCHEMA_1 = (
    """\
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID""",
    """\
CREATE TABLE sessions(
  id TEXT PRIMARY KEY,                                 -- random 128 bits, base32; never a path
  title TEXT NOT NULL DEFAULT '', created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
  trashed_at INTEGER,
  head_turn_id INTEGER REFERENCES turns(id),
  forked_from TEXT REFERENCES sessions(id) ON DELETE SET NULL,
  -- JSON: model, policy, sampling; and the ops typed since the last turn
  settings TEXT NOT NULL DEFAULT '{}', pending_ops TEXT NOT NULL DEFAULT '[]') STRICT""",
    """\
CREATE TABLE turns(                                    -- one tree for all; a fork is a sibling
  id INTEGER PRIMARY KEY, parent_id INTEGER REFERENCES turns(id),
  depth INTEGER NOT NULL CHECK(depth >= 0),
  session_id TEXT NOT NULL REFERENCES sessions(id),    -- owner
  state TEXT NOT NULL DEFAULT 'open' CHECK(state IN ('open','done','interrupted','error')),
  pinned INTEGER NOT NULL DEFAULT 0, redacted_at INTEGER, created_at INTEGER NOT NULL,
  sampling TEXT NOT NULL DEFAULT '{}',                 -- JSON: settings and seed
  usage TEXT NOT NULL DEFAULT '{}',                    -- JSON: what the reply cost
  CHECK((parent_id IS NULL) = (depth = 0))) STRICT""",
    "CREATE INDEX turns_parent ON turns(parent_id)",
    "CREATE INDEX turns_session ON turns(session_id)",
    """\
CREATE TABLE messages(
  id INTEGER PRIMARY KEY, turn_id INTEGER NOT NULL REFERENCES turns(id) ON DELETE CASCADE,
  seq INTEGER NOT NULL,
  role TEXT NOT NULL CHECK(role IN ('system','user','assistant','tool','summary')),
  content TEXT NOT NULL,
  state TEXT NOT NULL DEFAULT 'done' CHECK(state IN ('partial','done','interrupted','error')),
  meta TEXT NOT NULL DEFAULT '{}', created_at INTEGER NOT NULL, UNIQUE(turn_id, seq)) STRICT""",
    """\
CREATE TABLE renders(                                  -- the exact ids the model is fed
  message_id INTEGER NOT NULL REFERENCES messages(id) ON DELETE CASCADE,
  tok_fp BLOB NOT NULL CHECK(length(tok_fp) = 32),
  token_ids BLOB NOT NULL CHECK(length(token_ids) % 4 = 0),              -- int32 little-endian
  sampled TEXT NOT NULL DEFAULT '[]',                  -- JSON: [start, end) of chosen ids
  PRIMARY KEY(message_id, tok_fp)) STRICT, WITHOUT ROWID""",
    """\
CREATE TABLE forgets(                                  -- append-only
  id INTEGER PRIMARY KEY, at_turn_id INTEGER NOT NULL REFERENCES turns(id) ON DELETE CASCADE,
  policy TEXT NOT NULL, reason TEXT NOT NULL, op TEXT NOT NULL, num_tokens INTEGER NOT NULL,
  cancels INTEGER REFERENCES forgets(id) ON DELETE CASCADE,
  receipt TEXT NOT NULL DEFAULT '{}', created_at INTEGER NOT NULL) STRICT""",
    "CREATE INDEX forgets_turn ON forgets(at_turn_id)",
    """\
CREATE TABLE purges(id INTEGER PRIMARY KEY,            -- pages still to be removed from kv.db
  tok_fp BLOB NOT NULL, token_ids BLOB NOT NULL, keep_tokens INTEGER NOT NULL,
  ops TEXT NOT NULL DEFAULT '[]', created_at INTEGER NOT NULL) STRICT""",
    """\
CREATE VIRTUAL TABLE messages_fts USING fts5(content, content='messages', content_rowid='id', \
tokenize='trigram')""",
)


def m001_conversations(db: Database) -> None:
    """Schema 1: sessions, turns, messages, ids, forget records, search."""
    for statement in SCHEMA_1:
        db.conn.execute(statement)


# What has a change of ids as NEW or OLD counts its turn anew. Of a message with the ids of several
# tokenizers the longest count. When a turn goes its messages are gone before their ids are.
_COUNT = """\
CREATE TRIGGER renders_{event} AFTER {when} ON renders BEGIN
  DELETE FROM turn_tokens WHERE turn_id = (
    SELECT turn_id FROM messages WHERE id = {row}.message_id);
  INSERT INTO turn_tokens SELECT m.turn_id, coalesce(sum((
      SELECT max(length(r.token_ids)) / 4 FROM renders r WHERE r.message_id = m.id)), 0)
    FROM messages m WHERE m.turn_id = (SELECT turn_id FROM messages WHERE id = {row}.message_id)
    GROUP BY m.turn_id;
END"""

SCHEMA_2 = (
    """\
CREATE TABLE turn_tokens(                              -- for lists of chats; kept by triggers
  turn_id INTEGER PRIMARY KEY REFERENCES turns(id) ON DELETE CASCADE,
  num_tokens INTEGER NOT NULL) STRICT""",
    """\
INSERT INTO turn_tokens SELECT m.turn_id, coalesce(sum((
    SELECT max(length(r.token_ids)) / 4 FROM renders r WHERE r.message_id = m.id)), 0)
  FROM messages m GROUP BY m.turn_id""",
    _COUNT.format(event="added", when="INSERT", row="NEW"),
    _COUNT.format(event="changed", when="UPDATE OF token_ids", row="NEW"),
    _COUNT.format(event="removed", when="DELETE", row="OLD"),
)


def m002_turn_tokens(db: Database) -> None:
    """Schema 2: how many tokens a turn has, which a list would count for all turns of all chats."""
    for statement in SCHEMA_2:
        db.conn.execute(statement)


STEPS: tuple[Callable[[Database], None], ...] = (m001_conversations, m002_turn_tokens)


def newest_version() -> int:
    """The `user_version` this chatkv writes: one for each step."""
    return len(STEPS)


def migrate(connection: sqlite3.Connection, path: Path | None) -> None:
    """Bring a store up to date in one transaction. Nothing happens if it is.

    An older store is copied to `chat.db.bak-<version>` first.

    Args:
        connection: No transaction open.
        path: Where the store is; None for one in memory.
    """
    with transaction(connection, "DEFERRED"):
        if versions(connection)[1] >= newest_version():
            return
    from sqlite_utils import Database, Migrations

    connection.execute("PRAGMA page_size = 4096")
    with transaction(connection):
        # Of several first starts one migrates; the others waited for it here.
        version = versions(connection)[1]
        if version >= newest_version():
            return
        if version > 0 and path is not None:
            with_backup = path.with_name(f"{path.name}.bak-{version}")
            reader = connect(path, read_only=True)
            try:
                backup(reader, with_backup)
            finally:
                reader.close()
        steps = Migrations("chatkv.sessions")
        for step in STEPS:
            steps()(step)
        # Plugins of sqlite-utils that happen to be installed have no business on our connection.
        steps.apply(Database(connection, execute_plugins=False))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {newest_version()}")


def backup(source: sqlite3.Connection, target: Path) -> None:
    """Copy a live store to `target` (0600), replacing it when the copy is whole."""
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    private_file(part)
    copy = connect(part)
    try:
        source.backup(copy)
    finally:
        copy.close()
    os.replace(part, target)
