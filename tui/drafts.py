"""What was typed and not sent: a small file for each chat, beside chat.db. Knows files; no widget.

Two terminals may show one chat: each writes what was changed there only, and the last one wins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_NEW = "new."
"""Chats that have no id yet, by the process that shows one: `new.4711`."""


class Drafts:
    """Texts by the id of their chat; "" is one that was never sent to.

    Args:
        folder: Where they outlive the process, readable by the owner alone; or None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, str] = {}
        """What was read or written last, by chat."""
        self._lock = threading.Lock()

    def load(self, chat_id: str) -> str:
        """The draft of a chat. That of a new chat is taken over from a process that has ended."""
        with self._lock:
            if self._folder is None:
                return self._known.get(chat_id, "")
            path = self._path(chat_id)
            if not chat_id and not path.exists():
                _take_over(self._folder, path)
            self._known[chat_id] = text = _read(path)
            return text

    def keep(self, before: str, chat_id: str, text: str) -> None:
        """Save the draft of a chat that may have got its id since, and was `before` then."""
        if before != chat_id:
            self.save(before, "")
        self.save(chat_id, text)

    def save(self, chat_id: str, text: str) -> None:
        """Keep a draft; an empty one goes. What cannot be written is kept in memory alone."""
        text = text.encode("utf-8", "replace").decode()
        with self._lock, suppress(OSError):
            before = self._known.get(chat_id, "")
            self._known[chat_id] = text
            if text == before or self._folder is None:
                return
            path = self._path(chat_id)
            if text:
                _write(path, text)
            elif _read(path) == before:  # else it is what another terminal holds
                path.unlink(missing_ok=True)

    def sweep(self, exists: Callable[[str], bool]) -> None:
        """Delete the drafts of chats that are gone, and what a killed process was writing."""
        if self._folder is None or not self._folder.is_dir():
            return
        names = [path.name for path in self._folder.iterdir() if not path.name.startswith(_NEW)]
        delete_drafts(
            self._folder,
            [
                name
                for name in names
                if not (_runs(name[1:-4]) if name.startswith(".") else exists(name))
            ],
        )

    def _path(self, chat_id: str) -> Path:
        assert self._folder is not None
        return self._folder / (chat_id or f"{_NEW}{os.getpid()}")


def delete_drafts(folder: Path, chat_ids: Iterable[str]) -> None:
    """Delete the drafts of chats that are deleted."""
    for chat_id in chat_ids:
        with suppress(OSError):
            (folder / chat_id).unlink(missing_ok=True)


def _take_over(folder: Path, path: Path) -> None:
    """Make the newest draft of a new chat whose process has ended one of this process."""
    left = [each for each in folder.glob(f"{_NEW}*") if not _runs(each.name.removeprefix(_NEW))]
    with suppress(OSError):  # another process was faster
        max(left, key=lambda each: each.stat().st_mtime_ns, default=path).rename(path)


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = path.with_name(f".{os.getpid()}.tmp")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text.encode("utf-8"))
    beside.replace(path)
