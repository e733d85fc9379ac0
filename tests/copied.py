"""What a token log holds, and what it knows behind a text."""

from __future__ import annotations

from array import array

from chatkv.spec.token_log import GIVEN
from sessions import logfile
from sessions.store import ChatStore
from sessions.token_log import StoredLog

FP, OTHER = b"t" * 32, b"u" * 32  # FP is that of the `talk` fixture


def packed(text: str, *, given: bool = False) -> bytes:
    """Ids of a text as they lie in the file."""
    return array("I", [ord(letter) | GIVEN * given for letter in text]).tobytes()


def guesses(log: StoredLog, text: str) -> set[str]:
    """What the log knows behind a text."""
    index = log.now()
    if index is None:
        return set()
    return {
        "".join(chr(word & ~GIVEN) for word in index.following(place, 1000))
        for _, place in index.matches([ord(letter) for letter in text])
    }


def turns_of(store: ChatStore) -> list[tuple[int, int]]:
    return store._db.execute("SELECT id, created_at FROM turns ORDER BY id").fetchall()


def keys_of(store: ChatStore) -> list[logfile.Turn]:
    return [logfile.turn_key(*row) for row in turns_of(store)]
