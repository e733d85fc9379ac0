"""The prefix cache finds what was computed and costs nobody a page that is still needed."""

from __future__ import annotations

from typing import Any

import pytest

from chatkv.errors import OutOfPages
from chatkv.kv.keys import page_keys, root_key
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.table import PageTable

ROOT = root_key(bytes(32), b"salt")


def keys_of(ids: list[int], root: bytes = ROOT) -> list[bytes]:
    return page_keys(root, ids, [False] * len(ids), 4)


def stored(rows: Any, cache: PrefixCache, ids: list[int]) -> PageTable:
    """A table that computed `ids` (its rows are the ids) and put all its pages into the cache."""
    table = PageTable(rows.pool)
    rows.append(table, ids)
    parent = ROOT
    for index, key in enumerate(keys_of(ids)):
        part = ids[index * 4 : index * 4 + 4]
        cache.insert(key, parent, table.pages[index], part, [False] * len(part))
        parent = key
    return table


def test_match_full_pages_then_a_tail(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, list(range(10)))
    pages = cache.match(keys_of(list(range(10))))
    assert pages == table.pages
    assert [rows.pool.refs(page) for page in pages] == [3, 3, 3]
    assert cache.match(keys_of(list(range(9)))) == table.pages[:2], "a tail of other length"
    assert cache.match(keys_of([*range(7), 70, 8])) == table.pages[:1]
    assert cache.match(keys_of([9])) == []
    assert cache.stats().hits == 6


def test_same_salt_hits_and_other_salt_misses(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, [1, 2, 3, 4, 5])
    assert cache.match(keys_of([1, 2, 3, 4, 5], root_key(bytes(32), b"salt"))) == table.pages
    assert cache.match(keys_of([1, 2, 3, 4, 5], root_key(bytes(32), b"other"))) == []


def test_pages_outlive_their_table_and_a_cached_tail_is_never_written(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, [1, 2, 3, 4, 5, 6])
    tail = table.pages[1]
    rows.append(table, [7])
    assert table.pages[1] != tail
    table.release()
    assert rows.pool.used == 2
    for last in (70, 71):
        again = PageTable(rows.pool)
        again.adopt(cache.match(keys_of([1, 2, 3, 4, 5, 6])), 6)
        rows.append(again, [last])
        assert rows.of(again) == [1, 2, 3, 4, 5, 6, last]
    assert rows.read(range(tail * 4, tail * 4 + 2)) == [5, 6]


def test_edge_finds_the_page_that_shares_most(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    other = stored(rows, cache, [1, 2, 3, 4, 5, 6, 70])
    parent = keys_of([1, 2, 3, 4])[0]
    assert [child.page for child in cache.children(parent)] == [table.pages[1], other.pages[1]]
    assert cache.edge(parent, [5, 6, 7, 9, 9], [False] * 5) == (table.pages[1], 3)
    assert cache.edge(parent, [5, 6, 70, 8], [False] * 4) == (other.pages[1], 3)
    assert cache.edge(parent, [5, 6, 7], [False, True, False]) == (table.pages[1], 1)
    assert cache.edge(parent, [9], [False]) is None
    assert cache.edge(parent, [5], [True]) is None
    assert cache.edge(bytes(32), [5], [False]) is None
    assert rows.pool.refs(table.pages[1]) == 4


def test_edge_page_is_copied_before_the_fork_writes(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    ids = [1, 2, 3, 4, 5, 6, 70, 80, 90]
    pages = cache.match(keys_of(ids))
    found = cache.edge(keys_of(ids)[0], ids[4:], [False] * 5)
    assert found is not None
    fork = PageTable(rows.pool)
    fork.adopt([*pages, found[0]], 4 + found[1])
    rows.append(fork, [70, 80, 90])
    assert rows.of(fork) == ids
    assert rows.of(table) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_tail_goes_when_a_page_continues_it(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, [1, 2, 3, 4, 5, 6])
    tail_key = keys_of([1, 2, 3, 4, 5, 6])[1]
    tail = table.pages[1]
    rows.append(table, [7, 8])
    full = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.insert(full[1], full[0], table.pages[1], [5, 6, 7, 8], [False] * 4)
    assert tail_key not in cache
    assert rows.pool.refs(tail) == 0
    table.truncate(6)
    assert not cache.insert(tail_key, full[0], table.pages[1], [5, 6], [False] * 2)
    assert (len(cache), tail_key in cache) == (2, False)
    assert cache.insert(bytes(32), full[0], table.pages[1], [5, 6], [True] * 2), "other bits"


def test_known_key_keeps_its_page(rows: Any):
    cache = PrefixCache(rows.pool)
    table = stored(rows, cache, [1, 2, 3, 4])
    twin = stored(rows, cache, [1, 2, 3, 4])
    assert cache.match(keys_of([1, 2, 3, 4])) == table.pages
    assert rows.pool.refs(twin.pages[0]) == 1


@pytest.mark.parametrize("ids", [[], [1, 2, 3, 4, 5]], ids=len)
def test_impossible_pages_are_refused(rows: Any, ids: list[int]):
    cache = PrefixCache(rows.pool)
    (page,) = rows.pool.take()
    with pytest.raises(ValueError, match="in a page"):
        cache.insert(ROOT, ROOT, page, ids, [False] * len(ids))
    with pytest.raises(ValueError, match="2 ids and 1 sampled bits"):
        cache.insert(ROOT, ROOT, page, [1, 2], [False])
    assert rows.pool.refs(page) == 1


def test_evicts_least_recently_used_leaves_first(rows: Any):
    cache = PrefixCache(rows.pool)
    old, new = list(range(12)), [*range(4), *range(40, 48)]
    stored(rows, cache, old).release()
    stored(rows, cache, new).release()
    for page in cache.match(keys_of(old)):  # the older one is used again
        rows.pool.release(page)
    left = [set(keys_of(old)) | set(keys_of(new))]
    for gone in [keys_of(new)[2], keys_of(new)[1], *reversed(keys_of(old))]:
        assert cache.reclaim(1) == 1
        left.append(left[-1] - {gone})
        assert {key for key in left[0] if key in cache} == left[-1]
    assert cache.reclaim(1) == 0
    assert rows.pool.free == 12
    assert cache.stats().evicted == 5


def test_reclaim_leaves_pages_that_others_hold(rows: Any):
    cache = PrefixCache(rows.pool)
    rows.pool.reclaim = cache.reclaim
    live = stored(rows, cache, list(range(16)))
    stored(rows, cache, list(range(100, 124))).release()
    assert (rows.pool.free, cache.stats().reclaimable) == (2, 6)
    rows.append(live, list(range(16, 32)))
    assert (rows.pool.free, cache.stats().reclaimable) == (0, 4)
    assert rows.of(live) == list(range(32))
    assert cache.match(keys_of(list(range(16)))) == live.pages[:4]
    with pytest.raises(OutOfPages, match="Need 5 pages of 4 tokens, but 4"):
        rows.append(live, [0] * 17)
    assert rows.of(live) == list(range(32))
    rows.append(live, [0] * 16)
    assert rows.pool.free == 0


def test_reclaim_reaches_pages_behind_which_others_hold_some(rows: Any):
    cache = PrefixCache(rows.pool)
    first, twin = PageTable(rows.pool), PageTable(rows.pool)
    ids = list(range(8))
    rows.append(first, ids)
    rows.append(twin, ids)
    keys = keys_of(ids)
    cache.insert(keys[0], ROOT, first.pages[0], ids[:4], [False] * 4)
    cache.insert(keys[1], keys[0], twin.pages[1], ids[4:], [False] * 4)
    first.release()
    assert cache.reclaim(5) == 1
    assert cache.match(keys) == []
    page = cache.hold(keys[1], keys[0], ids[4:], [False] * 4)
    assert page == twin.pages[1], "found by its key, though what stood before it is gone"
    rows.pool.release(page)
    assert rows.of(twin) == ids
    twin.release()
    assert cache.reclaim(12) == 1
    assert rows.pool.free == 12


def test_drop_takes_all_behind(rows: Any):
    cache = PrefixCache(rows.pool)
    stored(rows, cache, list(range(12))).release()
    stored(rows, cache, [*range(8), 80, 81]).release()
    keys = keys_of(list(range(12)))
    assert cache.drop([bytes(32)]) == 0
    assert cache.drop([keys[2], keys[1], keys[1]]) == 3
    assert rows.pool.used == len(cache) == 1
    assert cache.clear() == 1
    assert rows.pool.free == 12
    assert cache.children(ROOT) == []
