"""The wall-clock guard: drafted steps against plain ones. Blind to chances and cost tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from chatkv.spec.stats import StepRecord

GUARD_BAR = 1.02
"""Measured rate over plain below which drafting stops."""
GUARD_TOKENS = 128
"""Drafted tokens between two looks."""
PAIRS = 8
"""Drafted steps, and as many plain ones between them, that decide once a look was bad: the plain
steps that a look compares with may be older than what slows the machine down now."""
REST_TOKENS = 256
"""Plain tokens after the guard has struck; twice as many each time in a row."""
LONGEST_REST = 5
"""Doublings of the rest."""
CONTROL_STEPS = 64
"""One step in so many is plain, to know what plain costs now."""
CLEAR, CLEAR_STEPS = 1.25, 256
"""Measured rate over plain from which one in so many is enough."""
HICCUP, HICCUPS = 8.0, 8
"""Times the median from which a step was held up by something else, if no more than one in so many
was: the first of their kind are compiled and captured."""


class WallClockGuard:
    """Sends drafting to rest when it did not pay by the clock.

    Args:
        strikes: False only measures: for tests that pin a shape.
    """

    def __init__(self, *, strikes: bool = True) -> None:
        self.strikes = strikes
        self.rest_tokens = 0
        """Tokens still to be plain."""
        self.measured: float | None = None
        """Drafted rate over plain rate when last looked at."""
        self._in_a_row = 0
        self._plain_ms: deque[float] = deque(maxlen=9)
        self._since_control = CONTROL_STEPS
        self._sequences = 1
        self._drafted: list[tuple[int, float]] = []
        """(tokens, milliseconds) of the drafted steps since the last look."""
        self._doubts = False
        """Whether the last look was bad: drafted and plain steps take turns."""
        self._between: list[tuple[int, float]] = []
        """The plain steps of these turns."""
        self._was_drafted = False

    @property
    def wants_control(self) -> bool:
        """Whether the next step should be plain, to keep the comparison fresh."""
        if self._doubts:
            return self._was_drafted
        clear = self.measured is not None and self.measured >= CLEAR
        return self.strikes and self._since_control >= (CLEAR_STEPS if clear else CONTROL_STEPS)

    def plain_ms(self, default: float) -> float:
        """What a plain step takes now; `default` where none was measured."""
        return median(self._plain_ms) if self._plain_ms else default

    def expect(self, sequences: int) -> None:
        """The next step has so many sequences: steps of another number do not compare."""
        if sequences != self._sequences:
            self._sequences = sequences
            self._plain_ms.clear()
            self._since_control = CLEAR_STEPS
            self._drafted.clear()
            self._doubts = False

    def wake(self) -> None:
        """End a rest."""
        self.rest_tokens = 0

    def to_json(self) -> dict[str, object]:
        """Where it stands."""
        return {
            "rest_tokens": self.rest_tokens,
            "in_a_row": self._in_a_row,
            "plain_ms": list(self._plain_ms),
            "since_control": self._since_control,
            "drafted": [list(step) for step in self._drafted],
        }

    def recall(self, known: Mapping[str, Any]) -> None:
        """Go on from where an earlier run stood."""
        self.rest_tokens, self._in_a_row = int(known["rest_tokens"]), int(known["in_a_row"])
        self._plain_ms.extend(float(ms) for ms in known["plain_ms"] if ms > 0)
        self._since_control = int(known["since_control"]) if self._plain_ms else CONTROL_STEPS
        self._drafted = [(int(tokens), float(ms)) for tokens, ms in known["drafted"]]

    def observe(self, step: StepRecord) -> None:
        """Measure a step, and look at the sums once enough tokens were drafted."""
        self.rest_tokens = max(0, self.rest_tokens - step.tokens)
        self._since_control += 1
        self._was_drafted = step.drafted
        if not step.drafted:
            self._plain_ms.append(step.wall_ms - step.draft_ms)
            self._since_control = 0
            if self._doubts:
                self._between.append((step.tokens, self._plain_ms[-1]))
                self._decide()
            return
        self._drafted.append((step.tokens, step.wall_ms))
        if self._doubts:
            self._decide()
        elif sum(tokens for tokens, _ in self._drafted) >= GUARD_TOKENS:
            if self._plain_ms and step.wall_ms > 0:
                self._look()
            self._drafted.clear()

    def _look(self) -> None:
        self.measured = _rate(self._drafted) * median(self._plain_ms) / self._sequences
        if self.measured >= GUARD_BAR:
            self._in_a_row = 0
        elif self.strikes:
            self._doubts = True
            self._between.clear()

    def _decide(self) -> None:
        """Strike if drafting was slower in turns as well."""
        if min(len(self._drafted), len(self._between)) < PAIRS:
            return
        self.measured = _rate(self._drafted) / _rate(self._between)
        if self.measured < GUARD_BAR:
            self.rest_tokens = REST_TOKENS << min(self._in_a_row, LONGEST_REST)
            self._in_a_row += 1
        self._doubts = False
        self._drafted.clear()


def _rate(steps: Sequence[tuple[int, float]]) -> float:
    """Tokens a millisecond, without steps that something else held up."""
    usual = HICCUP * median(ms for _, ms in steps)
    steady = [(tokens, ms) for tokens, ms in steps if ms <= usual]
    if HICCUPS * (len(steps) - len(steady)) > len(steps):
        steady = steps
    return sum(tokens for tokens, _ in steady) / sum(ms for _, ms in steady)
