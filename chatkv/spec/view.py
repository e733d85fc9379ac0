"""Ids of a sequence for those who may only look. Knows one list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload


class TokenView(Sequence[int]):
    """A list of ids as it grows; nobody can change it through this.

    Args:
        ids: The list itself, not copied.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)
