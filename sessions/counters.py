"""What the cache was worth: sums over turns, rates as ratios of sums. Knows no page and no file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from chatkv.events import Usage

WINDOW_S = 300.0
"""Length of the moving window of a process."""
LOW_HIT_RATE, LOW_HIT_TOKENS = 0.9, 256
"""A turn below this rate is told, if so many tokens could have been reused."""
TIERS = ("pool", "host", "disk")
BY_TIER = ("host_tokens", "disk_tokens", "token_bytes")

DEFINITIONS = {
    "used_bytes": "pages held by a live conversation; idle ones move to cached_bytes",
    "shared_bytes": "of used_bytes: pages held by more than one",
    "cached_bytes": "pages kept for reuse that nobody holds",
    "free_bytes": "pages that hold nothing",
    "page_fill": "valid rows / slots of used pages",
    "prompt_tokens": "tokens that needed keys and values before the reply: reused + computed",
    "reused_tokens": "of those, found in memory or on disk: pool + host + disk",
    "pool": "pages that were still in the engine's pool",
    "host": "pages that had left the pool and were kept in host memory",
    "disk": "pages read from kv.db",
    "reusable_tokens": "of those, not seen for the first time: what could have been found",
    "hit_rate": "reused / reusable; none if nothing was reusable. New text cannot lower it",
    "reuse_share": "reused / prompt_tokens",
    "turn": "the last turn",
    "session": "sums over the turns of the conversation, ratios of sums",
    "window": f"sums over the turns of the last {WINDOW_S:.0f} seconds",
    "all": "sums over all conversations",
}


@dataclass(slots=True)
class Sums:
    """Over some turns."""

    turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    reusable_tokens: int = 0
    tiers: dict[str, dict[str, int]] = field(
        default_factory=lambda: {tier: {"tokens": 0, "bytes": 0} for tier in TIERS}
    )
    """Reused tokens, and the bytes of their K/V, by where they were found."""

    def add(self, usage: Usage) -> None:
        """One more turn."""
        self.turns += 1
        self.prompt_tokens += usage.cached_tokens + usage.prompt_n
        self.reused_tokens += usage.cached_tokens
        self.computed_tokens += usage.prompt_n
        self.reusable_tokens += usage.reusable_tokens
        if not usage.token_bytes:
            return  # of a version that did not say where
        below = usage.host_tokens + usage.disk_tokens
        found = (usage.cached_tokens - below, usage.host_tokens, usage.disk_tokens)
        for tier, tokens in zip(TIERS, found, strict=True):
            self.tiers[tier]["tokens"] += tokens
            self.tiers[tier]["bytes"] += tokens * usage.token_bytes

    def add_stored(self, usage: Mapping[str, Any]) -> None:
        """One more turn as `chat.db` keeps it; one that was never counted adds nothing."""
        names = ("cached_tokens", "prompt_n", "reusable_tokens", *BY_TIER)
        found = {name: usage[name] for name in names if isinstance(usage.get(name), int)}
        if all(name in found for name in names[:3]):
            self.add(Usage(**found))

    @property
    def hit_rate(self) -> float | None:
        """Reused over reusable; None if nothing was."""
        if not self.reusable_tokens:
            return None
        return min(self.reused_tokens, self.reusable_tokens) / self.reusable_tokens

    @property
    def reuse_share(self) -> float | None:
        """Reused over all; None without any."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else None

    def to_json(self) -> dict[str, Any]:
        """Sums and rates."""
        return {**asdict(self), "hit_rate": self.hit_rate, "reuse_share": self.reuse_share}


class Window:
    """Turns of the last `WINDOW_S` seconds of this process."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._turns: deque[tuple[float, Usage]] = deque()

    def add(self, usage: Usage) -> None:
        """A turn that ends now."""
        self._turns.append((self._clock(), usage))

    def sums(self) -> Sums:
        """Over what is not too old."""
        while self._turns and self._turns[0][0] < self._clock() - WINDOW_S:
            self._turns.popleft()
        found = Sums()
        for _, usage in self._turns:
            found.add(usage)
        return found


def is_low(usage: Usage) -> bool:
    """Whether a turn found so little of what was there that the user is told why."""
    rate = usage.hit_rate
    return rate is not None and rate < LOW_HIT_RATE and usage.reusable_tokens >= LOW_HIT_TOKENS
