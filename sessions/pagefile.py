"""The file `kv.db`: its schema, opening and making it, and setting a damaged one aside.

Knows connections, salt and inode. Knows no page. The file is a cache: whatever is wrong with it,
there is a fresh one or none, and never an error that reaches the chat.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from chatkv.errors import StoreError
from sessions.database import connect, fault, transaction, versions
from sessions.locks import locked
from sessions.paths import private_file, private_folder, writable

APPLICATION_ID = 0x43484B32
VERSION = 2
"""Of the tables. 2 added `pages.head_crc`, and dropped what nobody wrote. An older file's pages are
computed again."""
PAGE_BYTES = 65536
"""Of SQLite's pages; the file grows in these."""

SCHEMA = (
    """\
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID""",
    """\
CREATE TABLE models(
  fp BLOB PRIMARY KEY CHECK(length(fp) = 32), identity TEXT NOT NULL, codec TEXT NOT NULL,
  page_tokens INTEGER NOT NULL CHECK(page_tokens > 0), num_layers INTEGER NOT NULL,
  num_kv_heads INTEGER NOT NULL, head_dim INTEGER NOT NULL, created_at INTEGER NOT NULL)
  STRICT, WITHOUT ROWID""",
    """\
CREATE TABLE roots(                                    -- first parent key of each (model, salt)
  key BLOB PRIMARY KEY CHECK(length(key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE, salt_id TEXT NOT NULL)
  STRICT, WITHOUT ROWID""",
    """\
CREATE TABLE pages(
  id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE CHECK(length(key) = 32),
  parent_key BLOB NOT NULL CHECK(length(parent_key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE,
  chain_index INTEGER NOT NULL, first_position INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL CHECK(num_tokens > 0),
  token_ids BLOB NOT NULL CHECK(length(token_ids) = 4 * num_tokens),
  sampled BLOB NOT NULL CHECK(length(sampled) = (num_tokens + 7) / 8),   -- one bit an id
  origin TEXT NOT NULL CHECK(origin IN ('step','chunk','mixed')),
  head_crc INTEGER NOT NULL,                           -- of key || index || position || origin
  crc INTEGER NOT NULL,                                -- of key || payload
  num_bytes INTEGER NOT NULL, last_used INTEGER NOT NULL,
  quarantined TEXT                                     -- the reason, or NULL
  ) STRICT""",
    "CREATE INDEX pages_parent ON pages(parent_key)",
    "CREATE INDEX pages_lru ON pages(last_used, chain_index)",
    """\
CREATE TABLE page_data(
  page_id INTEGER PRIMARY KEY REFERENCES pages(id) ON DELETE CASCADE, data BLOB NOT NULL) STRICT""",
    """\
CREATE TABLE chain_ops(                                -- links that hold no tokens (forgets)
  key BLOB PRIMARY KEY CHECK(length(key) = 32),
  parent_key BLOB NOT NULL CHECK(length(parent_key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE, op TEXT NOT NULL)
  STRICT, WITHOUT ROWID""",
    "CREATE INDEX chain_ops_parent ON chain_ops(parent_key)",
    """\
CREATE TABLE snapshots(                                -- the end of a turn: a witness
  head_key BLOB PRIMARY KEY CHECK(length(head_key) = 32),
  model_fp BLOB NOT NULL REFERENCES models(fp) ON DELETE CASCADE,
  num_tokens INTEGER NOT NULL,
  logits_hash BLOB NOT NULL CHECK(length(logits_hash) = 16),
  top_ids BLOB NOT NULL CHECK(length(top_ids) = 32),
  top_values BLOB NOT NULL CHECK(length(top_values) = 32),
  backend TEXT NOT NULL, created_at INTEGER NOT NULL) STRICT, WITHOUT ROWID""",
)

WRITE_FORMAT = 2
"""Of the header: a journal is 1, WAL is 2."""


@dataclass(slots=True)
class PageFile:
    """An open `kv.db`: one connection writes, one reads, each for one thread at a time."""

    path: Path
    writer: sqlite3.Connection
    reader: sqlite3.Connection
    inode: tuple[int, int]
    salt: bytes
    notices: list[str]
    """What has to be said once: set aside, no WAL."""
    read_only: bool = False

    @property
    def replaced(self) -> bool:
        """Whether the path names another file by now, or none."""
        return _inode(self.path) != self.inode

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


class NoPageFile(Exception):
    """Pages cannot be kept in this run; the text says why. Never leaves `sessions`."""


def open_page_file(path: Path, *, limit_bytes: int, salt: bytes | None = None) -> PageFile:
    """Open `kv.db`, or make a fresh one if there is none, an older one, or a damaged one.

    Args:
        path: The file. A folder without a `chat.db` is marked as a cache for backup programs.
        limit_bytes: The budget; SQLite itself refuses to grow past it by more than an eighth.
        salt: For a fresh file, so that keys that live in memory stay good; None is a new one.

    Raises:
        NoPageFile: It is a newer chatkv's, or can neither be made nor read.
    """
    try:
        if path.exists() and not writable(path):
            return _open_read_only(path)
        private_folder(path.parent)
        _mark_cache(path.parent)
        notices: list[str] = []
        # One at a time, or two that find damage would set the other's fresh file aside.
        with locked(path.with_name(f"{path.name}.lock")):
            for _ in range(2):
                private_file(path)
                try:
                    return _open(path, limit_bytes, salt, notices)
                except sqlite3.Error as error:
                    if fault(error) not in ("damaged", "other") and not _forbids_writing(path):
                        raise
                    notices.append(set_aside(path, str(error)))
            return _open(path, limit_bytes, salt, notices)
    except StoreError as error:
        raise NoPageFile(f"Pages are not kept: {error.message}") from error
    except (OSError, sqlite3.Error) as error:
        raise NoPageFile(f"Pages are not kept: {path}: {error}.") from error


def _forbids_writing(path: Path) -> bool:
    """Whether the header asks SQLite for a format that may only be read: nobody writes such files,
    so a bit of it is wrong."""
    with path.open("rb") as file:
        header = file.read(20)
    return header[:16] == b"SQLite format 3\0" and header[18] > WRITE_FORMAT


def set_aside(path: Path, why: str) -> str:
    """Rename a damaged file to `kv.db.damaged`, the one that is kept. Returns the notice."""
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    _drop_journals(path)
    return f"{path.name} was damaged ({why}) and set aside as {aside.name}: pages are made anew."


def _open(path: Path, limit_bytes: int, salt: bytes | None, notices: list[str]) -> PageFile:
    writer = connect(path)
    try:
        with transaction(writer, "DEFERRED"):
            application, version, tables = versions(writer)
        if application == APPLICATION_ID and version > VERSION:
            raise NoPageFile(
                f"{path} was written by a newer chatkv (schema {version}, this one knows "
                f"{VERSION}). It is left alone, and pages are not kept in this run."
            )
        if application == APPLICATION_ID and version < VERSION:
            writer.close()
            path.unlink()
            _drop_journals(path)
            private_file(path)
            writer = connect(path)
        elif application != APPLICATION_ID and (application or version or tables):
            raise sqlite3.DatabaseError("not a page file")
        # Both only act before the first table.
        writer.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        if writer.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            writer.execute("PRAGMA journal_mode = DELETE")
            notices.append(f"{path.name} is on a file system without WAL: saving pages is slower.")
        _tune(writer, limit_bytes)
        found = _make(writer, salt or secrets.token_bytes(32))
        reader = connect(path)
        _tune(reader, limit_bytes)
        return PageFile(path, writer, reader, _inode(path), found, notices)
    except BaseException:  # a Ctrl-C too: nobody holds what would close it
        writer.close()
        raise


def _tune(connection: sqlite3.Connection, limit_bytes: int) -> None:
    for pragma in (
        "synchronous = NORMAL",
        "secure_delete = FAST",
        "mmap_size = 0",
        "cache_size = -8192",
        "wal_autocheckpoint = 1024",
        "journal_size_limit = 67108864",
        "foreign_keys = ON",
        f"max_page_count = {limit_bytes * 9 // 8 // PAGE_BYTES + 64}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _make(connection: sqlite3.Connection, salt: bytes) -> bytes:
    """Make the tables if there are none. Returns the salt of the file."""
    with transaction(connection):
        if versions(connection)[1] == 0:
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES('salt', ?), ('clock', '0')", (salt.hex(),))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        return _salt(connection)


def _salt(connection: sqlite3.Connection) -> bytes:
    row = connection.execute("SELECT value FROM meta WHERE key = 'salt'").fetchone()
    try:
        return bytes.fromhex(row[0])
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError("its salt is unreadable") from error


def _open_read_only(path: Path) -> PageFile:
    """Pages are restored from it and none are saved."""
    immutable = (
        not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    )
    reader = connect(path, read_only=True, immutable=immutable)
    try:
        with transaction(reader, "DEFERRED"):
            application, version, _ = versions(reader)
            if (application, version) != (APPLICATION_ID, VERSION):
                raise NoPageFile(f"{path} can only be read, and is not of this chatkv.")
            salt = _salt(reader)
        notice = f"{path} can only be read: stored pages are used, new ones are not saved."
        writer = connect(path, read_only=True, immutable=immutable)
        return PageFile(path, writer, reader, _inode(path), salt, [notice], read_only=True)
    except BaseException:  # a Ctrl-C too: nobody holds what would close it
        reader.close()
        raise


def _inode(path: Path) -> tuple[int, int]:
    try:
        info = path.stat()
    except OSError:
        return (0, 0)
    return info.st_dev, info.st_ino


def _drop_journals(path: Path) -> None:
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _mark_cache(folder: Path) -> None:
    """Tell backup programs to leave the folder out, unless conversations are in it."""
    tag = folder / "CACHEDIR.TAG"
    if not tag.exists() and not (folder / "chat.db").exists():
        tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n# Pages of chatkv.\n")
