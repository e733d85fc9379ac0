"""SQLite connections as both stores use them, and what their errors mean.

Knows no table. Three rules live here: no transaction that was not asked for, BEGIN IMMEDIATE before
every write, errors told apart by their code.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

BUSY_TIMEOUT_MS = 5000

Fault = Literal["busy", "full", "damaged", "readonly", "io", "other"]

_FAULTS: dict[int, Fault] = {
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_NOTADB: "damaged",
    sqlite3.SQLITE_FORMAT: "damaged",
    sqlite3.SQLITE_READONLY: "readonly",
    sqlite3.SQLITE_PERM: "readonly",
    sqlite3.SQLITE_CANTOPEN: "io",
    sqlite3.SQLITE_IOERR: "io",
}


class Connection(sqlite3.Connection):
    """A connection whose every error is an `sqlite3.Error`.

    A message about a damaged schema quotes names from the file; if those are no UTF-8, Python
    raises UnicodeDecodeError in place of the error.
    """

    def execute(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*args)
        except UnicodeDecodeError as error:
            raise _damaged() from error

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().executemany(*args)
        except UnicodeDecodeError as error:
            raise _damaged() from error

    def executescript(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().executescript(*args)
        except UnicodeDecodeError as error:
            raise _damaged() from error


def _damaged() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("malformed database schema, with names that are no UTF-8")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def fault(error: sqlite3.Error) -> Fault:
    """What kind of trouble an error is."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is None:
        # Python itself raises this one, for text in the file that is no UTF-8.
        return "damaged" if "decode to UTF-8" in str(error) else "other"
    if code == sqlite3.SQLITE_IOERR_WRITE:
        return "full"  # a quota and RLIMIT_FSIZE look like this, not like SQLITE_FULL
    return _FAULTS.get(code & 0xFF, "other")


def connect(
    path: Path | None, *, read_only: bool = False, immutable: bool = False
) -> sqlite3.Connection:
    """A connection to an existing file, or to a new one in memory (None).

    It starts no transaction of its own and may be handed from thread to thread under a lock.

    Args:
        path: The file.
        read_only: Never write.
        immutable: Nobody else writes either: how a WAL file in a read-only folder can be read.
    """
    uri = "file::memory:" if path is None else path.absolute().as_uri()
    mode = "memory" if path is None else "ro" if read_only else "rw"
    connection = sqlite3.connect(
        f"{uri}?mode={mode}{'&immutable=1' if immutable else ''}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        factory=Connection,
        timeout=BUSY_TIMEOUT_MS / 1000,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Generator[None]:
    """Run the body in one transaction: all of it is committed, or none.

    Args:
        connection: With `isolation_level=None` and no transaction open.
        kind: IMMEDIATE to write, DEFERRED to read several times from one state. A deferred one
            that writes after reading would fail as busy at once, whatever the time-out.
    """
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk has rolled it back already; a COMMIT that found the file busy has not.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def versions(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """application_id, user_version and the number of tables: the first look at a file.

    Call it inside a transaction, or another process may change the file between the three.
    """
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return _pragma(connection, "application_id"), _pragma(connection, "user_version"), tables


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]
