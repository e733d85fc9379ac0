"""Conversations laid into rows of equal length. Knows token ids; no model.

A conversation is never cut: rows hold whole ones, and what is left over is padding.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chatkv.spec.train.shards import Conversation

OPEN_ROWS = 64
"""Rows that are filled at once; more waste less and take longer."""


@dataclass(frozen=True, slots=True)
class Packed:
    """[R, T] each."""

    ids: npt.NDArray[np.int32]
    documents: npt.NDArray[np.int32]
    """Number of the conversation within the row, from 1; 0 is padding."""
    positions: npt.NDArray[np.int32]
    written: npt.NDArray[np.bool_]
    """Ids the model wrote as part of an answer."""

    def part(self, first: int, stop: int) -> Packed:
        """Some of the rows."""
        rows = slice(first, stop)
        return Packed(
            self.ids[rows], self.documents[rows], self.positions[rows], self.written[rows]
        )


def pack(conversations: Sequence[Conversation], width: int, seed: int = 0) -> Packed:
    """Lay conversations into rows, in random order; those longer than a row are left out."""
    order = list(range(len(conversations)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for at in order:
        size = len(conversations[at].ids)
        if size > width:
            continue
        fitting = [place for place, (room, _) in enumerate(open_rows) if room >= size]
        if fitting:
            # The tightest fit.
            place = min(fitting, key=lambda p: open_rows[p][0])
            room, row = open_rows.pop(place)
        else:
            room, row = width, []
            rows.append(row)
            if len(open_rows) == OPEN_ROWS:
                open_rows.pop(min(range(OPEN_ROWS), key=lambda p: open_rows[p][0]))
        row.append(at)
        open_rows.append((room - size, row))
    shape = (len(rows), width)
    packed = Packed(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.bool_),
    )
    for row, members in enumerate(rows):
        start = 0
        for number, at in enumerate(members, 1):
            done = conversations[at]
            stop = start + len(done.ids)
            packed.ids[row, start:stop] = done.ids
            packed.documents[row, start:stop] = number
            packed.positions[row, start:stop] = np.arange(len(done.ids))
            for a, b in done.answers:
                packed.written[row, start + a : start + b] = True
            start = stop
    return packed
