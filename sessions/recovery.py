"""Copies of `chat.db`: a checked backup of a good one, and what can be read of a damaged one.

Knows the tables by the form of their rows, and how a tree of turns with holes becomes whole. The
file that is copied is only read; a copy appears under its name when it is whole and checked.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from chatkv.errors import StoreError, UsageError
from sessions import recovery_tree
from sessions.database import connect, transaction
from sessions.migrations import migrate
from sessions.paths import private_file
from sessions.recovery_pages import PAGE_BYTES, PageReader, page_bytes_of
from sessions.recovery_tree import Salvage
from sessions.storefile import StoreFile

TABLES = ("sessions", "turns", "messages", "renders", "forgets", "purges")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What came out of a damaged store."""

    pages: int
    unreadable_pages: int
    read: dict[str, int]
    """Rows by table."""
    lost: dict[str, int]
    """Rows by table that are known to be missing; more may be."""


def backup(store: StoreFile, target: Path, *, force: bool = False) -> dict[str, int]:
    """Copy a store that others may write to meanwhile, and check the copy.

    Args:
        store: The store.
        target: The copy (0600).
        force: Replace `target` if it exists.

    Returns:
        Rows by table, and `bytes`.

    Raises:
        UsageError: `target` exists, or is the store itself.
        StoreError: The store is damaged, or the copy cannot be written.
    """
    assert store.file is not None
    with _new_file(store.file, target, force=force) as part:
        store.backup(part)
        with closing(connect(part, read_only=True)) as copy:
            wrong = [row[0] for row in copy.execute("PRAGMA integrity_check(3)")]
            if wrong != ["ok"]:
                raise StoreError(
                    f"{store.file} is damaged ({wrong[0]}); no backup was made of it.",
                    hint="Keep it, and save what can be read: chatkv recover.",
                )
            made = {
                name: copy.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in TABLES
            }
        return {**made, "bytes": part.stat().st_size}


def recover(damaged: Path, target: Path, *, force: bool = False) -> Recovered:
    """Write what can be read of `damaged` to a new store.

    Args:
        damaged: Any file; only read.
        target: The new store (0600).
        force: Replace `target` if it exists.

    Raises:
        UsageError: `target` exists, or is `damaged` itself.
        StoreError: `damaged` cannot be opened or holds no row of ours, or `target` cannot be
            written.
    """
    with _new_file(damaged, target, force=force) as part, _opened(damaged, part.parent) as file:
        found, reader = _read(file)
        if not found.sessions and not found.turns and not found.messages:
            raise StoreError(
                f"No row of a chat could be read in {damaged} ({reader.num_pages} pages).",
                hint="Keep the file, and put a backup in its place if there is one.",
            )
        tree = recovery_tree.mended(found)
        private_file(part)
        with closing(connect(part)) as new:
            migrate(new, None)
            with transaction(new):
                recovery_tree.write(new, tree)
            wrong = new.execute("PRAGMA integrity_check(3)").fetchall()
            wrong += new.execute("PRAGMA foreign_key_check").fetchall()
        if wrong != [("ok",)]:
            raise StoreError(f"The new store is not sound: {wrong[0]}.", hint=f"Keep {damaged}.")
        return Recovered(
            reader.num_pages,
            len(reader.unreadable),
            {name: len(getattr(found, name)) for name in TABLES},
            dict(found.lost),
        )


def _read(file: mmap.mmap) -> tuple[Salvage, PageReader]:
    """All rows of ours, with the size of pages that gives more of them."""
    best: tuple[Salvage, PageReader] | None = None
    for size in {page_bytes_of(file[:100]), PAGE_BYTES}:
        reader, found = PageReader(file, size), Salvage()
        for row in reader.rows():
            found.add(row)
        if best is None or len(found.messages) > len(best[0].messages):
            best = found, reader
    assert best is not None
    return best


@contextmanager
def _opened(path: Path, scratch: Path) -> Generator[mmap.mmap]:
    """The bytes of a store as its last commit left them. Raises StoreError."""
    journal = path.with_name(f"{path.name}-journal")
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".recover-") as folder:
        try:
            if journal.is_file() and journal.stat().st_size > 0:
                # A commit was cut short. SQLite undoes it, in a copy.
                copy = Path(shutil.copyfile(path, Path(folder, path.name)))
                shutil.copyfile(journal, Path(folder, journal.name))
                try:
                    with closing(connect(copy)) as opened:
                        opened.execute("SELECT count(*) FROM sqlite_master").fetchone()
                except sqlite3.Error:
                    shutil.copyfile(path, copy)
                path = copy
            with (
                path.open("rb") as file,
                closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data,
            ):
                yield data
        except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
            why = getattr(error, "strerror", None) or "it is empty"
            raise StoreError(f"Cannot read {path}: {why}.", hint="Name another file.") from error


@contextmanager
def _new_file(source: Path, target: Path, *, force: bool) -> Generator[Path]:
    """A place to write to, which gets the name `target` when the body ends without an error."""
    if not source.is_file():
        raise StoreError(f"There is no file {source}.", hint="Name another.")
    reserved = {source.name, *(f"{source.name}-{end}" for end in ("journal", "wal", "shm"))}
    same_folder = target.parent.resolve() == source.parent.resolve()
    if (same_folder and target.name in reserved) or (target.exists() and target.samefile(source)):
        raise UsageError(f"{target} belongs to {source} itself.", hint="Choose another name.")
    exists = UsageError(f"{target} exists.", hint="Choose another name, or add --force.")
    if os.path.lexists(target) and not force:
        raise exists
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent}.", hint="Make it first.")
    try:
        folder = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:100]}-")
    except OSError as error:
        raise StoreError(f"Cannot write to {target.parent}: {error.strerror}.") from error
    part = Path(folder, "chat.db")
    try:
        yield part
        if force:
            os.replace(part, target)
        else:
            os.link(part, target)
    except FileExistsError:
        raise exists from None
    except sqlite3.Error as error:
        raise StoreError(
            f"{target} cannot be written ({error}).", hint="Free some space."
        ) from error
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
