"""Budget and purge: leaf first, nothing unreachable stays, and a purge takes all that it should."""

from __future__ import annotations

import sqlite3

import pytest

from chatkv.kv.keys import op_key
from chatkv.kv.store import Snapshot
from sessions.eviction import used_bytes


def keys(images):
    return [image.key for image in images]


def held(pages, images):
    found = pages.find(keys(images))
    return [image.key in found for image in images]


def raw(path, statement: str, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


def one_less(pages) -> None:
    """Evict a single batch by asking for a little less than is used."""
    writer = pages._disk._file.writer
    pages.shrink(used_bytes(writer) - 1)


def test_shrinking_keeps_every_prefix_usable(pages, maker):
    trunk = maker.chain(pages.root, list(range(400)))
    left = maker.chain(trunk[-1].key, list(range(1000, 1400)))
    right = maker.chain(trunk[-1].key, list(range(2000, 2400)))
    pages.write([*trunk, *left, *right])
    pages.find(keys(left))  # used last
    while pages.stats().pages:
        one_less(pages)
        for chain in (trunk, left, right):
            there = held_quietly(pages, chain)
            assert there == sorted(there, reverse=True)  # a prefix of each chain
        if any(held_quietly(pages, left)):
            assert all(held_quietly(pages, trunk))
        if any(held_quietly(pages, right)):
            assert all(held_quietly(pages, left))  # the branch that was used less went first


def held_quietly(pages, images):
    """Like `held`, without counting as a use."""
    rows = pages._disk.ask(lambda db: db.execute("SELECT key FROM pages").fetchall(), [])
    there = {row[0] for row in rows}
    return [image.key in there for image in images]


def test_quarantined_and_unreachable_pages_go_first(pages, maker, kv_path):
    good = maker.chain(pages.root, list(range(400)))
    bad = maker.chain(pages.root, list(range(1000, 1400)))
    orphans = maker.chain(b"p" * 32, list(range(2000, 2400)))
    pages.write([*good, *bad, *orphans])
    pages.quarantine(bad[0].key, "checksum", descendants=True)
    pages.find(keys(orphans))
    # The good chain was used least, and still it is the last to go.
    one_less(pages)
    assert held_quietly(pages, bad) == [False] * 100
    one_less(pages)
    assert held_quietly(pages, orphans) == [False] * 100
    assert held_quietly(pages, good) == [True] * 100


def test_an_op_holds_its_parent_and_goes_when_nothing_hangs_on_it(pages, maker, kv_path):
    base = maker.chain(pages.root, [1, 2, 3, 4])
    op = {"at": 4, "drop": [[0, 2]]}
    key = op_key(base[0].key, op)
    raw(kv_path, "INSERT INTO chain_ops VALUES(?, ?, ?, '{}')", key, base[0].key, pages.model.fp)
    behind = maker.chain(key, [5, 6, 7, 8])
    pages.write([*base, *behind])
    one_less(pages)
    assert pages.shrink(0) in (0, 1, 2)
    assert pages.stats().pages == 0
    rows = pages._disk.ask(lambda db: db.execute("SELECT * FROM chain_ops").fetchall(), [1])
    assert rows == []


def test_the_budget_is_kept_while_writing(kv_path, maker):
    limit = 4 << 20
    pages = maker.open(kv_path, limit_bytes=limit)
    writer = pages._disk._file.writer
    for number in range(60):
        chain = maker.chain(pages.root, list(range(10_000 * number, 10_000 * number + 128)))
        assert pages.write(chain) == 32
        assert used_bytes(writer) <= limit + (1 << 20)
        assert all(held(pages, chain))
    assert pages.stats().evicted_pages > 0
    assert pages.saving
    pages.close()
    assert kv_path.stat().st_size < limit * 9 // 8 + (5 << 20)


def test_the_file_is_never_more_than_a_twentieth_over_the_budget(kv_path, maker):
    """Pages of the size of the default model's, whole ones and tails, far more than fit."""
    maker.TOKENS, maker.TOKEN_BYTES = 16, 30 * 2 * 3 * 64 * 2
    maker.IDENTITY = {**maker.IDENTITY, "layers": 30, "kv_heads": 3, "page_tokens": 16}
    limit, largest = 24 << 20, 0
    pages = maker.open(kv_path, limit_bytes=limit)
    for number in range(20):
        start, length = 1000 * number, 16 * (number % 7) + 1 + number % 16
        pages.write(maker.chain(pages.root, list(range(start, start + length))))
        pages.end_turn()
        largest = max(largest, kv_path.stat().st_size)
    assert pages.stats().evicted_pages > 5
    pages.close()
    assert limit // 2 < max(largest, kv_path.stat().st_size) <= limit * 105 // 100


def test_what_cannot_fit_is_not_written(kv_path, maker):
    pages = maker.open(kv_path, limit_bytes=100_000)
    assert pages.write(maker.chain(pages.root, [1, 2, 3, 4])) == 0
    (notice,) = pages.take_notices()
    assert "2,048 bytes do not fit the budget of 100,000" in notice
    assert not pages.saving
    pages.close()


def test_use_is_counted_and_not_timed(kv_path, maker, monkeypatch):
    """A clock that goes back changes nothing, and another process goes on counting."""
    monkeypatch.setattr("time.time_ns", lambda: 0)
    pages = maker.open(kv_path)
    first = maker.chain(pages.root, list(range(400)))
    second = maker.chain(pages.root, list(range(1000, 1400)))
    pages.write(first)
    pages.write(second)
    pages.close()
    pages = maker.open(kv_path)
    pages.find(keys(first))
    pages.close()
    pages = maker.open(kv_path)
    one_less(pages)
    assert all(held_quietly(pages, first))
    assert not all(held_quietly(pages, second))
    pages.close()


def test_use_counts_across_processes(kv_path, maker):
    pages, other = maker.open(kv_path), maker.open(kv_path)
    old = maker.chain(pages.root, list(range(400)))
    pages.write(old)
    for _ in range(50):
        other.find(keys(old))
    other.end_turn()
    fresh = maker.chain(pages.root, list(range(1000, 1400)))
    pages.write(fresh)
    one_less(other)
    assert all(held_quietly(pages, fresh))
    assert not all(held_quietly(pages, old))
    pages.close()
    other.close()


@pytest.fixture
def talked(pages, maker):
    """A path of 14 ids as pages, its sibling from id 6 on, and a snapshot at each end."""
    path = list(range(14))
    sibling = [*range(6), *range(100, 108)]
    chain, other = maker.chain(pages.root, path), maker.chain(pages.root, sibling)
    pages.write([*chain, *other])
    for end in (chain[0], chain[-1], other[-1]):
        pages.save_snapshot(Snapshot(end.key, 14, b"h" * 16, (0,) * 8, (0.0,) * 8, "cpu"))
    return path, chain, other


def test_a_purge_takes_the_path_and_leaves_the_sibling(pages, talked):
    path, chain, other = talked
    assert pages.purge(path, 6) == 3
    assert held(pages, chain) == [True, False, False, False]
    assert held(pages, other) == [True, True, True, True]
    assert pages.snapshot(chain[0].key) is not None
    assert pages.snapshot(chain[-1].key) is None
    assert pages.snapshot(other[-1].key) is not None
    assert pages.purge(path, 6) == 0


def test_a_purge_takes_tails_sampled_twins_and_what_came_after(pages, talked, maker):
    path, chain, other = talked
    tail = maker.image(chain[0].key, 1, (4, 5, 6))
    short = maker.image(chain[0].key, 1, (4, 5))
    twin = maker.image(chain[0].key, 1, (4, 5, 6, 7), sampled=1)
    after_twin = maker.image(twin.key, 2, (8, 9, 10, 11))
    beyond = maker.image(chain[2].key, 3, (12, 13, 77, 78))
    elsewhere = maker.image(beyond.key, 4, (1, 2, 3, 4))
    pages._disk.save(lambda db: db.execute("DELETE FROM pages WHERE key = ?", (chain[3].key,)), 0)
    pages.write([tail, twin, after_twin, beyond, elsewhere])
    pages.write([short])
    pages.purge(path, 6)
    assert held(pages, [tail, twin, after_twin, beyond, elsewhere]) == [False] * 5
    assert held(pages, [short]) == [True]  # its two ids are the sibling's too
    assert held(pages, other) == [True] * 4


def test_a_purge_goes_through_ops(pages, talked, maker, kv_path):
    path, chain, _ = talked
    key = op_key(chain[1].key, {"at": 8})
    raw(kv_path, "INSERT INTO chain_ops VALUES(?, ?, ?, '{}')", key, chain[1].key, pages.model.fp)
    behind = maker.image(key, 3, (8, 9))
    pages.write([behind])
    pages.purge(path, 6)
    assert held(pages, [behind]) == [False]
    assert pages._disk.ask(lambda db: db.execute("SELECT * FROM chain_ops").fetchall(), [1]) == []


def test_a_purge_looks_behind_ops_that_stay(pages, talked, maker, kv_path):
    path, chain, _ = talked
    key = op_key(chain[0].key, {"at": 4})
    raw(kv_path, "INSERT INTO chain_ops VALUES(?, ?, ?, '{}')", key, chain[0].key, pages.model.fp)
    gone = maker.image(key, 1, (4, 5, 6, 7))
    stays = maker.image(key, 1, (4, 5, 100))
    pages.write([gone, stays])
    pages.purge(path, 6)
    assert held(pages, [gone, stays]) == [False, True]


def test_a_purge_reaches_every_model_and_root(pages, talked, maker, kv_path):
    path, _, _ = talked
    second = maker.open(kv_path, weights="two")
    images = maker.chain(second.root, path)
    second.write(images)
    assert pages.purge(path, 0) == 4 + 4 + 3  # the sibling's chain hangs on the first page
    assert held(second, images) == [False] * 4
    second.close()


def part(image):
    """Bytes that lie in one page of SQLite."""
    return image.payload[100_000:100_100]


def test_purged_bytes_are_gone_from_the_file(kv_path, maker):
    maker.TOKEN_BYTES = 2 * 2 * 1 * 8192 * 2  # so that a page fills pages of SQLite
    pages = maker.open(kv_path, head_dim=8192)
    secret = maker.chain(pages.root, list(range(40)))
    public = maker.chain(pages.root, list(range(500, 540)))
    pages.write([*secret, *public])
    aside = kv_path.with_name("kv.db.damaged")
    aside.write_bytes(b"left over")
    pages.end_turn()
    assert part(secret[3]) in kv_path.read_bytes()
    pages.purge(list(range(40)), 0)
    content = kv_path.read_bytes() + kv_path.with_name("kv.db-wal").read_bytes()
    assert not any(part(image) in content for image in secret)
    assert all(part(image) in content for image in public)
    assert not aside.exists()
    assert list(pages.read(keys(public))) == public
    pages.close()


def test_a_circle_in_a_damaged_file_ends(pages, maker, kv_path):
    (image,) = maker.chain(pages.root, [1, 2, 3, 4])
    pages.write([image])
    raw(kv_path, "UPDATE pages SET parent_key = key")
    raw(kv_path, "INSERT OR IGNORE INTO roots VALUES(?, ?, 'x')", image.key, pages.model.fp)
    assert pages.purge([1, 2, 3, 4], 0) == 1
    assert pages.quarantine(image.key, "x", descendants=True) == 0


def test_space_is_given_back_when_much_is_free(kv_path, maker, monkeypatch):
    monkeypatch.setattr("sessions.cachefile.VACUUM_FREE_BYTES", 1 << 20)
    pages = maker.open(kv_path)
    pages.write(maker.chain(pages.root, list(range(2000))))
    pages.end_turn()
    before = kv_path.stat().st_size
    pages.shrink(0)
    pages.end_turn()
    pages.end_turn()
    assert kv_path.stat().st_size < before // 2
    assert pages.take_notices() == []
    pages.close()
