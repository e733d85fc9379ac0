"""A disk that fails: a connection whose n-th statement raises, in any of the ways SQLite knows."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

KINDS = {
    "full": (sqlite3.SQLITE_FULL, "database or disk is full"),
    "I/O": (sqlite3.SQLITE_IOERR_FSYNC, "disk I/O error"),
    "busy": (sqlite3.SQLITE_BUSY, "database is locked"),
    "short read": (sqlite3.SQLITE_IOERR_SHORT_READ, "disk I/O error"),
}


@dataclass(slots=True)
class Countdown:
    """Statements that still succeed, over all connections that share it.

    After those each one fails, or with `once` the next one alone.
    """

    left: int
    kind: str = "I/O"
    once: bool = False

    @property
    def struck(self) -> bool:
        return self.left < 0

    def count(self) -> None:
        self.left -= 1
        if self.left == -1 or (self.struck and not self.once):
            code, message = KINDS[self.kind]
            error = sqlite3.OperationalError(message)
            error.sqlite_errorcode = code
            raise error


class Faulty:
    """A connection under a countdown. ROLLBACK always works."""

    def __init__(self, real: Any, countdown: Countdown) -> None:
        self.real, self.countdown = real, countdown

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if not statement.startswith("ROLLBACK"):
            self.countdown.count()
        return self.real.execute(statement, *values)

    def executemany(self, *args: Any) -> Any:
        self.countdown.count()
        return self.real.executemany(*args)

    def executescript(self, script: str) -> Any:
        self.countdown.count()
        return self.real.executescript(script)
