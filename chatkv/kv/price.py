"""What a path would cost: how much of it is in memory, how much on disk, and how much is nowhere.

Looks; holds and reads nothing. The order of looking is that of `restore.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chatkv.kv.chain import Chain
from chatkv.kv.keys import common_tokens
from chatkv.kv.layout import Span, Stage
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.tiers import Tiers
from chatkv.kv.window import in_sight


@dataclass(frozen=True, slots=True)
class Price:
    """Tokens, for a path as it stands."""

    pool: int
    """In sight, and in memory."""
    disk: int
    """In sight, and read from disk."""
    computed: int
    """To be computed; some of them only to be forgotten again."""
    live: int
    """In sight at the end."""


class Pricer:
    """Looks for one path.

    Args:
        prefix: Pages of the pool.
        tiers: Pages of host memory and of the disk.
        chain: Of the path.
        window: Positions behind which no layer sees anything; None if one sees all.
    """

    def __init__(
        self, prefix: PrefixCache, tiers: Tiers, chain: Chain, window: int | None = None
    ) -> None:
        self.prefix, self.tiers, self.chain, self.window = prefix, tiers, chain, window

    def price(self, stages: Sequence[Stage]) -> Price:
        """Of all ids of the chain, whose last one is always computed.

        Args:
            stages: Before and behind each op.

        Raises:
            StoreError: The disk cannot be asked.
        """
        self.tiers.begin()
        total = len(self.chain.ids)
        live = stages[-1].live + total - stages[-1].base
        ends = [*(stage.base for stage in stages[1:]), total]
        for stage, end in reversed(list(zip(stages, ends, strict=True))):
            if self.window is not None and end > self.window:
                found = in_sight(self.prefix, self.tiers, self.chain, stage, end, self.window)
                if found is not None:
                    near, far = self._rest(found.num_tokens, end)
                    pool, disk = sum(found.pool) + sum(found.host) + near, sum(found.disk) + far
                    return Price(pool, disk, total - found.num_tokens - near - far, live)
                continue
            closed = self._closed(stage.spans)
            if closed is not None:
                pool, disk = self._follow(stage.base, end)
                left = total - stage.base - pool - disk
                return Price(closed[0] + pool, closed[1] + disk, left, live)
        return Price(0, 0, total, live)

    def _closed(self, spans: Sequence[Span]) -> tuple[int, int] | None:
        """Rows of closed pages in memory and on disk; None if one is nowhere."""
        pool = disk = 0
        for span in spans:
            ids, sampled = self._ids(span.first, span.first + span.hi)
            stop = self.chain.stop(span.first) or span.first + self.chain.size
            key, parent = self.chain.key(span.first, stop), self.chain.parent(span.first)
            near, far = self._edge(parent, ids, sampled)
            if key in self.prefix or self.tiers.host.peek(key) or near == len(ids):
                pool += span.size
            elif self.tiers.find([key]) or far == len(ids):
                disk += span.size
            else:
                return None
        return pool, disk

    def _follow(self, base: int, end: int) -> tuple[int, int]:
        """Rows from `base` on, in memory and on disk, as far as they are known without a gap."""
        size = self.chain.size
        starts = range(base, base + (end - base) // size * size, size)
        keys = [self.chain.key(start, start + size) for start in starts]
        held = next((n for n, key in enumerate(keys) if key not in self.prefix), len(keys))
        host, plan = self.tiers.preview(keys[held:])
        pool, disk = size * (held + host), 0
        if plan is None or plan.restore:
            rest = keys[held + host :]
            found = self.tiers.find(rest)
            disk = size * next((n for n, key in enumerate(rest) if key not in found), len(rest))
        near, far = self._rest(base + pool + disk, end, plan is None or plan.restore)
        return pool + near, disk + far

    def _rest(self, start: int, end: int, reads: bool = True) -> tuple[int, int]:
        """Rows of the page that begins at `start`, in memory or else on disk."""
        ids, sampled = self._ids(start, min(end, start + self.chain.size))
        if not ids:
            return 0, 0
        near, far = self._edge(self.chain.parent(start), ids, sampled)
        return (0, far) if far > near and reads else (near, 0)

    def _ids(self, start: int, stop: int) -> tuple[Sequence[int], Sequence[bool]]:
        return self.chain.ids[start:stop], self.chain.sampled[start:stop]

    def _edge(self, parent: bytes, ids: Sequence[int], sampled: Sequence[bool]) -> tuple[int, int]:
        """The most rows of one page behind `parent` that are ours: in memory, and on disk."""
        near = far = 0
        for child in self.prefix.children(parent):
            near = max(near, common_tokens(ids, sampled, child.ids, child.sampled))
        for head in self.tiers.children(parent):
            common = common_tokens(ids, sampled, head.token_ids, head.sampled)
            if self.tiers.host.peek(head.key) is not None:
                near = max(near, common)
            else:
                far = max(far, common)
        return near, far
