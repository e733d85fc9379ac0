"""What a path would cost: how much of it is in memory, how much on disk, and how much is nowhere.

Looks; holds and reads nothing. The order of looking is that of `restore.py`. Imports no torch: a
front process knows the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chatkv.kv.chain import Chain
from chatkv.kv.keys import common_tokens
from chatkv.kv.layout import Span, Stage
from chatkv.kv.window import InSight, in_sight

if TYPE_CHECKING:
    from chatkv.kv.prefix import PrefixCache
    from chatkv.kv.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Price:
    """What the next turn has to do before it can answer, its own prompt left out. In tokens."""

    pool: int
    """In sight, and in memory."""
    disk: int
    """In sight, and read from disk."""
    computed: int
    """To be computed; some of them only to be forgotten again."""
    live: int
    """In sight then."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What going on from a place of a chat will cost, by what is stored and was measured."""

    tokens: int
    """In sight of the path up to there; the new prompt comes on top."""
    pool_pages: int
    """Pages that are in place already."""
    host_pages: int
    """That come from host memory."""
    disk_pages: int
    """That come from disk; 0 where computing them is faster."""
    disk_bytes: int
    """Of the rows in them that are of use."""
    computed_tokens: int
    """Tokens that nobody has, or that are faster computed; some only to be forgotten again."""
    computed_pages: int
    """Pages that are made for them; the others are shared with whoever else has them."""
    ms: float | None
    """Until the first token of a reply, about; None where nothing was measured yet."""


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
        found, total = self._held(stages), len(self.chain.ids)
        near, far = sum(found.pool) + sum(found.host), sum(found.disk)
        return Price(near, far, total - found.num_tokens, self._live(stages))

    def preview(self, stages: Sequence[Stage]) -> Preview:
        """The same in pages, bytes and time; arguments and errors as of `price`."""
        found, rates = self._held(stages), self.tiers.rates
        left = len(self.chain.ids) - found.num_tokens
        chosen = sum(self.chain.sampled[found.num_tokens :])
        num_bytes = self.tiers.token_bytes * sum(found.disk)
        restore_s = rates.restore_s(num_bytes) if num_bytes else 0.0
        compute_s = rates.compute_s(left - chosen, chosen)
        return Preview(
            tokens=self._live(stages),
            pool_pages=len(found.pool),
            host_pages=len(found.host),
            disk_pages=len(found.disk),
            disk_bytes=num_bytes,
            computed_tokens=left,
            computed_pages=-(-left // self.chain.size),
            ms=None if restore_s is None or compute_s is None else 1000 * (restore_s + compute_s),
        )

    def _live(self, stages: Sequence[Stage]) -> int:
        return stages[-1].live + len(self.chain.ids) - stages[-1].base

    def _held(self, stages: Sequence[Stage]) -> InSight:
        """What need not be computed: behind the last op if all that is left from before is known,
        else behind the one before."""
        total = len(self.chain.ids)
        hides = self.window is not None and total > self.window
        self.tiers.begin(compares=len(stages) == 1 and not hides)
        ends = [*(stage.base for stage in stages[1:]), total]
        for stage, end in reversed(list(zip(stages, ends, strict=True))):
            if self.window is not None and end > self.window:
                found = in_sight(self.prefix, self.tiers, self.chain, stage, end, self.window)
                found = found and self._with_rest(found, end)
            else:
                found = self._closed(stage)
                found = found and self._follow(found, end)
            if found is not None:
                return found
        return InSight(0, [], [], [])

    def _closed(self, stage: Stage) -> InSight | None:
        """Rows of closed pages; None if one is nowhere."""
        found = InSight(stage.base, [], [], [])
        for span in stage.spans:
            rows = self._where(found, span)
            if rows is None:
                return None
            rows.append(span.size)
        return found

    def _where(self, found: InSight, span: Span) -> list[int] | None:
        """In which list of `found` the rows of a closed page belong; None if they are nowhere."""
        ids, sampled = self._ids(span.first, span.first + span.hi)
        stop = self.chain.stop(span.first) or span.first + self.chain.size
        key, parent = self.chain.key(span.first, stop), self.chain.parent(span.first)
        edges = self._edge(parent, ids, sampled)
        if key in self.prefix or edges[0] == len(ids):
            return found.pool
        if self.tiers.host.peek(key) is not None or edges[1] == len(ids):
            return found.host
        if self.tiers.find([key]) or edges[2] == len(ids):
            return found.disk
        return None

    def _follow(self, found: InSight, end: int) -> InSight:
        """And rows from there on, as far as they are known without a gap."""
        size, base = self.chain.size, found.num_tokens
        starts = range(base, base + (end - base) // size * size, size)
        keys = [self.chain.key(start, start + size) for start in starts]
        pool = next((n for n, key in enumerate(keys) if key not in self.prefix), len(keys))
        host, plan = self.tiers.preview(keys[pool:])
        disk, reads = 0, plan is None or plan.restore
        if reads:
            rest = keys[pool + host :]
            stored = self.tiers.find(rest)
            disk = next((n for n, key in enumerate(rest) if key not in stored), len(rest))
        for rows, count in ((found.pool, pool), (found.host, host), (found.disk, disk)):
            rows += [size] * count
        num_tokens = base + size * (pool + host + disk)
        return self._with_rest(replace(found, num_tokens=num_tokens), end, reads)

    def _with_rest(self, found: InSight, end: int, reads: bool = True) -> InSight:
        """And rows of the page that begins there."""
        start = found.num_tokens
        ids, sampled = self._ids(start, min(end, start + self.chain.size))
        pool, host, disk = self._edge(self.chain.parent(start), ids, sampled) if ids else (0, 0, 0)
        most = max(pool, host, disk if reads else 0)
        if most:
            # The pool's own page is taken where it has as many.
            rows = found.pool if most == pool else found.host if most == host else found.disk
            rows.append(most)
        return replace(found, num_tokens=start + most)

    def _ids(self, start: int, stop: int) -> tuple[Sequence[int], Sequence[bool]]:
        return self.chain.ids[start:stop], self.chain.sampled[start:stop]

    def _edge(
        self, parent: bytes, ids: Sequence[int], sampled: Sequence[bool]
    ) -> tuple[int, int, int]:
        """The most rows of one page behind `parent` that are ours: in the pool, in host memory, on
        disk."""
        pool = host = disk = 0
        for child in self.prefix.children(parent):
            pool = max(pool, common_tokens(ids, sampled, child.ids, child.sampled))
        for head in self.tiers.children(parent):
            common = common_tokens(ids, sampled, head.token_ids, head.sampled)
            if self.tiers.host.peek(head.key) is not None:
                host = max(host, common)
            else:
                disk = max(disk, common)
        return pool, host, disk
