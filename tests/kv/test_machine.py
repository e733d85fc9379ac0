"""Pool, tables and prefix cache together, against plain lists, under any order of operations.

What a slot must hold is a function of all tokens up to it, as in a real model. So a page found by
its key, or by the tokens it shares, has to hold what its finder would have computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from chatkv.errors import OutOfPages
from chatkv.kv.keys import page_key, page_keys
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.table import PageTable

Token = tuple[int, bool]
ROOT = bytes(32)
SIZE = 4
NUM_PAGES = 16

# Few ids, so that chains meet and part again.
token = st.sampled_from([(0, False), (1, False), (1, True)])
tokens = st.lists(token, min_size=1, max_size=11)


def numbers(run: list[Token]) -> list[int]:
    """What each slot of `run` holds: 20 bits that depend on it and on all before it."""
    states: list[int] = [0]
    for token_id, bit in run:
        states.append(crc32(bytes([token_id, bit]), states[-1] + 1))
    return [state & 0xFFFFF for state in states[1:]]


def halves(run: list[Token]) -> tuple[list[int], list[bool]]:
    return [token_id for token_id, _ in run], [bit for _, bit in run]


def keys_of(run: list[Token]) -> list[bytes]:
    return page_keys(ROOT, *halves(run), SIZE)


def few_tables(machine: Any) -> bool:
    """So that the pool is full at times and not always."""
    return len(machine.model) < 6


class Machine(RuleBasedStateMachine):
    make_rows: Callable[[int], Any]
    tables = Bundle("tables")

    @initialize()
    def start(self) -> None:
        self.rows = type(self).make_rows(NUM_PAGES)
        self.pool = self.rows.pool
        self.cache = PrefixCache(self.pool)
        self.pool.reclaim = self.cache.reclaim
        self.model: dict[PageTable, list[Token]] = {}
        self.chains: dict[bytes, list[Token]] = {}  # what each key ever cached stands for

    @rule(target=tables)
    @precondition(few_tables)
    def open(self) -> PageTable:
        table = PageTable(self.pool)
        self.model[table] = []
        return table

    @rule(table=tables, new=tokens, remember=st.booleans())
    def append(self, table: PageTable, new: list[Token], remember: bool) -> None:
        runs = [self.model[table] + new[: index + 1] for index in range(len(new))]
        self.step(table, runs, list(range(len(new))))
        if remember:
            self.insert(table)

    @rule(table=tables, new=tokens, data=st.data())
    def keep_path(self, table: PageTable, new: list[Token], data: st.DataObject) -> None:
        """Rows of a tree, parents before children; one path from the root stays."""
        parents = [data.draw(st.integers(0, row), "parent") for row in range(len(new) - 1)]
        paths = [[0]]
        for row, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], row])
        history = self.model[table]
        runs = [history + [new[row] for row in path] for path in paths]
        self.step(table, runs, data.draw(st.sampled_from(paths), "kept"))

    @rule(table=tables, new=tokens, ending=st.sampled_from(["leave", "raise", "raise after keep"]))
    def abandon(self, table: PageTable, new: list[Token], ending: str) -> None:
        pages = list(table.pages)
        try:
            with table.reserve(len(new)) as reservation:
                self.rows.write(reservation.slots, [-1] * len(new))
                if ending == "raise after keep":
                    reservation.keep([0, *range(2, len(new))])
                if ending != "leave":
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, OutOfPages):
            pass
        assert table.pages == pages

    @rule(first=tables, second=tables, new=tokens)
    def batch(self, first: PageTable, second: PageTable, new: list[Token]) -> None:
        """Two sequences in one step: both reservations are open at once."""
        if first is second:
            return
        try:
            with first.reserve(len(new)) as mine, second.reserve(len(new)) as other:
                for table, reservation in ((first, mine), (second, other)):
                    values = numbers(self.model[table] + new)[-len(new) :]
                    self.rows.write(reservation.slots, values)
                mine.keep(range(len(new)))
                other.keep([0])
        except OutOfPages:
            return
        self.model[first] = self.model[first] + new
        self.model[second] = self.model[second] + new[:1]

    @rule(target=tables, table=tables)
    @precondition(few_tables)
    def fork(self, table: PageTable) -> PageTable:
        fork = table.fork()
        self.model[fork] = list(self.model[table])
        return fork

    @rule(table=tables, share=st.floats(0, 1))
    def truncate(self, table: PageTable, share: float) -> None:
        length = int(table.length * share)
        table.truncate(length)
        self.model[table] = self.model[table][:length]

    @rule(table=consumes(tables))
    @precondition(lambda self: len(self.model) > 1)
    def release(self, table: PageTable) -> None:
        table.release()
        del self.model[table]

    @rule(table=tables)
    def insert(self, table: PageTable) -> None:
        run, parent = self.model[table], ROOT
        for index, key in enumerate(keys_of(run)):
            part = run[index * SIZE : (index + 1) * SIZE]
            held = key in self.cache
            assert not (self.cache.insert(key, parent, table.pages[index], *halves(part)) and held)
            self.chains[key] = run[: index * SIZE + len(part)]
            parent = key

    @rule(target=tables, cut=st.integers(0, 7), new=st.lists(token, max_size=6), data=st.data())
    @precondition(lambda self: few_tables(self) and len(self.cache) > 0)
    def resume(self, cut: int, new: list[Token], data: st.DataObject) -> PageTable:
        """A chat is opened again, cut or edited: reuse what is there, compute the rest."""
        run = self.chains[data.draw(st.sampled_from(sorted(self.chains)), "chain")]
        return self.reuse(run[: max(len(run) - cut, 0)] + new)

    @rule(num_pages=st.integers(1, 3))
    @precondition(lambda self: self.cache.stats().reclaimable > 0)
    def evict(self, num_pages: int) -> None:
        free, reclaimable = self.pool.free, self.cache.stats().reclaimable
        freed = self.cache.reclaim(num_pages)
        assert freed == min(num_pages, reclaimable) == self.pool.free - free

    @rule(data=st.data())
    @precondition(lambda self: len(self.cache) > 3)
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.chains)))
        held = key in self.cache
        assert (self.cache.drop([key]) > 0) == held
        assert key not in self.cache

    def step(self, table: PageTable, runs: list[list[Token]], kept: list[int]) -> None:
        """Write one row for each run (history and path to the row), then keep some rows."""
        pages, length = list(table.pages), table.length
        try:
            with table.reserve(len(runs)) as reservation:
                self.rows.write(reservation.slots, [numbers(run)[-1] for run in runs])
                reservation.keep(kept)
        except OutOfPages:
            assert (table.pages, table.length) == (pages, length)
            assert self.cache.stats().reclaimable == 0, "a page was still to be had"
            return
        self.model[table] = runs[kept[-1]]

    def reuse(self, run: list[Token]) -> PageTable:
        ids, bits = halves(run)
        keys = keys_of(run)
        pages = self.cache.match(keys)
        length = min(len(pages) * SIZE, len(run))
        found = None
        if length < len(run):
            parent = keys[len(pages) - 1] if pages else ROOT
            found = self.cache.edge(parent, ids[length:], bits[length:])
        if found is not None:
            pages, length = [*pages, found[0]], length + found[1]
        table = PageTable(self.pool)
        table.adopt(pages, length)
        self.model[table] = run[:length]
        assert self.rows.of(table) == numbers(run[:length])
        if length < len(run):
            rest = [run[: index + 1] for index in range(length, len(run))]
            self.step(table, rest, list(range(len(rest))))
        return table

    @invariant()
    def counts_are_those_of_the_holders(self) -> None:
        entries = self.entries()
        holders = Counter(page for table in self.model for page in table.pages)
        cached = Counter(entry.page for entry in entries)
        assert set(cached.values()) <= {1}, "two entries on one page"
        holders.update(cached)
        for page in range(NUM_PAGES):
            assert self.pool.refs(page) == holders[page], page
        assert self.pool.used == len(holders)
        assert self.pool.free + self.pool.used == NUM_PAGES

    @invariant()
    def tables_hold_what_lists_hold(self) -> None:
        self.rows.poison_free_pages()
        for table, run in self.model.items():
            assert table.length == len(run)
            assert len(table.pages) == -(-len(run) // SIZE)
            assert self.rows.of(table) == numbers(run)

    @invariant()
    def cached_pages_hold_what_their_keys_say(self) -> None:
        for entry in self.entries():
            run, part = self.chains[entry.key], len(entry.ids)
            assert entry.key == page_key(entry.parent, entry.ids, entry.sampled)
            assert halves(run[-part:]) == (list(entry.ids), list(entry.sampled))
            slots = range(entry.page * SIZE, entry.page * SIZE + part)
            assert self.rows.read(slots) == numbers(run)[-part:]

    @invariant()
    def every_entry_stands_before_its_parent(self) -> None:
        entries = self.entries()
        place = {entry.key: index for index, entry in enumerate(entries)}
        for entry in entries:
            assert place[entry.key] < place.get(entry.parent, len(entries))
            assert entry in self.cache.children(entry.parent)

    def entries(self) -> list[Any]:
        return list(self.cache._entries.values())


@pytest.mark.parametrize("examples", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_order_of_operations(make_rows: Callable[[int], Any], examples: int):
    machine = type("BoundMachine", (Machine,), {"make_rows": staticmethod(make_rows)})
    case = machine.TestCase
    case.settings = settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=40,
        suppress_health_check=[HealthCheck.too_slow],
    )
    case().runTest()
