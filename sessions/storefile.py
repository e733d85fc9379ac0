"""The file `chat.db`: opening it, its lock, and what its errors mean to a person.

Knows SQLite, modes and other processes. Knows no conversation. Every sqlite3 error leaves as a
StoreError with the path and the way out.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from chatkv.errors import SchemaTooNew, StoreBusy, StoreError
from sessions import locks
from sessions.database import connect, fault, transaction, versions
from sessions.migrations import APPLICATION_ID, backup, migrate, newest_version
from sessions.paths import check_private, private_file, private_folder, writable

MEMORY = ":memory:"
"""The path of a store that leaves nothing on disk."""


class StoreFile:
    """One open `chat.db`. Safe to use from several threads.

    A folder or file that cannot be written, and a store of a newer chatkv, are opened for reading:
    `read_only` then says why, and every write raises it.

    Args:
        path: The file; made (0600, its folder 0700) if missing. `:memory:` keeps nothing.
        read_only: Open for reading, whatever the file allows.

    Raises:
        StoreError: Damaged, no store of ours, owned or writable by others, or cannot be made.
        StoreBusy: Another process holds the lock longer than five seconds.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.file = None if path == MEMORY else Path(path)
        self.read_only: StoreError | None = None
        """Why nothing can be written, or None."""
        self._lock = threading.RLock()
        self._writer: locks.WriterClaim | None = None
        with self._translated():
            self._db = self._open(read_only)
            try:
                self._prepare()
            except BaseException:  # a Ctrl-C too: nobody holds what would close it
                self._db.close()
                raise

    def _open(self, read_only: bool) -> sqlite3.Connection:
        if self.file is None:
            return connect(None)
        if read_only or (self.file.exists() and not writable(self.file)):
            if not self.file.exists():
                raise StoreError(
                    f"There is no session store at {self.file}.",
                    hint="Start a conversation first, or choose another folder with --data-dir.",
                )
            check_private(self.file)
            self.read_only = StoreError(
                f"{self.file} can only be read.",
                hint="Make it and its folder writable, choose another folder with --data-dir, "
                "or chat without saving: --ephemeral.",
            )
            return connect(self.file, read_only=True)
        private_folder(self.file.parent)
        private_file(self.file)
        return connect(self.file)

    def _prepare(self) -> None:
        """Check what the file is, then bring it up to date. Writes nothing to what is not ours."""
        with transaction(self._db, "DEFERRED"):
            application, version, tables = versions(self._db)
        if application != APPLICATION_ID and (application or version or tables):
            raise StoreError(
                f"{self.file} is an SQLite file, but no chatkv session store.",
                hint="Nothing was changed. Choose another folder with --data-dir.",
            )
        if version > newest_version():
            self.read_only = SchemaTooNew(
                f"{self.file} was written by a newer chatkv: it has schema {version}, and this one "
                f"knows schemas up to {newest_version()}.",
                hint="Update chatkv to go on with it. Until then it can be read only.",
            )
        if self.read_only is None:
            if self.file is not None:
                self._db.execute("PRAGMA journal_mode = DELETE")
            self._db.execute("PRAGMA synchronous = EXTRA")
            self._db.execute("PRAGMA fullfsync = 1")  # acts on macOS
            self._db.execute("PRAGMA secure_delete = ON")
            migrate(self._db, self.file)
            self._db.execute("PRAGMA foreign_keys = ON")
        elif version < newest_version():
            raise StoreError(
                f"{self.file} has the older schema {version} and cannot be brought up to date: "
                "it can only be read.",
                hint="Make it and its folder writable once.",
            )
        else:
            self._db.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        with self._lock:
            self._db.close()
            if self._writer is not None:
                self._writer.release()
                self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def backup(self, target: Path) -> None:
        """Copy the store to `target`, also while others write to it. Never use `cp` for that."""
        with self._lock, self._translated():
            backup(self._db, target)

    def compact(self) -> None:
        """Write the file anew, without what was deleted: a moved row may leave a copy behind."""
        with self._lock, self._translated():
            self._db.execute("PRAGMA temp_store = MEMORY")
            self._db.execute("VACUUM")

    def check(self) -> list[str]:
        """What is wrong inside the file, in SQLite's words, or nothing. Reads all of it."""
        with self._reading():
            rows = self._db.execute("PRAGMA quick_check").fetchall()
            broken = self._db.execute("PRAGMA foreign_key_check").fetchall()
        found = [row[0] for row in rows if row[0] != "ok"]
        return found + [f"{row[0]} {row[1]} refers to no row of {row[2]}" for row in broken]

    @contextmanager
    def _reading(self) -> Generator[None]:
        """All that the body reads comes from one state of the file."""
        with self._lock, self._translated(), transaction(self._db, "DEFERRED"):
            yield

    @contextmanager
    def _writing(self) -> Generator[None]:
        """All that the body writes is committed when this ends without an error, or nothing is."""
        with self._lock:
            if self.read_only is not None:
                raise type(self.read_only)(self.read_only.message, hint=self.read_only.hint)
            self._writer_id()
            with self._translated(), transaction(self._db):
                yield

    def _writer_id(self) -> str:
        """What an open turn of this process names as its writer."""
        if self.file is None:
            return ""
        if self._writer is None:
            self._writer = locks.WriterClaim(self._claims)
        return self._writer.id

    def _is_alive(self, usage: str) -> bool:
        """Whether the process that the usage of an open turn names still runs."""
        with suppress(ValueError, AttributeError):
            writer = json.loads(usage).get("writer")
            return isinstance(writer, str) and locks.is_alive(self._claims, writer)
        return False

    @property
    def _claims(self) -> Path:
        assert self.file is not None
        return self.file.with_name(f"{self.file.name}-writers")

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            translated = self._explain(error)
            if fault(error) == "damaged":
                self.read_only = translated  # no writing to what may be torn
            raise translated from error

    def _explain(self, error: sqlite3.Error) -> StoreError:
        where = self.file or "The session store in memory"
        match fault(error):
            case "busy":
                others = (
                    [] if self.file is None else locks.owners(self._claims, but=self._own_claim)
                )
                who = f" ({'; '.join(map(str, others))})" if others else ""
                return StoreBusy(
                    f"The session store {where} is busy{who}.",
                    hint="Wait until the other chatkv is done, or end it, and try again.",
                )
            case "full":
                return StoreError(
                    f"Cannot save to {where}: the disk is full ({error}).",
                    hint="Free some space, choose another folder with --data-dir, or chat without "
                    "saving: --ephemeral.",
                )
            case "damaged":
                return StoreError(
                    f"{where} is damaged ({error}). Nothing was changed or deleted.",
                    hint=self._way_out(),
                )
            case "readonly":
                return StoreError(
                    f"{where} cannot be written ({error}).",
                    hint="Make it and its folder writable, or chat without saving: --ephemeral.",
                )
            case "io":
                return StoreError(
                    f"{where} cannot be read or written ({error}).",
                    hint="Check the disk and the folder, or choose another with --data-dir.",
                )
            case "other":
                if isinstance(self.read_only, SchemaTooNew):
                    return self.read_only
                return StoreError(f"{where}: {error}.", hint="Run `chatkv doctor` to check it.")

    @property
    def _own_claim(self) -> str | None:
        return None if self._writer is None else self._writer.id

    def _way_out(self) -> str:
        """What to do about a damaged store; names the newest backup if a migration made one."""
        if self.file is None:
            return "Start again."
        copies = sorted(self.file.parent.glob(f"{self.file.name}.bak-*"))
        instead = f"put {copies[-1]} in its place" if copies else "put a backup in its place"
        return f"Save what can be read: chatkv recover. Or {instead}; keep the damaged one."
