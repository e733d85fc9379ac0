"""Host memory for pages that leave the pool: within its budget, leaf first, rows as they were."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chatkv.kv.keys import page_key
from chatkv.kv.store import PageHead
from chatkv.kv.swap import HostPages

ROOT = b"r" * 32
TOKENS, TOKEN_BYTES, LIMIT = 4, 10, 200


def head(parent: bytes, ids: tuple[int, ...]) -> PageHead:
    flags = (False,) * len(ids)
    return PageHead(page_key(parent, ids, flags), parent, 0, 0, ids, flags, "mixed")


class HostMachine(RuleBasedStateMachine):
    """Against a dictionary of all that was ever put."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostPages(LIMIT)
        self.ever: dict[bytes, tuple[PageHead, bytes]] = {}
        self.asked = 0

    @rule(parent=st.integers(0, 30), ids=st.lists(st.integers(0, 2), min_size=1, max_size=TOKENS))
    def put(self, parent: int, ids: list[int]) -> None:
        full = [key for key, (one, _) in self.ever.items() if one.num_tokens == TOKENS]
        behind = [ROOT, *full][parent % (len(full) + 1)]
        page = head(behind, tuple(ids))
        rows = bytes([len(self.ever) % 256]) * (TOKEN_BYTES * len(ids))
        rows = self.ever.get(page.key, (page, rows))[1]

        def read():
            self.asked += 1
            return lambda: rows

        before = page.key in self.host
        kept = self.host.put(page, len(rows), read)
        assert (page.key in self.host) == kept or before
        if kept:
            self.ever[page.key] = (page, rows)

    @precondition(lambda self: self.ever)
    @rule(place=st.integers(0, 99))
    def get(self, place: int) -> None:
        key = list(self.ever)[place % len(self.ever)]
        image = self.host.get(key)
        assert (image is not None) == (key in self.host)
        if image is not None:
            assert (image.head, image.payload) == self.ever[key]
        self.host.use(key)
        if image is not None:
            assert list(self.host._heads)[-1] == self._first(key)

    @rule()
    def clear(self) -> None:
        self.host.clear()

    def _first(self, key: bytes) -> bytes:
        while (parent := self.host._heads[key].parent_key) in self.host:
            key = parent
        return key

    @invariant()
    def within_the_budget_and_counted(self) -> None:
        stats = self.host.stats()
        sizes = [len(self.ever[key][1]) for key in self.host._heads]
        assert stats.payload_bytes == sum(sizes) <= LIMIT
        assert stats.pages == len(sizes) == len(self.host)
        assert set(self.host._rows) == set(self.host._sizes) == set(self.host._heads)
        kids = [key for keys in self.host._children.values() for key in keys]
        assert sorted(kids) == sorted(self.host._heads)
        assert set(self.host._pending) <= set(self.host._heads)

    @invariant()
    def a_page_stands_before_its_parent(self) -> None:
        order = list(self.host._heads)
        for place, key in enumerate(order):
            parent = self.host._heads[key].parent_key
            assert parent not in order or order.index(parent) > place


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_nothing_is_kept_without_a_budget_and_nothing_is_read_for_nothing():
    asked = []
    host = HostPages(0)
    assert not host.put(head(ROOT, (1,)), 10, lambda: asked.append(1))
    host = HostPages(100)
    page = head(ROOT, (1, 2, 3, 4))
    assert host.put(page, 40, lambda: lambda: b"x" * 40)
    assert not host.put(head(ROOT, (1, 2)), 20, lambda: asked.append(1))  # it begins so
    assert host.put(page, 40, lambda: asked.append(1))
    assert asked == []
    tail = head(page.key, (7,))
    assert host.put(tail, 10, lambda: lambda: b"y" * 10)
    assert host.put(head(page.key, (7, 8)), 20, lambda: lambda: b"z" * 20)
    assert tail.key not in host
    assert host.stats().payload_bytes == 60
