"""Pages that had to leave the pool, in host memory: they come back without the disk.

Knows keys and bytes; no device and no file. A page here is the engine's own, so nobody has to prove
it. Evicting one costs time only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatkv.kv.keys import common_tokens
from chatkv.kv.staging import Pending
from chatkv.kv.store import PageHead, PageImage

ON_THEIR_WAY = 8
"""Pages whose bytes may still be in pinned buffers of the device's driver."""


@dataclass(frozen=True, slots=True)
class HostStats:
    """What host memory holds, and what it did since the start."""

    pages: int
    tokens: int
    payload_bytes: int
    limit_bytes: int
    taken: int
    """Pages that came from the pool."""
    given: int
    """Pages that went back to it."""
    evicted: int


class HostPages:
    """Pages by key, within a budget of bytes, evicted leaf first, least recently used first.

    Args:
        limit_bytes: Of page rows; 0 takes nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Least recently used first, every page before its parent, as in the prefix cache.
        self._heads: OrderedDict[bytes, PageHead] = OrderedDict()
        self._rows: dict[bytes, bytes | Pending] = {}
        self._sizes: dict[bytes, int] = {}
        self._children: dict[bytes, list[bytes]] = {}
        self._pending: deque[bytes] = deque()
        self._bytes = self._taken = self._given = self._evicted = 0

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, key: bytes) -> bool:
        return key in self._heads

    def put(self, head: PageHead, num_bytes: int, read: Callable[[], Pending]) -> bool:
        """Take a page that leaves the pool. False if it does not fit, or is here in a longer one.

        Args:
            head: What it is.
            num_bytes: Of its rows.
            read: Begins to bring them; called only if they are kept.
        """
        if num_bytes > self.limit_bytes:
            return False
        if head.key in self._heads:
            self._touch(head.key)
            return True
        for other in self.children(head.parent_key):
            common = common_tokens(head.token_ids, head.sampled, other.token_ids, other.sampled)
            if common == head.num_tokens:
                self._touch(other.key)
                return False
            if common == other.num_tokens:
                self._drop(other.key)
        while self._bytes + num_bytes > self.limit_bytes:
            self._drop(next(iter(self._heads)))
            self._evicted += 1
        self._heads[head.key] = head
        self._rows[head.key] = read()
        self._sizes[head.key] = num_bytes
        self._children.setdefault(head.parent_key, []).append(head.key)
        self._bytes += num_bytes
        self._taken += 1
        self._touch(head.key)
        self._pending.append(head.key)
        if len(self._pending) > ON_THEIR_WAY:
            self._arrived(self._pending.popleft())
        return True

    def get(self, key: bytes) -> PageImage | None:
        """A page with its rows, or None. It stays here too: to leave the pool again costs nothing.

        A caller that wants a path asks from its first page on and says `use` at its end.
        """
        head = self._heads.get(key)
        if head is None:
            return None
        self._given += 1
        return PageImage.of(head, self._arrived(key))

    def peek(self, key: bytes) -> PageHead | None:
        """What a page is, without its rows. Not a use."""
        return self._heads.get(key)

    def use(self, key: bytes) -> None:
        """Make a page and all before it the most recently used."""
        self._touch(key)

    def children(self, parent: bytes) -> Sequence[PageHead]:
        """Pages behind `parent`."""
        return [self._heads[key] for key in self._children.get(parent, ())]

    def clear(self) -> int:
        """Let go of all pages. Returns how many."""
        count = len(self._heads)
        for held in (self._heads, self._rows, self._sizes, self._children, self._pending):
            held.clear()
        self._bytes = 0
        return count

    def stats(self) -> HostStats:
        tokens = sum(head.num_tokens for head in self._heads.values())
        numbers = (self._bytes, self.limit_bytes, self._taken, self._given, self._evicted)
        return HostStats(len(self._heads), tokens, *numbers)

    def _arrived(self, key: bytes) -> bytes:
        rows = self._rows.get(key, b"")
        if callable(rows):
            rows = self._rows[key] = rows()
        return rows

    def _touch(self, key: bytes) -> None:
        """As in the prefix cache: the first page of a path becomes the most recent one."""
        while (head := self._heads.get(key)) is not None:
            self._heads.move_to_end(key)
            key = head.parent_key

    def _drop(self, key: bytes) -> None:
        head = self._heads.pop(key)
        del self._rows[key]
        self._bytes -= self._sizes.pop(key)
        siblings = self._children[head.parent_key]
        siblings.remove(key)
        if not siblings:
            del self._children[head.parent_key]
        if key in self._pending:
            self._pending.remove(key)
