"""Ops: what of a path the model no longer sees, and from which id on. Plain numbers, no pages.

A place is the index of an id in its path, forgotten ones counted. Everything here is a pure
function of ids and ops, so a resume comes to the state that a live conversation had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Op:
    """From the id at `at` on, the ids of `drop` are out of sight.

    Raises:
        ValueError: The ranges are empty, overlap, fall, or reach past `at`.
    """

    at: int
    """Place of the first id that is computed without them."""
    drop: tuple[Range, ...] = ()
    """Half-open ranges of places."""
    rebase: bool = False
    """Close all gaps: positions of what is left become 0, 1, 2, ..."""
    restart: bool = False
    """Compute what is left anew, as if nothing had ever stood between."""

    def __post_init__(self) -> None:
        edge = 0
        for start, stop in self.drop:
            if not edge <= start < stop:
                raise ValueError(f"Ranges {self.drop} of an op are empty, overlap or fall.")
            edge = stop
        if edge > self.at:
            raise ValueError(f"An op at {self.at} drops up to {edge}.")

    @property
    def num_tokens(self) -> int:
        """Ids that go out of sight."""
        return size_of(self.drop)

    def to_json(self) -> dict[str, Any]:
        """As it is stored and hashed; what is false is left out."""
        data: dict[str, Any] = {"at": self.at, "drop": [list(pair) for pair in self.drop]}
        if self.rebase:
            data["rebase"] = True
        if self.restart:
            data["restart"] = True
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Op:
        """The inverse of `to_json`. Raises ValueError on anything else."""
        try:
            extra = set(data) - {"at", "drop", "rebase", "restart"}
            numbers = [data["at"], *(edge for pair in data["drop"] for edge in pair)]
            flags = [data.get("rebase", False), data.get("restart", False)]
            if extra or not all(type(n) is int for n in numbers):
                raise ValueError(f"{dict(data)} is no op.")
            if not all(type(flag) is bool for flag in flags):
                raise ValueError(f"{dict(data)} is no op.")
            drop = tuple((start, stop) for start, stop in data["drop"])
            return Op(numbers[0], drop, *flags)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{data!r} is no op.") from error


def check_ops(ops: Sequence[Op], num_ids: int) -> None:
    """Refuse ops that do not fit each other or the path.

    Raises:
        ValueError: They fall, reach past the path, or drop an id twice.
    """
    before = 0
    for op in ops:
        if not before <= op.at <= num_ids:
            raise ValueError(f"An op at {op.at} behind one at {before}, in {num_ids} ids.")
        before = op.at
    dropped = sorted(pair for op in ops for pair in op.drop)
    for (_, stop), (start, _) in pairwise(dropped):
        if start < stop:
            raise ValueError(f"The id at {start} is dropped twice.")


def live_ranges(ops: Sequence[Op], num_ids: int) -> list[Range]:
    """What the model sees of the first `num_ids` ids when it computes the next, as few ranges."""
    live: list[Range] = [(0, num_ids)] if num_ids else []
    for op in ops:
        if op.at <= num_ids:
            live = without(live, op.drop)
    return live


def num_live(ops: Sequence[Op], num_ids: int) -> int:
    """How many of the first `num_ids` ids the model sees when it computes the next."""
    return num_ids - sum(op.num_tokens for op in ops if op.at <= num_ids)


def next_position(ops: Sequence[Op], num_ids: int) -> int:
    """Position of the id at `num_ids`: its place, less what rebases and restarts closed."""
    shift = dropped = 0
    for op in ops:
        if op.at <= num_ids:
            dropped += op.num_tokens
            shift = dropped if op.rebase or op.restart else shift
    return num_ids - shift


def without(ranges: Sequence[Range], drop: Sequence[Range]) -> list[Range]:
    """`ranges` less what `drop` covers. Both rise."""
    left: list[Range] = []
    for start, stop in ranges:
        for gone, end in drop:
            if end <= start or gone >= stop:
                continue
            if start < gone:
                left.append((start, gone))
            start = max(start, end)
        if start < stop:
            left.append((start, stop))
    return left


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Rising ranges, those that touch made one, empty ones left out."""
    result: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if result and result[-1][1] >= start:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def size_of(ranges: Sequence[Range]) -> int:
    """Ids in ranges that do not overlap."""
    return sum(stop - start for start, stop in ranges)
