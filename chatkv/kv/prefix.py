"""Finds pages in the pool by the hash chain of their tokens. Knows keys and pages; no sequence.

Every entry holds one reference on its page, so that what a closed or changed sequence computed can
be used again. Evicting costs time only. A page that is held here is never written: its holders see
more than one reference and copy it first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from chatkv.kv.keys import common_tokens
from chatkv.kv.pool import PagePool


@dataclass(frozen=True, slots=True)
class CachedPage:
    """One entry. The page's first `len(ids)` rows are those of `ids` behind `parent`."""

    key: bytes
    parent: bytes
    page: int
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What the cache holds, and what it did since it was made."""

    pages: int
    """Entries held."""
    reclaimable: int
    """Entries whose page nobody else holds."""
    hits: int
    """Pages handed out."""
    inserted: int
    evicted: int
    """Entries that went for want of room."""


class PrefixCache:
    """Pages of `pool` by key, evicted leaf first, least recently used first.

    Holds whatever the pool has room for: a page that waits here would be free otherwise.

    Args:
        pool: Whose pages they are. Set `pool.reclaim` to `reclaim` to let it evict.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # Least recently used first. A use moves the whole path up, its first page last: every
        # entry stands before its parent, so this one order is also leaf first.
        self._entries: OrderedDict[bytes, CachedPage] = OrderedDict()
        self._children: dict[bytes, list[bytes]] = {}
        self._hits = self._inserted = self._evicted = 0
        self.spill: Callable[[CachedPage], None] | None = None
        """Told of a page before it goes for want of room; it may keep a copy."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether a page is found by `key`. Not a use."""
        return key in self._entries

    def insert(
        self, key: bytes, parent: bytes, page: int, ids: Sequence[int], sampled: Sequence[bool]
    ) -> bool:
        """Remember a page that somebody holds, and hold it too.

        A tail goes when a page that continues it comes; one that comes later is not taken. A key
        that is known keeps its page.

        Args:
            key: `page_key(parent, ids, sampled)`.
            parent: Key before it. Its page need not be held, but without it this one is not found.
            page: Its rows for `ids` are never written again.
            ids: One to page_size token ids.
            sampled: One for each id.

        Returns:
            Whether the page is held from now on.
        """
        new = CachedPage(key, parent, page, tuple(ids), tuple(sampled))
        if not 1 <= len(new.ids) <= self._pool.page_size or len(new.ids) != len(new.sampled):
            raise ValueError(f"{len(new.ids)} ids and {len(new.sampled)} sampled bits in a page.")
        if key in self._entries:
            self._touch(key)
            return False
        for old in self.children(parent):
            common = common_tokens(new.ids, new.sampled, old.ids, old.sampled)
            if common == len(new.ids):
                self._touch(old.key)
                return False
            if common == len(old.ids):
                self._drop(old.key)
        self._pool.share(page)
        self._entries[key] = new
        self._children.setdefault(parent, []).append(key)
        self._touch(key)
        self._inserted += 1
        return True

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of `keys` from the first on, each shared for the caller."""
        pages: list[int] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            pages.append(self._pool.share(entry.page))
        if pages:
            self._touch(keys[len(pages) - 1])
        self._hits += len(pages)
        return pages

    def hold(
        self, key: bytes, parent: bytes, ids: Sequence[int], sampled: Sequence[bool]
    ) -> int | None:
        """The page of `key`, or one behind `parent` that begins with these ids; shared for the
        caller. None if neither is held. Whoever looks for several says `touch` when it has them."""
        entry = self._entries.get(key)
        if entry is None:
            for child in self.children(parent):
                if common_tokens(ids, sampled, child.ids, child.sampled) == len(ids):
                    entry = child
                    break
            else:
                return None
        self._hits += 1
        return self._pool.share(entry.page)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these the most recently used, the first one most of all. Unknown ones are none."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def edge(
        self, parent: bytes, ids: Sequence[int], sampled: Sequence[bool]
    ) -> tuple[int, int] | None:
        """The page behind `parent` that shares most tokens with `ids`, though its key differs.

        Args:
            parent: Key of the last page of the match, or the root.
            ids: Token ids behind it.
            sampled: One for each id.

        Returns:
            The page, shared for the caller, and how many of its first rows are those of `ids`. A
            table that adopts it copies it before it writes. None if not even one row is.
        """
        best, rows = None, 0
        for child in self.children(parent):
            common = common_tokens(ids, sampled, child.ids, child.sampled)
            if common > rows:
                best, rows = child, common
        if best is None:
            return None
        self._touch(best.key)
        self._hits += 1
        return self._pool.share(best.page), rows

    def children(self, parent: bytes) -> list[CachedPage]:
        """Entries behind `parent`, oldest first. Their pages are not shared: `edge` does that."""
        return [self._entries[key] for key in self._children.get(parent, ())]

    def reclaim(self, num_pages: int) -> int:
        """Evict until that many pages are free again. Returns how many are.

        A page that others hold stays. It is found by its key though one before it went: what a
        conversation forgot goes first, and what it still sees lies behind it.
        """
        freed = 0
        for entry in list(self._entries.values()):
            if freed >= num_pages:
                break
            if self._pool.refs(entry.page) == 1:
                freed += 1
                if self.spill is not None:
                    self.spill(entry)
                self._evicted += 1
                self._remove(entry)
        return freed

    def drop(self, keys: Iterable[bytes]) -> int:
        """Forget these pages and all behind them, now. Returns how many entries went."""
        return sum(self._drop(key) for key in keys if key in self._entries)

    def clear(self) -> int:
        """Forget all pages. Returns how many entries went."""
        return self.drop(list(self._entries))

    def stats(self) -> PrefixStats:
        alone = sum(self._pool.refs(entry.page) == 1 for entry in self._entries.values())
        return PrefixStats(len(self), alone, self._hits, self._inserted, self._evicted)

    def _touch(self, key: bytes) -> None:
        """Make an entry and all before it the most recently used, the first page most of all."""
        while (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            key = entry.parent

    def _drop(self, key: bytes) -> int:
        """Remove an entry and all behind it. Returns how many went."""
        waiting, count = [key], 0
        while waiting:
            entry = self._entries[waiting.pop()]
            waiting += self._children.get(entry.key, ())
            self._remove(entry)
            count += 1
        return count

    def _remove(self, entry: CachedPage) -> None:
        del self._entries[entry.key]
        self._pool.release(entry.page)
        siblings = self._children[entry.parent]
        siblings.remove(entry.key)
        if not siblings:
            del self._children[entry.parent]
