"""The ids of many conversations and where each run of four occurs. Knows ids; no file, no turn.

`sessions` fills a log from what is stored. A drafter sees `TokenLog` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]

BARRIER = 0xFFFFFFFF
"""Stands between turns and over what was deleted: part of no match and of no guess."""
GIVEN = 1 << 30
"""Bit of an id that a person or the template gave; the model chose the others."""
ID_MASK = GIVEN - 1

KEY = 4
"""Ids that are looked up together."""
PLACES = 4
"""Places kept for each run of ids: the newest."""
LONGEST = 32
"""Ids that are compared backwards."""
BITS = 20
"""The index has 2**BITS rows: 16 MiB once it is full."""

_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


class TokenLog(Protocol):
    """Turns of stored conversations, as far as they may be copied from."""

    def now(self) -> TokenIndex | None:
        """The log as it is now; None when there is nothing to read, or something was deleted and
        the rest has not been read again."""
        ...


class TokenIndex:
    """Ids of turns behind each other, and for each run of four ids its newest places.

    One thread may extend it while another one looks for matches.
    """

    def __init__(self) -> None:
        self._size = 0
        self._words: Words = np.empty(0, np.uint32)
        self._table: Words = np.zeros((0, PLACES), np.uint32)

    def __len__(self) -> int:
        """Words, barriers included."""
        return self._size

    def now(self) -> TokenIndex:
        """A log in memory is its own newest state."""
        return self

    def add(self, given: Sequence[int], sampled: Sequence[int]) -> None:
        """Append one turn: what was given, then what the model chose."""
        turn = [BARRIER, *(token | GIVEN for token in given), *sampled]
        self.extend(np.array(turn, np.uint32))

    def extend(self, words: Words) -> None:
        """Append whole turns: a barrier before each, ids of given tokens marked with `GIVEN`."""
        first, size = self._size, self._size + len(words)
        if size and not len(self._table):
            self._table = np.zeros((1 << BITS, PLACES), np.uint32)  # mapped when it is written
        if size > len(self._words):
            room = np.empty(max(size, 2 * len(self._words), 4096), np.uint32)
            room[:first] = self._words[:first]
            self._words = room
        self._words[first:size] = words
        self._size = size
        self._index(first, size)

    def matches(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Where the newest ids of a conversation occur: (ids that match, place behind them).

        At most four places, newest first; four to 32 ids match.
        """
        if len(tokens) < KEY or not self._size:
            return []
        places: list[int] = self._table[_row(tokens[-KEY:])].tolist()
        if not places[-1]:  # of the newest
            return []
        newest = tokens[-LONGEST:]
        words, found = self._words, list[tuple[int, int]]()
        for place in reversed(places):
            length = 0
            before: list[int] = words[max(0, place - len(newest)) : place].tolist()
            # A barrier, masked, is no token id.
            for theirs, mine in zip(reversed(before), reversed(newest), strict=False):
                if theirs & ID_MASK != mine:
                    break
                length += 1
            if length >= KEY:
                found.append((length, place))
        return found

    def following(self, place: int, count: int) -> list[int]:
        """Up to `count` words from a place on, `GIVEN` bits included, cut at a barrier."""
        words: list[int] = self._words[place : min(place + count, self._size)].tolist()
        return words[: words.index(BARRIER)] if BARRIER in words else words

    def _index(self, first: int, size: int) -> None:
        """Note the runs whose next id, which is what they are looked up for, is new."""
        words = self._words[max(0, first - KEY) : size]
        count = len(words) - KEY
        if count <= 0:
            return
        runs = [words[shift : shift + count] for shift in range(KEY)]
        whole = (np.maximum.reduce([*runs, words[KEY:]]) < BARRIER).nonzero()[0]
        rows = _all_rows([run[whole] & np.uint32(ID_MASK) for run in runs])
        places = (whole + (size - count)).astype(np.uint32)
        order = np.argsort(rows, kind="stable")
        rows, places = rows[order], places[order]
        last = np.flatnonzero(np.append(rows[1:] != rows[:-1], True)) if len(rows) else rows[:0]
        counts = np.diff(last, prepend=-1)
        newer = np.repeat(last, counts) - np.arange(len(rows))
        for rank in reversed(range(PLACES)):
            some = newer == rank
            table, at = self._table, rows[some]
            table[at, :-1] = table[at, 1:]
            table[at, -1] = places[some]


def _row(ids: Sequence[int]) -> int:
    """The row of the index for a run of `KEY` ids."""
    mixed = sum(token * factor for token, factor in zip(ids, _FACTORS, strict=True))
    return (mixed & 0xFFFFFFFF) >> (32 - BITS)


def _all_rows(runs: Sequence[Words]) -> Words:
    """The same for many runs: one array for each of the `KEY` ids."""
    mixed = np.zeros_like(runs[0])
    for ids, factor in zip(runs, _FACTORS, strict=True):
        mixed += ids * np.uint32(factor)  # wraps around
    return mixed >> np.uint32(32 - BITS)
