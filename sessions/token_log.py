"""The token log of stored conversations, as the engine's process keeps and reads it.

Implements `chatkv.spec.token_log.TokenLog`. Knows `chat.db` (it reads what is finished there) and
the log beside it. One mechanism makes the log, adds to it and repairs it: what `chat.db` has and
the log has not is appended. Deletion is in `removal.py`, inside the transaction that deletes.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from chatkv.errors import StoreError
from chatkv.spec.token_log import BARRIER, GIVEN, ID_MASK, TokenIndex
from sessions.columns import dump_json
from sessions.database import connect, transaction
from sessions.logfile import KEPT_WORDS, TOP, TURN_WORDS, BadLog, LogFile, Turn, log_path, turn_key
from sessions.records import RenderRow

BATCH_TURNS = 64
"""Turns that are added while `chat.db` is locked once."""

_FINISHED = """
SELECT t.id, t.created_at, total(length(r.token_ids)) / 4
FROM turns t JOIN messages m ON m.turn_id = t.id
JOIN renders r ON r.message_id = m.id AND r.tok_fp = :tok_fp
WHERE t.id > :after AND t.depth > 0 AND t.state <> 'open' AND t.redacted_at IS NULL
GROUP BY t.id ORDER BY t.id DESC
"""
_RENDERS = """
SELECT t.id, t.created_at, r.message_id, r.tok_fp, r.token_ids, r.sampled
FROM turns t JOIN messages m ON m.turn_id = t.id
JOIN renders r ON r.message_id = m.id AND r.tok_fp = :tok_fp
WHERE t.id IN (SELECT value FROM json_each(:ids)) AND t.state <> 'open'
AND t.redacted_at IS NULL ORDER BY t.id, m.seq
"""


class StoredLog:
    """The log beside a `chat.db`. Made without an error: without a usable file it is empty.

    `look` does the work; `start` has a thread do it, at once and after each `poke`.

    Args:
        chat_db: The conversations.
        tok_fp: Of the tokenizer whose ids are wanted.
    """

    def __init__(self, chat_db: Path, tok_fp: bytes) -> None:
        # Where the file really is: that is where a deletion looks.
        self.path = log_path(chat_db.resolve().parent, tok_fp)
        self._chat_db, self._tok_fp = chat_db, tok_fp
        self._notices: list[str] = []
        self._file: LogFile | None = None
        self._db: sqlite3.Connection | None = None
        self._off = False
        self._turns: dict[Turn, tuple[int, int]] = {}
        """What the log holds, as of `_stop` words and `_changes` changes."""
        self._stop = 0
        self._changes: int | None = None
        self._synced = False
        self._after = 0
        """Turns up to this id are finished, and in the log if they fit."""
        self._index: tuple[LogFile, int, TokenIndex] | None = None
        """What `now` gives as long as the file has seen no more changes."""
        self._wake, self._closing = threading.Event(), False
        self._thread: threading.Thread | None = None

    def now(self) -> TokenIndex | None:
        """Any thread may ask; it costs one read of four bytes."""
        index = self._index
        if index is None or index[0].changes() != index[1]:
            return None
        return index[2]

    def start(self) -> None:
        """Keep it up to date in a thread."""
        self._thread = threading.Thread(target=self._run, name="token-log", daemon=True)
        self._thread.start()
        self.poke()

    def poke(self) -> None:
        """Something may have changed."""
        self._wake.set()

    def take_notices(self) -> list[str]:
        """What the user should see once."""
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        """End the thread and close the files."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
            if self._thread.is_alive():
                return  # it ends with the process
        self._index = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._db is not None:
            self._db.close()
            self._db = None

    def look(self) -> None:
        """Bring the log up to date with `chat.db`, and the index with the log. Raises nothing."""
        if self._off:
            return
        try:
            with suppress(sqlite3.Error):  # busy, most likely: the next look comes soon
                self._catch_up()
            self._publish()
        except (BadLog, OSError, StoreError) as error:
            self._index, self._off = None, True
            self._notices.append(f"Drafts do not copy from other chats in this run: {error}")

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closing:
                return
            self.look()

    # Everything up to `_publish` holds the write lock of chat.db.

    def _catch_up(self) -> None:
        """Append the finished turns that the log has not; at first also drop what is gone."""
        if self._db is None:
            self._db = connect(self._chat_db)
        with transaction(self._db):
            file = self._opened()
            if not self._synced:
                alive = self._db.execute(
                    "SELECT id, created_at FROM turns WHERE redacted_at IS NULL"
                )
                gone = self._turns.keys() - {turn_key(*row) for row in alive}
                if gone:
                    file.erase(gone)
                    self._refresh(file)
            missing, after = self._missing(self._db)
        for first in range(0, len(missing), BATCH_TURNS):
            with transaction(self._db):
                self._refresh(file)
                self._add(self._db, file, missing[first : first + BATCH_TURNS])
        self._synced, self._after = True, after

    def _opened(self) -> LogFile:
        """The file as it is now, empty if it is missing or bad."""
        if self._file is not None and not self._file.is_current:
            self._index = None
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = LogFile(self.path, self._tok_fp)
            self._stop, self._changes = 0, None
        file = self._file
        try:
            self._refresh(file)
        except BadLog as bad:
            self._notices.append(f"The token log for drafts is made anew from the chats: {bad}.")
            file.restart()
            self._refresh(file)
        return file

    def _refresh(self, file: LogFile) -> None:
        """See what others wrote. Raises BadLog."""
        stop, changes = file.head()
        if changes != self._changes:
            self._turns, self._stop = {}, 0
            self._synced, self._after = False, 0
        self._turns |= file.turns(self._stop)
        self._stop, self._changes = stop, changes

    def _missing(self, db: sqlite3.Connection) -> tuple[list[int], int]:
        """Ids of turns to append, ascending, and what `_after` is once that is done."""
        missing: list[int] = []
        left = KEPT_WORDS
        for turn_id, created_at, size in db.execute(
            _FINISHED, {"tok_fp": self._tok_fp, "after": self._after}
        ):
            left -= TURN_WORDS + int(size)
            if left < 0:
                break
            if turn_key(turn_id, created_at) not in self._turns:
                missing.append(turn_id)
        (last,) = db.execute(
            "SELECT coalesce((SELECT min(id) - 1 FROM turns WHERE state = 'open'),"
            " (SELECT max(id) FROM turns), 0)"
        ).fetchone()
        return missing[::-1], last

    def _add(self, db: sqlite3.Connection, file: LogFile, turn_ids: Sequence[int]) -> None:
        """Append turns; what was deleted meanwhile is not there any more."""
        found: dict[Turn, list[int]] = {}
        for turn_id, created_at, *render in db.execute(
            _RENDERS, {"tok_fp": self._tok_fp, "ids": dump_json(turn_ids)}
        ):
            found.setdefault(turn_key(turn_id, created_at), []).extend(_words(render))
        for turn, words in found.items():
            if turn not in self._turns:
                file.append(turn, words)

    # Reading: no lock.

    def _publish(self) -> None:
        """Index what came to the log, or all of it if something was changed."""
        file = self._file
        if file is None:
            return
        try:
            stop, changes = file.head()
            known = self._index
            index = TokenIndex() if known is None or known[1] != changes else known[2]
            raw = file.read(len(index), stop)
        except BadLog:  # another process is at it
            self._index = None
            return
        words = np.frombuffer(raw, np.uint32).copy()
        words[words >= TOP] = BARRIER
        if file.changes() == changes:
            index.extend(words)
            self._index = file, changes, index


def _words(render: Sequence[object]) -> list[int]:
    """The ids of a message, those marked that the model did not choose; none of a bad row."""
    try:
        row = RenderRow.of(render)
    except StoreError:
        return []
    if not all(0 <= token < ID_MASK for token in row.token_ids):
        return []
    words = [token | GIVEN for token in row.token_ids]
    for start, stop in row.sampled:
        words[start:stop] = row.token_ids[start:stop]
    return words
