"""What trees gained that were run before anybody had seen them, and what such steps took. Knows
tokens and milliseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

KEPT, TRIES = 64, 8
"""Steps that are remembered, and how many of them give an expectation."""
RECENT, TIMED = 9, 3
"""Whole steps whose time is remembered, and how many of them tell it."""
AGES = 64
"""Steps without others after which the oldest time of one with others is forgotten."""
UNKNOWN = 2.0
"""Tokens of such a step before anything is known."""


class UnseenTrees:
    """Steps that ran such a tree with nothing beside it."""

    def __init__(self) -> None:
        self._gained: deque[int] = deque(maxlen=KEPT)
        self._reach: dict[int, float] = {}
        self._times = {beside: deque[float](maxlen=RECENT) for beside in (False, True)}
        self._alone = 0
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

    def took(self, ms: float, *, beside: bool) -> None:
        """A whole step, the host's part too, took so long; with others beside the tree or not.

        What was slow once is tried again in the end: else the first steps of a size, in which a
        device makes it ready, would be the last.
        """
        self._times[beside].append(ms)
        self._alone = 0 if beside else self._alone + 1
        if self._alone >= AGES and self._times[True]:
            self._times[True].popleft()
            self._alone = 0

    @property
    def slower(self) -> float | None:
        """Time of a step with others over that of one without; None until both are known.

        Each is the shortest of the last few: what held a step up says nothing of the next.
        """
        if min(map(len, self._times.values())) < TIMED:
            return None
        return min(self._times[True]) / max(min(self._times[False]), 1e-9)

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
