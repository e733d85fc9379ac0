"""What a forward pass of so many rows costs on this machine. Knows milliseconds only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

RECENT = 9
"""Measurements a running median looks back on."""


class CostTable:
    """Milliseconds by rows, from dummy steps at load and kept fresh by the real ones.

    Never interpolated: two rows have cost five times one row on real hardware. A size that was not
    measured costs what the next larger one does.

    The cost of a size is `base * drift * own`: `drift` follows plain steps, which happen all the
    time, as the context grows; `own` is how far this size was off when it last ran.

    Args:
        base: Rows -> milliseconds; must hold 1.
    """

    def __init__(self, base: Mapping[int, float]) -> None:
        if 1 not in base or min(base.values()) <= 0:
            raise ValueError(f"a cost table needs one row and positive times, not {dict(base)}")
        self.base = dict(sorted(base.items()))
        self._drift: deque[float] = deque(maxlen=RECENT)
        self._own: dict[int, deque[float]] = {}
        self._level = 1.0
        self._now: dict[int, float] = dict(self.base)

    @property
    def sizes(self) -> list[int]:
        """Rows that were measured, ascending."""
        return list(self.base)

    def ms(self, rows: int) -> float | None:
        """Expected time of a pass; None beyond the largest measured size."""
        if rows in self._now:
            return self._now[rows]
        return next((ms for size, ms in self._now.items() if size >= rows), None)

    def observe(self, rows: int, ms: float, *, plain: bool) -> None:
        """A real pass took this long. Sizes that are not in the table teach nothing."""
        if rows not in self.base or ms <= 0:
            return
        if plain:
            self._drift.append(ms / self.base[rows])
            self._own.pop(rows, None)
            self._level = median(self._drift)
        else:
            factor = ms / (self.base[rows] * self._level)
            self._own.setdefault(rows, deque(maxlen=RECENT)).append(factor)
        self._update()

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
