"""A token log on disk: the ids of finished turns, one turn behind the other.

Knows words and the turns they belong to. Knows no database, no index and no torch.

The file is derived from the `chat.db` beside it and may be deleted at any time. Whoever writes to
it holds the write lock of that `chat.db`. Readers take no lock: the header counts changes to what
was there before (appending is none), odd while one is under way. It is read, never mapped: a file
that is cut short under a mapping kills the process.

    header: magic, tokenizer (32 bytes), number of words, number of changes
    turn:   BARRIER, id, time, number of ids (top bit set in each), ids
    filler: BARRIER, where a turn was erased
"""

from __future__ import annotations

import os
import re
import stat
import struct
import sys
from array import array
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from chatkv.errors import StoreError
from sessions.paths import check_private, private_file

Turn: TypeAlias = tuple[int, int]
"""Id and time of making of a turn, as in `chat.db`: ids alone are used again after a deletion."""

BARRIER = 0xFFFFFFFF
TOP = 1 << 31
MAGIC = b"ckvlog1\0"
HEADER = struct.Struct("=8s32sII")
WORD = 4
TURN_WORDS = 4
LIMIT_WORDS = 2_000_000
"""Words of a log; past it the oldest turns go until three quarters are left."""
KEPT_WORDS = LIMIT_WORDS * 3 // 4

_ORDER = sys.byteorder
_CHANGES_AT = HEADER.size - WORD
_FILLER = re.compile(rb"(?:\xff{4})*")


class BadLog(Exception):
    """What is wrong with a log that has to be made anew."""


def log_path(folder: Path, tok_fp: bytes) -> Path:
    """The log of one tokenizer in the folder of a `chat.db`."""
    return folder / f"history-{tok_fp.hex()[:16]}.tokens"


def turn_key(turn_id: int, created_at: int) -> Turn:
    """The name of a turn in a log."""
    return turn_id % TOP, created_at % TOP


class LogFile:
    """One open log.

    Args:
        path: The file; made (0600) if missing.
        tok_fp: Of its tokenizer, 32 bytes; None takes the file's own, and makes none.

    Raises:
        StoreError: It belongs to others or can be written by them, or cannot be made.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, tok_fp: bytes | None) -> None:
        self.path = path
        self._tok_fp = tok_fp
        if tok_fp is None:
            check_private(path)
        else:
            private_file(path)
        if not path.is_file():
            raise StoreError(
                f"{path} is no file.", hint="Delete it; the log is made anew from the chats."
            )
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if tok_fp is not None and not os.fstat(self._fd).st_size:
            self.restart()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def changes(self) -> int | None:
        """Changes so far; odd while one is under way, None when the header is gone. Cheap."""
        try:
            raw = os.pread(self._fd, WORD, _CHANGES_AT)
        except OSError:
            return None
        return int.from_bytes(raw, _ORDER) if len(raw) == WORD else None

    def head(self) -> tuple[int, int]:
        """Words and changes. Raises BadLog."""
        raw = os.pread(self._fd, HEADER.size, 0)
        if len(raw) < HEADER.size:
            raise BadLog("it is cut short")
        magic, tok_fp, words, changes = HEADER.unpack(raw)
        if magic != MAGIC:
            raise BadLog("it is no token log")
        if self._tok_fp is not None and tok_fp != self._tok_fp:
            raise BadLog("it belongs to another tokenizer")
        if changes & 1:
            raise BadLog("a change to it was never finished")
        if words > LIMIT_WORDS or os.fstat(self._fd).st_size < HEADER.size + WORD * words:
            raise BadLog("it is cut short")
        return words, changes

    def read(self, start: int, stop: int) -> bytes:
        """Words as they lie there. Raises BadLog if there are fewer."""
        raw = os.pread(self._fd, WORD * (stop - start), HEADER.size + WORD * start)
        if len(raw) != WORD * (stop - start):
            raise BadLog("it is cut short")
        return raw

    def turns(self, start: int = 0) -> dict[Turn, tuple[int, int]]:
        """Each turn from word `start` on, with the range of words it takes. Raises BadLog."""
        stop, _ = self.head()
        raw = self.read(start, stop)
        words, found, place = array("I", raw), dict[Turn, tuple[int, int]](), 0
        while place < len(words):
            if words[place] != BARRIER:
                raise BadLog("it is damaged")
            if words[place + 1 : place + 2] in (array("I", [BARRIER]), array("I")):
                skipped = _FILLER.match(raw, WORD * place)
                assert skipped is not None
                place = skipped.end() // WORD - (skipped.end() < len(raw))
                continue
            turn_id, created, size = (word - TOP for word in words[place + 1 : place + TURN_WORDS])
            after = place + TURN_WORDS + size
            if min(turn_id, created, size) < 0 or after > len(words):
                raise BadLog("it is damaged")
            found[turn_id, created] = (start + place, start + after)
            place = after
        return found

    def append(self, turn: Turn, words: Sequence[int]) -> None:
        """Add a turn at the end; the oldest ones go where it would not fit.

        Raises OSError, and then nothing was added, and BadLog.
        """
        size = TURN_WORDS + len(words)
        if size > KEPT_WORDS:
            return
        stop, _ = self.head()
        if stop + size > LIMIT_WORDS:
            self.shrink()
            stop, _ = self.head()
        self._tidy(stop)
        header = (BARRIER, TOP | turn[0], TOP | turn[1], TOP | len(words))
        self._write(array("I", (*header, *words)).tobytes(), HEADER.size + WORD * stop)
        self._set_words(stop + size)

    def erase(self, turns: Iterable[Turn]) -> bool:
        """Overwrite turns, and see to it that the disk has it. Returns whether one was there.

        Raises BadLog and OSError.
        """
        stop, _ = self.head()
        known = self.turns()
        doomed = [known[turn] for turn in turns if turn in known]
        self._tidy(stop)
        if doomed:
            with self._changing():
                for begin, end in doomed:
                    self._blank(HEADER.size + WORD * begin, HEADER.size + WORD * end)
        return bool(doomed)

    def shrink(self) -> None:
        """Keep the newest turns, three quarters of the limit, without gaps between them.

        Raises BadLog and OSError.
        """
        stop, _ = self.head()
        kept: list[bytes] = []
        left = KEPT_WORDS
        for _, (begin, end) in sorted(self.turns().items(), reverse=True):
            left -= end - begin
            if left < 0:
                break
            kept.append(self.read(begin, end))
        words = b"".join(reversed(kept))
        with self._changing():
            self._set_words(0)
            self._write(words, HEADER.size)
            self._blank(HEADER.size + len(words), HEADER.size + WORD * stop)
            self._set_words(len(words) // WORD)
        self._tidy(len(words) // WORD)

    def restart(self) -> None:
        """Make it an empty log, whatever it was. Raises OSError."""
        assert self._tok_fp is not None
        # No reader may take it for what it has read.
        changes = int.from_bytes(os.urandom(WORD), _ORDER) & ~1
        with suppress(BadLog):
            self._blank(HEADER.size, HEADER.size + WORD * self.head()[0])
        os.ftruncate(self._fd, 0)
        self._write(HEADER.pack(MAGIC, self._tok_fp, 0, changes), 0)

    @contextmanager
    def _changing(self) -> Generator[None]:
        """While the body runs readers know that something is wrong; after a crash for good."""
        changes = self.changes()
        assert changes is not None
        self._write(struct.pack("=I", changes | 1), _CHANGES_AT)
        yield
        os.fsync(self._fd)
        self._write(struct.pack("=I", (changes + 2) & 0xFFFFFFFE), _CHANGES_AT)

    def _tidy(self, stop: int) -> None:
        """Take away what an interrupted writer left behind the end."""
        end, size = HEADER.size + WORD * stop, os.fstat(self._fd).st_size
        if size > end:
            self._blank(end, min(size, HEADER.size + 2 * WORD * LIMIT_WORDS))
            os.fsync(self._fd)
            os.ftruncate(self._fd, end)

    def _set_words(self, words: int) -> None:
        self._write(struct.pack("=I", words), _CHANGES_AT - WORD)

    def _blank(self, start: int, stop: int) -> None:
        self._write(b"\xff" * (stop - start), start)

    def _write(self, raw: bytes, place: int) -> None:
        while raw:
            done = os.pwrite(self._fd, raw, place)
            raw, place = raw[done:], place + done


def erase_turns(folder: Path, turns: Iterable[Turn]) -> None:
    """Take turns out of every log in the folder of a `chat.db`; the bytes are gone on return.

    A log that cannot be read is deleted: it is made anew from what is stored. What has the name of
    one and is neither a file nor a link, such as a folder, holds no ids and is left alone.

    Raises:
        StoreError: A log can neither be changed nor deleted.
    """
    doomed = list(turns)
    for path in folder.glob("history-*.tokens"):
        if not _holds_ids(path):
            continue
        try:
            file = LogFile(path, None)
            try:
                file.erase(doomed)
            finally:
                file.close()
        except (BadLog, OSError, StoreError):
            try:
                with suppress(OSError):  # cut it short for those who have it open
                    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW))
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(
                    f"{path} holds ids of what is deleted and cannot be changed: {error}.",
                    hint="Make it and its folder writable, or delete the file, and try again.",
                ) from error


def _holds_ids(path: Path) -> bool:
    try:
        return stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFLNK)
    except FileNotFoundError:
        return False
