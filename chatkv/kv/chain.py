"""Keys of the pages of one growing path, across what it forgot. Knows ids and places; no page.

Between two ops ids fill pages of their own. Each op is a link of the chain: a page's key covers all
ids before it and every op before it, so what was computed after a forget is never taken for what a
conversation computed that did not forget.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from chatkv.kv.keys import op_key, page_key
from chatkv.kv.ops import Op


@dataclass(frozen=True, slots=True)
class Link:
    """An op in the chain."""

    key: bytes
    parent: bytes
    op: Op


class Chain:
    """Keys of whole pages are kept; the rest is worked out when asked for.

    Args:
        root: Key of the empty path.
        page_size: Slots of a page.
        ids: Of the path. Read as they grow; those that were asked about do not change.
        sampled: One flag an id.
    """

    def __init__(
        self, root: bytes, page_size: int, ids: Sequence[int], sampled: Sequence[bool]
    ) -> None:
        self.size = page_size
        self.ids, self.sampled = ids, sampled
        self.links: list[Link] = []
        # Of each part between two ops: its first place, the key before it, links before it, and the
        # first page whose key is not known.
        self._bases, self._roots, self._counts, self._fronts = [0], [root], [0], [0]
        self._whole: dict[int, bytes] = {}

    def add(self, op: Op) -> Link:
        """Go on behind an op. Its place is behind that of the last one, or the same."""
        parent = self._roots[-1] if op.at == self._bases[-1] else self.at(op.at)
        link = Link(op_key(parent, op.to_json()), parent, op)
        self.links.append(link)
        if op.at == self._bases[-1]:
            self._roots[-1] = link.key
            self._counts[-1] += 1
        else:
            pages = -(-(op.at - self._bases[-1]) // self.size)
            self._counts.append(self._counts[-1] + pages + 1)
            self._bases.append(op.at)
            self._fronts.append(op.at)
            self._roots.append(link.key)
        return link

    def at(self, num_ids: int) -> bytes:
        """Key of the first ids, before an op that comes right behind them."""
        part = max(0, bisect_left(self._bases, num_ids) - 1)
        rest = (num_ids - self._bases[part]) % self.size
        if num_ids == self._bases[part]:
            return self._roots[part]
        return self.key(num_ids - (rest or self.size), num_ids)

    def key(self, first: int, stop: int) -> bytes:
        """Of the page that begins with the id at `first`, filled up to `stop`."""
        if stop - first < self.size:
            return page_key(self.parent(first), self.ids[first:stop], self.sampled[first:stop])
        if first not in self._whole:
            self._fill(stop)
        return self._whole[first]

    def parent(self, first: int) -> bytes:
        """The key before the page that begins with the id at `first`."""
        part = bisect_right(self._bases, first) - 1
        if first == self._bases[part]:
            return self._roots[part]
        return self.key(first - self.size, first)

    def _fill(self, stop: int) -> None:
        """Work out the keys of whole pages up to `stop`, from the last known one on."""
        part = bisect_left(self._bases, stop) - 1
        start = self._fronts[part]
        key = self._roots[part] if start == self._bases[part] else self._whole[start - self.size]
        while start < stop:
            end = start + self.size
            key = _whole_key(key, tuple(self.ids[start:end]), tuple(self.sampled[start:end]))
            self._whole[start] = key
            start += self.size
        self._fronts[part] = start

    def stop(self, first: int) -> int | None:
        """Where the page that begins with the id at `first` ends if an op closed it early."""
        part = bisect_right(self._bases, first)
        if part == len(self._bases) or self._bases[part] >= first + self.size:
            return None
        return self._bases[part]

    def index(self, first: int) -> int:
        """Links before the page that begins with the id at `first`, the root not counted."""
        part = bisect_right(self._bases, first) - 1
        return self._counts[part] + (first - self._bases[part]) // self.size


@lru_cache(maxsize=1 << 13)
def _whole_key(parent: bytes, ids: tuple[int, ...], sampled: tuple[bool, ...]) -> bytes:
    # Kept: a long conversation asks for all its keys at every turn.
    return page_key(parent, ids, sampled)
