"""Whether reading stored rows is faster than computing them again: by rates that were measured.

Knows numbers only. Rates are moving averages; a rate that nobody measured yet decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

WEIGHT = 0.3
"""Of a new measurement in the average."""
MIN_TOKENS, MIN_BYTES = 32, 1 << 20
"""Less than this is mostly overhead, and is not measured."""


@dataclass(slots=True)
class Rates:
    """What was measured on this machine with this model; None where nothing was yet."""

    disk_bytes_s: float | None = None
    """Stored pages read, checked and put in place, bytes a second."""
    given_tokens_s: float | None = None
    """Tokens computed through the prompt path, a second."""
    chosen_tokens_s: float | None = None
    """Tokens computed through the step path, a second: those that a model chose."""

    def read(self, num_bytes: int, seconds: float) -> None:
        """So much came from disk in that time."""
        if num_bytes >= MIN_BYTES and seconds > 0:
            self.disk_bytes_s = _mean(self.disk_bytes_s, num_bytes / seconds)

    def computed(self, given: int, chosen: int, seconds: float) -> None:
        """So many tokens were computed in that time. Where both kinds were, each rate takes the
        share that the known rates say."""
        if given + chosen < MIN_TOKENS or seconds <= 0:
            return
        pace = (given + chosen) / seconds
        off = self.compute_s(given, chosen)
        factor = 1.0 if not off else off / seconds
        if given:
            self.given_tokens_s = _mean(self.given_tokens_s, factor * (self.given_tokens_s or pace))
        if chosen:
            mine = factor * (self.chosen_tokens_s or pace)
            self.chosen_tokens_s = _mean(self.chosen_tokens_s, mine)

    def restore_s(self, num_bytes: int) -> float | None:
        """How long reading takes; None while no rate is known."""
        return num_bytes / self.disk_bytes_s if self.disk_bytes_s else None

    def compute_s(self, given: int, chosen: int) -> float | None:
        """How long computing takes; None while a rate that is needed is not known."""
        needed = ((given, self.given_tokens_s), (chosen, self.chosen_tokens_s))
        total = 0.0
        for count, rate in needed:
            if count and not rate:
                return None
            total += count / (rate or 1.0)
        return total

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)

    @classmethod
    def of(cls, kept: Mapping[str, object]) -> Rates:
        """Rates that were kept; what is no sensible number is left out."""
        names = ("disk_bytes_s", "given_tokens_s", "chosen_tokens_s")
        found = {name: kept.get(name) for name in names}
        return cls(
            **{
                name: float(value)
                for name, value in found.items()
                if isinstance(value, int | float) and 0 < value < 1e15
            }
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision and what it was made on."""

    restore: bool
    tokens: int
    """That could be read."""
    num_bytes: int
    restore_s: float | None
    compute_s: float | None

    @property
    def detail(self) -> str:
        """Both estimates in words, or nothing."""
        if self.restore_s is None or self.compute_s is None:
            return ""
        return (
            f"{self.tokens} stored tokens: reading {1000 * self.restore_s:.0f} ms, "
            f"computing {1000 * self.compute_s:.0f} ms"
        )


def plan(rates: Rates, given: int, chosen: int, token_bytes: int, *, compares: bool) -> Plan:
    """Restore, unless computing is known to be faster.

    Args:
        rates: What was measured.
        given: Stored tokens that the prompt path would compute.
        chosen: Those that the step path would.
        token_bytes: Rows of one token.
        compares: False restores always: where computing would give other bits.
    """
    num_bytes = (given + chosen) * token_bytes
    restore_s, compute_s = rates.restore_s(num_bytes), rates.compute_s(given, chosen)
    restore = not compares or restore_s is None or compute_s is None or restore_s <= compute_s
    return Plan(restore, given + chosen, num_bytes, restore_s, compute_s)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
