"""The plain state: guesses were not worth their time, so they are tried only now and then.

Knows counts and milliseconds; no trees and no chances.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN_STREAK, LONG_STREAK = 3, 12
"""Plain decisions in a row that make the plain state, and how many where asking has been worth its
time lately: one that says nothing three times may still gain more than it takes."""
ASKED_KEEP = 1 - 1 / 16
"""What is kept of the sums over steps for which drafters that take time were asked."""
FIRST_PROBE, LAST_PROBE = 16, 512
"""Tokens in the plain state until the next probe; doubles each time."""
PROBE_SHARE = 0.005
"""Share of all time that probes may lose."""


class PlainState:
    """How long decoding has been plain, and when the next probe is due."""

    def __init__(self) -> None:
        self._streak, self._interval, self._waited = 0, FIRST_PROBE, 0
        self._lost_ms, self._all_ms = 0.0, 0.0
        self._worth_ms, self._taken_ms = 0.0, 0.0

    @property
    def holds(self) -> bool:
        """Whether the last decisions were all plain."""
        return self._streak >= self._needed

    @property
    def _needed(self) -> int:
        return LONG_STREAK if self._worth_ms > self._taken_ms else PLAIN_STREAK

    def asked(self, worth_ms: float, taken_ms: float) -> None:
        """Drafters that take time were asked for a step; plain steps would have taken `worth_ms`
        for what it gained."""
        self._worth_ms = ASKED_KEEP * self._worth_ms + worth_ms
        self._taken_ms = ASKED_KEEP * self._taken_ms + taken_ms

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

    def give(self, ms: float) -> None:
        """Let something else lose so much of what probes may."""
        self._lost_ms += ms

    def plain(self, tokens: int) -> None:
        """A step was plain, and gained so many tokens."""
        self._streak += 1
        if self._streak > self._needed:
            self._waited += tokens

    def leave(self) -> None:
        """A step was drafted because that is worth it."""
        self._streak = self._waited = 0

    def won(self) -> None:
        """A probe was worth it. One in a row of many that were not says little: should the plain
        state come again soon, its probes do not begin from the shortest wait."""
        self._streak = self._waited = 0
        self._interval = max(self._interval // 2, FIRST_PROBE)

    def lost(self, ms: float) -> None:
        """A probe was not worth it: the next one comes later."""
        self._lost_ms += ms
        self._interval = min(2 * self._interval, LAST_PROBE)
        self._waited = 0

    def to_json(self) -> list[float]:
        """Where it stands."""
        return [self._streak, self._interval, self._waited, self._worth_ms, self._taken_ms]

    def recall(self, known: Sequence[float]) -> None:
        """Go on from where an earlier run stood."""
        streak, interval, waited, self._worth_ms, self._taken_ms = map(float, known)
        self._streak, self._waited = int(streak), int(waited)
        self._interval = min(max(int(interval), FIRST_PROBE), LAST_PROBE)
