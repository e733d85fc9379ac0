"""What trees gained that were run before anybody had seen them. Knows counts of tokens alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

KEPT, TRIES = 64, 8
"""Steps that are remembered, and how many of them give an expectation."""
UNKNOWN = 2.0
"""Tokens of such a step before anything is known."""


class UnseenTrees:
    """Steps that ran such a tree with nothing beside it."""

    def __init__(self) -> None:
        self._gained: deque[int] = deque(maxlen=KEPT)
        self._reach: dict[int, float] = {}
        self.tokens = UNKNOWN
        """Expected of a step."""

    @property
    def is_known(self) -> bool:
        """Whether there were enough of them."""
        return len(self._gained) >= TRIES

    def add(self, *tokens: int) -> None:
        """Steps gained so many tokens each."""
        self._gained.extend(tokens)
        count = len(self._gained)
        self.tokens = sum(self._gained) / count if count else UNKNOWN
        self._reach = {
            depth: sum(gained > depth for gained in self._gained) / count
            for depth in range(1, max(self._gained, default=1))
        }

    def clear(self) -> None:
        """What they gained before is not how it is now."""
        self._gained.clear()
        self.add()

    def gains(self, chances: Iterable[float], depths: Iterable[int]) -> float:
        """Tokens expected with other guesses beside such a tree over those without: they add those
        that are right where its path has ended.

        Args:
            chances: Of each guess's path.
            depths: From 1 on.
        """
        reach = self._reach
        more = sum(
            chance * (1 - reach.get(depth, 0.0))
            for chance, depth in zip(chances, depths, strict=True)
        )
        return 1 + more / self.tokens

    def to_json(self) -> list[int]:
        """All that is remembered."""
        return list(self._gained)

    def recall(self, known: Sequence[int]) -> None:
        """Go on from an earlier run."""
        self.add(*map(int, known))
