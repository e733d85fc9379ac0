"""Which processes write to a store: one small file each, locked for as long as the process lives.

Knows flock and nothing of SQLite. The kernel drops the lock of a process that dies, however it
dies, so a claim cannot outlive its owner and a reused process id cannot pass for it. A file system
without flock answers "nobody is alive", which only means that nobody is named.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that may be writing."""

    pid: int
    since_s: int
    """Unix seconds of its first write."""

    def __str__(self) -> str:
        return f"process {self.pid}, since {time.strftime('%H:%M', time.localtime(self.since_s))}"


class WriterClaim:
    """This process's claim in `folder`. Its `id` is what an open turn names as its writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = secrets.token_hex(8)
        self._path = folder / self.id
        self._fd: int | None = None
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            self._fd = self._claim()

    def _claim(self) -> int:
        owner = json.dumps({"pid": os.getpid(), "since": int(time.time())})
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # Someone who looked before the lock was taken has removed the file as a dead one's.
                if self._path.exists() and os.path.samestat(os.fstat(fd), self._path.stat()):
                    os.write(fd, owner.encode())
                    return fd
            except OSError:
                os.close(fd)
                raise
            os.close(fd)

    def release(self) -> None:
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def is_alive(folder: Path, writer: str) -> bool:
    """Whether the process that made the claim `writer` still runs. A dead one's file goes."""
    return bool(writer) and "/" not in writer and _look(folder / writer) is not None


def owners(folder: Path, *, but: str | None = None) -> list[Owner]:
    """Living writers, the claim `but` left out."""
    found: list[Owner] = []
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.name != but and (data := _look(path)):
                with suppress(ValueError, KeyError, TypeError):
                    entry: dict[str, Any] = json.loads(data)
                    found.append(Owner(int(entry["pid"]), int(entry["since"])))
    return found


def _look(path: Path) -> bytes | None:
    """What the living owner of the claim wrote; None if it is gone, and then the file is too."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared, so that two who look at the same time do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return os.read(fd, 1000)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the lock file `path` (made if missing, never removed) while the body runs."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
