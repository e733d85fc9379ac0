"""What a pass of so many rows costs on this machine, and drafting. Knows milliseconds only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

RECENT = 9
"""Measurements a running median looks back on."""
PLAIN_RECENT = 3
"""The same for plain passes, which are rare while drafting goes well."""
STALE = 32
"""Passes without a size after which what it was off by may be forgotten: else one that was held up
once might never run again."""
CHEAP_TRIES = 3
"""Drafts that tell what asking the cheap drafters alone takes."""


class CostTable:
    """Milliseconds by rows, from dummy steps at load and kept fresh by the real ones.

    Never interpolated: two rows have cost five times one row on real hardware. A size that was not
    measured costs what the next larger one does.

    The cost of a size is `base * drift * own`: `drift` follows plain steps, which happen all the
    time, as the context grows; `own` is how far this size was off when it last ran, for a while.

    Args:
        base: Rows -> milliseconds; must hold 1.
    """

    def __init__(self, base: Mapping[int, float]) -> None:
        if 1 not in base or min(base.values()) <= 0:
            raise ValueError(f"a cost table needs one row and positive times, not {dict(base)}")
        self.base = dict(sorted(base.items()))
        self.sizes = tuple(self.base)
        """Rows that were measured, ascending."""
        self._drift: deque[float] = deque(maxlen=PLAIN_RECENT)
        self._own: dict[int, deque[float]] = {}
        self._idle: dict[int, int] = {}
        """Passes since a size in `own` ran."""
        self._level = 1.0
        self._now: dict[int, float] = dict(self.base)

    def ms(self, rows: int) -> float | None:
        """Expected time of a pass; None beyond the largest measured size."""
        return self._now.get(rows) or self._now.get(self.size_for(rows))

    def size_for(self, rows: int) -> int:
        """The smallest measured size that holds so many rows; 0 if none does."""
        return next((size for size in self.sizes if size >= rows), 0)

    def observe(self, rows: int, ms: float, *, plain: bool, spare_ms: float = 0.0) -> float:
        """A real pass took this long. Sizes that are not in the table teach nothing.

        Args:
            spare_ms: What may be lost by trying sizes again that turned out slow.

        Returns:
            What may be lost of it by those that are forgotten to be.
        """
        if rows not in self.base or ms <= 0:
            return 0.0
        if plain:
            self._drift.append(ms / self.base[rows])
            self._own.pop(rows, None)
            self._level = median(self._drift)
        else:
            factor = ms / (self.base[rows] * self._level)
            self._own.setdefault(rows, deque(maxlen=RECENT)).append(factor)
        self._idle = {size: self._idle.get(size, 0) + 1 for size in self._own if size != rows}
        lost_ms = 0.0
        for size, passes in self._idle.items():
            more_ms = (median(self._own[size]) - 1) * self.base[size] * self._level
            if passes > STALE and more_ms <= spare_ms - lost_ms:
                lost_ms += max(more_ms, 0.0)
                del self._own[size]
        self._update()
        return lost_ms

    def to_json(self) -> dict[str, object]:
        """The table, and how far it was off lately."""
        return {
            "base": list(self.base.items()),
            "drift": list(self._drift),
            "own": [[rows, list(factors)] for rows, factors in self._own.items()],
        }

    def recall(self, known: Mapping[str, Any]) -> None:
        """Go on from how far an earlier run's table, which was the same, was off."""
        self._drift.extend(float(factor) for factor in known["drift"] if factor > 0)
        self._level = median(self._drift) if self._drift else 1.0
        for rows, factors in known["own"]:
            if rows in self.base and factors and min(factors) > 0:
                self._own[rows] = deque(map(float, factors), maxlen=RECENT)
        self._update()

    def _update(self) -> None:
        for size, base in self.base.items():
            own = self._own.get(size)
            self._now[size] = base * self._level * (median(own) if own else 1.0)


class DraftCosts:
    """Milliseconds of drafting, by the drafters that take time and were asked beside the others."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, ...], deque[float]] = {}
        self._ahead: deque[float] = deque(maxlen=RECENT)

    @property
    def cheap_ms(self) -> float:
        """Of asking nobody who takes time; 0 until that is known."""
        times = self._times.get((), ())
        return median(times) if len(times) >= CHEAP_TRIES else 0.0

    def ms(self, asked: tuple[str, ...], *, ahead: bool = False) -> float:
        """Expected time of asking these; 0 while nothing is known.

        Args:
            ahead: The tree was begun behind the step before.
        """
        if ahead:
            return self.ahead_ms
        times = self._times.get(asked)
        return median(times) if times else (self.ahead_ms if asked else 0.0)

    @property
    def ahead_ms(self) -> float:
        """Of taking a tree that was begun behind the step before; 0 while that is not known."""
        return median(self._ahead) if self._ahead else 0.0

    def observe(self, asked: tuple[str, ...], ms: float, *, ahead: bool = False) -> None:
        """Drafting took this long."""
        if ahead:
            self._ahead.append(ms)
        else:
            self._times.setdefault(asked, deque(maxlen=RECENT)).append(ms)

    def to_json(self) -> dict[str, object]:
        """All times."""
        times = [[list(asked), list(times)] for asked, times in self._times.items()]
        return {"times": times, "ahead": list(self._ahead)}

    def recall(self, known: Mapping[str, Any]) -> None:
        """Go on from the times of an earlier run."""
        for asked, times in known["times"]:
            self._times[tuple(map(str, asked))] = _recent(times)
        self._ahead = _recent(known["ahead"])


def _recent(times: Sequence[float]) -> deque[float]:
    return deque((float(ms) for ms in times if ms >= 0), maxlen=RECENT)
