"""The plain state: guesses were not worth their time, so they are tried only now and then.

Knows counts and milliseconds; no trees and no chances.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN_STREAK = 3
"""Plain decisions in a row that make the plain state."""
FIRST_PROBE, LAST_PROBE = 16, 512
"""Tokens in the plain state until the next probe; doubles each time."""
PROBE_SHARE = 0.005
"""Share of all time that probes may lose."""


class PlainState:
    """How long decoding has been plain, and when the next probe is due."""

    def __init__(self) -> None:
        self._streak, self._interval, self._waited = 0, FIRST_PROBE, 0
        self._lost_ms, self._all_ms = 0.0, 0.0

    @property
    def holds(self) -> bool:
        """Whether the last decisions were all plain."""
        return self._streak >= PLAIN_STREAK

    @property
    def is_due(self) -> bool:
        """Whether it has been long enough for a probe."""
        return self._waited >= self._interval

    @property
    def spare_ms(self) -> float:
        """What a probe may lose; below zero after one that lost more."""
        return PROBE_SHARE * self._all_ms - self._lost_ms

    def reset(self) -> None:
        """Begin anew; times still count."""
        self._streak = self._waited = 0
        self._interval = FIRST_PROBE

    def spend(self, ms: float) -> None:
        """Time went by, of whatever step."""
        self._all_ms += ms

    def plain(self, tokens: int) -> None:
        """A step was plain, and gained so many tokens."""
        self._streak += 1
        if self._streak > PLAIN_STREAK:
            self._waited += tokens

    def leave(self) -> None:
        """A step was drafted because that is worth it."""
        self._streak = self._waited = 0

    def lost(self, ms: float) -> None:
        """A probe was not worth it: the next one comes later."""
        self._lost_ms += ms
        self._interval = min(2 * self._interval, LAST_PROBE)
        self._waited = 0

    def to_json(self) -> list[int]:
        """Where it stands."""
        return [self._streak, self._interval, self._waited]

    def recall(self, known: Sequence[int]) -> None:
        """Go on from where an earlier run stood."""
        self._streak, interval, self._waited = map(int, known)
        self._interval = min(max(interval, FIRST_PROBE), LAST_PROBE)
