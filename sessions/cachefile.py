"""`kv.db` as something that can break at any time: a connection that writes, one that reads, and
what to do when either fails.

Knows faults, the budget and when pages were last used. Knows no page. Reading that fails is a miss;
writing that fails is tried once more where that can help, and then saving ends for this run.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from chatkv.errors import StoreBusy, StoreError
from sessions import eviction
from sessions.database import fault, transaction
from sessions.locks import locked
from sessions.pagefile import NoPageFile, PageFile, open_page_file, set_aside

T = TypeVar("T")

VACUUM_FREE_BYTES = 256 << 20
"""The file gives space back when more than this is free in it, and a quarter of it."""
VACUUM_STEP_BYTES = 8 << 20


class CacheFile:
    """The file with its connections. Made without an error: without a file, everything is a miss.

    Args:
        path: Where it is, or will be.
        limit_bytes: The budget, in bytes of the file that hold something.
    """

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.saving = False
        """Whether anything is still written in this run."""
        self.evicted = 0
        """Pages evicted in this run."""
        self.notices: deque[str] = deque()
        self._on_fresh: Callable[[sqlite3.Connection], None] | None = None
        # Taken in this order, never the other way round.
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._use_lock = threading.Lock()
        self._clock = 0
        self._used: dict[bytes, int] = {}
        self._file: PageFile | None = None
        self.salt = secrets.token_bytes(32)
        """Part of every key; kept in the file, so that only pages of this store are found."""
        self._open(None)
        if self._file is not None:
            self.salt = self._file.salt

    @property
    def is_open(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def on_fresh(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Do this now, and again in every file that takes the place of this one."""
        self._on_fresh = work
        with suppress(StoreError):  # it is in the notices
            self.save(work, None)

    def ask(self, work: Callable[[sqlite3.Connection], T], default: T) -> T:
        """The answer of the reading connection; `default` when it has none."""
        with self._read_lock:
            file = self._file
            if file is None:
                return default
            try:
                return work(file.reader)
            except sqlite3.Error as error:
                trouble = error
        if fault(trouble) in ("damaged", "other"):
            self._replace(file, trouble)
        return default

    def save(
        self, work: Callable[[sqlite3.Connection], T], default: T, *, need_bytes: int = 0
    ) -> T:
        """Run `work` in one transaction of the writing connection; `default` when saving is off.

        Makes room before the budget is passed. Tries once more after evicting on a full disk, and
        in a fresh file after damage.

        Args:
            work: May run twice.
            default: The answer when nothing is saved.
            need_bytes: What it will add to the file.

        Raises:
            StoreBusy: Another process is writing; the next call may succeed.
            StoreError: Not saved, and saving is off from now on unless the file was replaced.
        """
        with self._write_lock:
            for again in (True, False):
                file = self._file
                if file is None or not self.saving:
                    return default
                try:
                    if need_bytes and not self._make_room(file, need_bytes):
                        return default
                    with transaction(file.writer):
                        used = self._flush_uses(file.writer)
                        result = work(file.writer)
                except sqlite3.Error as error:
                    kind = fault(error)
                    if again and kind == "full":
                        self._evict_on_full_disk(file, need_bytes, error)
                    elif again and kind in ("damaged", "other"):
                        self._replace(file, error)
                    else:
                        raise self._failed(file, error) from error
                else:
                    self._forget_uses(used)
                    return result
            raise AssertionError("the second try returns or raises")

    def touch(self, keys: Iterable[bytes]) -> int:
        """These pages are used now. Written with the next commit. Returns the use counter."""
        with self._use_lock:
            self._clock += 1
            self._used.update(dict.fromkeys(keys, self._clock))
            return self._clock

    def shrink(self, limit_bytes: int) -> int:
        """Evict until at most `limit_bytes` are used. Returns how many pages. Raises StoreError."""
        with self._write_lock:
            self.save(lambda _: None, None)  # last uses decide what goes
            return self._upkeep(lambda db: self._shrink(db, limit_bytes), 0)

    def purge(self, work: Callable[[sqlite3.Connection], int]) -> int:
        """Remove pages so that their bytes cannot be read from the file any more.

        Also removes a file that was set aside. Returns what `work` does. Raises StoreError.
        """

        def overwrite(db: sqlite3.Connection) -> int:
            db.execute("PRAGMA secure_delete = ON")
            try:
                with transaction(db):
                    gone = work(db)
                # What was evicted before was not overwritten: it leaves with the free pages.
                if not _compact(db):
                    busy = sqlite3.OperationalError("another chatkv is reading its journal")
                    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
                    raise busy
            finally:
                db.execute("PRAGMA secure_delete = FAST")
            return gone

        with self._write_lock:
            if self._file is None or self._file.read_only:
                raise StoreError(
                    f"The pages in {self.path} cannot be removed now.",
                    hint="They are removed at the next start that can write there.",
                )
            gone = self._upkeep(overwrite, 0)
            self.path.with_name(f"{self.path.name}.damaged").unlink(missing_ok=True)
            return gone

    def compact(self) -> None:
        """Give all free space back to the disk, step by step. Raises StoreError."""
        with self._write_lock:
            self._upkeep(_compact, True)

    def end_turn(self) -> None:
        """Checkpoint, give space back, and see that the file is still there.

        A file that was deleted or replaced while open is made, or opened, anew; keys stay good.
        """
        with self._write_lock:
            file = self._file
            if file is None or file.read_only:
                return
            if file.replaced:
                self.notices.append(f"{file.path.name} was removed while open; it is made anew.")
                self._reopen(file)
                return
            with suppress(StoreError):  # it is in the notices
                self.save(lambda _: None, None)
                self._upkeep(_tidy, None)

    def close(self) -> None:
        """Close the file. Whatever is asked later is a miss."""
        with self._write_lock, self._read_lock:
            with suppress(StoreError):
                self.save(lambda _: None, None)
            if self._file is not None:
                self._file.close()
            self._file, self.saving = None, False

    def _upkeep(self, work: Callable[[sqlite3.Connection], T], default: T) -> T:
        """Run `work`, which opens its own transactions, on the writing connection."""
        file = self._file
        if file is None or file.read_only:
            return default
        try:
            return work(file.writer)
        except sqlite3.Error as error:
            raise self._failed(file, error) from error

    def _shrink(self, db: sqlite3.Connection, target_bytes: int) -> int:
        gone = eviction.shrink_to(db, target_bytes)
        self.evicted += gone
        return gone

    def _make_room(self, file: PageFile, need_bytes: int) -> bool:
        """Evict before the budget is passed. False, and saving off, if it cannot fit at all."""
        if eviction.used_bytes(file.writer) + need_bytes <= self.limit_bytes:
            return True
        with transaction(file.writer):
            self._forget_uses(self._flush_uses(file.writer))
        self._shrink(file.writer, min(self.limit_bytes * 9 // 10, self.limit_bytes - need_bytes))
        if eviction.used_bytes(file.writer) + need_bytes <= self.limit_bytes:
            return True
        self.saving = False
        self.notices.append(
            f"Pages are not saved: {need_bytes:,} bytes do not fit the budget of "
            f"{self.limit_bytes:,}."
        )
        return False

    def _evict_on_full_disk(self, file: PageFile, need_bytes: int, error: sqlite3.Error) -> None:
        try:
            used = eviction.used_bytes(file.writer)
            self._shrink(file.writer, used - max(2 * need_bytes, used // 8))
            file.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error:
            raise self._failed(file, error) from error

    def _flush_uses(self, db: sqlite3.Connection) -> dict[bytes, int]:
        """Write when pages were last used: by a counter, since a clock can go back."""
        stored = _stored_clock(db)
        with self._use_lock:
            self._clock = max(self._clock, stored)
            used, clock = dict(self._used), self._clock
        db.execute("UPDATE meta SET value = ? WHERE key = 'clock'", (str(clock),))
        db.executemany(
            "UPDATE pages SET last_used = ? WHERE key = ?",
            [(count, key) for key, count in used.items()],
        )
        return used

    def _forget_uses(self, flushed: dict[bytes, int]) -> None:
        with self._use_lock:
            for key, count in flushed.items():
                if self._used.get(key) == count:
                    del self._used[key]

    def _failed(self, file: PageFile, error: sqlite3.Error) -> StoreError:
        """The error to raise, after doing what has to be done about it."""
        match fault(error):
            case "busy":
                return StoreBusy(
                    f"{self.path} is busy: another chatkv is writing pages.",
                    hint="Nothing is lost; these pages may be computed again.",
                )
            case "damaged" | "other":
                self._replace(file, error)
                message = f"{self.path} was damaged ({error})."
            case "full":
                message = f"Pages are not saved any more: no room for {self.path} ({error})."
                self._stop(message)
            case _:
                message = f"Pages are not saved any more: {self.path}: {error}."
                self._stop(message)
        return StoreError(message, hint="The chat goes on; reopening it will take longer.")

    def _stop(self, message: str) -> None:
        self.saving = False
        self.notices.append(message)

    def _open(self, salt: bytes | None) -> None:
        """Open the file, or go on without one."""
        try:
            self._file = open_page_file(self.path, limit_bytes=self.limit_bytes, salt=salt)
        except NoPageFile as none:
            self._file = None
            self._stop(str(none))
            return
        self.notices += self._file.notices
        self.saving = not self._file.read_only
        stored = self.ask(_stored_clock, 0)
        with self._use_lock:
            self._clock = max(self._clock, stored)

    def _replace(self, file: PageFile, error: sqlite3.Error) -> None:
        """Set a damaged file aside and go on with a fresh one."""
        with self._write_lock, self._read_lock:
            if self._file is not file:
                return
            with suppress(OSError), locked(self.path.with_name(f"{self.path.name}.lock")):
                mine = not file.replaced
                file.close()
                if mine:
                    self.notices.append(set_aside(self.path, str(error)))
            self._reopen(file)

    def _reopen(self, file: PageFile) -> None:
        with self._write_lock, self._read_lock:
            file.close()
            self._file = None
            self._open(self.salt)
            if self._on_fresh is not None:
                self.on_fresh(self._on_fresh)


def _stored_clock(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM meta WHERE key = 'clock'").fetchone()
    if row is None or not str(row[0]).isdecimal():
        raise sqlite3.DatabaseError("its use counter is unreadable")
    return int(row[0])


def _tidy(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    free = db.execute("PRAGMA freelist_count").fetchone()[0]
    total = db.execute("PRAGMA page_count").fetchone()[0]
    size = db.execute("PRAGMA page_size").fetchone()[0]
    if free * size > VACUUM_FREE_BYTES and 4 * free > total:
        # `execute` would free a single page.
        db.executescript(f"PRAGMA incremental_vacuum({VACUUM_STEP_BYTES // size})")


def _compact(db: sqlite3.Connection) -> bool:
    """Free pages leave the file, and the journal is emptied. False if others kept it from that."""
    size = db.execute("PRAGMA page_size").fetchone()[0]
    left = db.execute("PRAGMA freelist_count").fetchone()[0]
    while left:
        db.executescript(f"PRAGMA incremental_vacuum({VACUUM_STEP_BYTES // size})")
        before, left = left, db.execute("PRAGMA freelist_count").fetchone()[0]
        if left >= before:
            break
    return db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
