"""Pages of `kv.db`: what goes in comes out, byte for byte, or does not come out at all."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from chatkv.errors import ConfigError
from chatkv.kv.keys import fingerprint, root_key
from chatkv.kv.store import PageStore, Snapshot
from sessions.pages import SqlitePageStore, open_page_store


def raw(path, statement: str, *values):
    """Change the file behind the store's back."""
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


@pytest.fixture
def chain(pages, maker):
    """Three pages and a tail of two tokens, stored."""
    images = maker.chain(pages.root, list(range(14)))
    assert pages.write(images) == 4
    return images


def keys(images):
    return [image.key for image in images]


def test_it_is_a_page_store(pages):
    store: PageStore = pages
    assert store.find([]) == {}


def test_pages_come_back_as_they_were(pages, chain, maker, kv_path):
    assert list(pages.read(keys(chain))) == chain
    found = pages.find([b"x" * 32, *keys(chain)])
    assert list(found) == keys(chain)
    heads = [found[image.key] for image in chain]
    assert [(h.token_ids, h.sampled, h.chain_index, h.first_position, h.origin) for h in heads] == [
        (i.token_ids, i.sampled, i.chain_index, i.first_position, i.origin) for i in chain
    ]
    pages.close()
    again = maker.open(kv_path)
    assert again.root == pages.root
    assert list(again.read(keys(chain))) == chain
    assert (again.stats().pages, again.stats().tokens, again.stats().read_pages) == (4, 14, 4)
    assert again.take_notices() == []
    again.close()


def test_reading_stops_before_the_first_that_is_missing(pages, chain):
    wanted = [*keys(chain)[:2], b"x" * 32, *keys(chain)[2:]]
    assert list(pages.read(wanted)) == chain[:2]


def test_children_are_found_for_the_edge(pages, chain, maker):
    twin = maker.image(chain[0].key, 1, (4, 5, 99))
    sampled = maker.image(chain[0].key, 1, (4, 5, 6, 7), sampled=2)
    pages.write([twin, sampled])
    children = pages.children(chain[0].key)
    assert {head.key for head in children} == {chain[1].key, twin.key, sampled.key}
    assert {head.sampled for head in children} == {
        (False,) * 4,
        (False,) * 3,
        (False, False, True, True),
    }
    assert [head.key for head in pages.children(pages.root)] == [chain[0].key]


def test_what_is_held_is_left_alone(pages, chain, maker):
    again = maker.chain(pages.root, list(range(14)))
    assert keys(again) == keys(chain)
    assert again[0].payload != chain[0].payload
    assert pages.write(again) == 0
    assert list(pages.read(keys(chain))) == chain
    assert pages.stats().written_pages == 4


def test_a_tail_goes_when_its_full_successor_is_stored(pages, chain, maker):
    other = maker.image(chain[2].key, 3, (12, 99))
    full = maker.image(chain[2].key, 3, (12, 13, 14, 15))
    pages.write([other])
    assert pages.write([full]) == 1
    # (12, 13) is in the full page; (12, 99) is another continuation.
    assert {head.key for head in pages.children(chain[2].key)} == {other.key, full.key}


def test_a_tail_that_something_hangs_on_stays(pages, chain, maker, kv_path):
    tail = chain[3]
    raw(kv_path, "INSERT INTO chain_ops VALUES(?, ?, ?, '{}')", b"o" * 32, tail.key, pages.model.fp)
    pages.write([maker.image(chain[2].key, 3, (12, 13, 14, 15))])
    assert len(pages.children(chain[2].key)) == 2


def test_pages_that_could_never_be_read_are_refused(pages, maker):
    from dataclasses import replace

    good = maker.image(pages.root, 0, (1, 2, 3, 4))
    for bad in (
        replace(good, payload=good.payload[:-1]),
        replace(good, key=b"k" * 32),
        replace(good, parent_key=b"p" * 32),
        maker.image(pages.root, 0, (1, 2, 3, 4, 5)),
    ):
        with pytest.raises(ValueError, match=r"bytes for|not that of its ids|tokens in a page"):
            pages.write([bad])
    assert pages.stats().pages == 0


def test_keys_are_of_this_store_and_this_model(pages, maker, tmp_path, kv_path):
    identity = maker.IDENTITY
    assert pages.model.fp == fingerprint(identity)
    assert pages.root == root_key(pages.model.fp, pages.salt)
    elsewhere = maker.open(tmp_path / "other" / "kv.db")
    assert elsewhere.salt != pages.salt
    assert elsewhere.root != pages.root
    elsewhere.close()
    other_model = maker.open(kv_path, weights="two")
    assert other_model.salt == pages.salt
    assert other_model.root != pages.root
    image = maker.image(pages.root, 0, (1, 2, 3, 4))
    pages.write([image])
    # Even asked for the very key, another model gets nothing.
    assert other_model.find([image.key]) == {}
    assert list(other_model.read([image.key])) == []
    assert other_model.children(pages.root) == []
    other_model.close()
    with pytest.raises(ConfigError, match="codec"):
        SqlitePageStore(kv_path, identity, limit_bytes=1 << 30, codec="zip")  # type: ignore[arg-type]


def test_snapshots_outlive_their_pages(pages, chain):
    values = (1.5, -2.25, 0.1, 3e38, 0.0, -0.0, 1e-40, 7.0)
    import struct

    stored = struct.unpack("<8f", struct.pack("<8f", *values))
    snapshot = Snapshot(chain[3].key, 14, b"h" * 16, tuple(range(8)), stored, "cpu exact 1")
    pages.save_snapshot(snapshot)
    assert pages.snapshot(chain[3].key) == snapshot
    assert pages.snapshot(chain[2].key) is None
    changed = Snapshot(chain[3].key, 14, b"i" * 16, tuple(range(1, 9)), stored, "cpu exact 2")
    pages.save_snapshot(changed)
    assert pages.delete(keys(chain)) == 4
    assert pages.snapshot(chain[3].key) == changed
    assert (pages.stats().pages, pages.stats().snapshots) == (0, 1)


def test_delete_counts_what_was_held(pages, chain):
    assert pages.delete([chain[3].key, b"x" * 32]) == 1
    assert list(pages.read(keys(chain))) == chain[:3]
    assert pages.delete([]) == 0


def test_quarantine_hides_a_page_until_it_is_written_again(pages, chain, maker, kv_path):
    assert pages.quarantine(chain[1].key, "witness") == 1
    assert pages.quarantine(chain[1].key, "again") == 0
    assert pages.quarantine(b"x" * 32, "unknown") == 0
    assert list(pages.find(keys(chain))) == [chain[0].key, chain[2].key, chain[3].key]
    assert list(pages.read(keys(chain))) == chain[:1]
    assert pages.children(chain[0].key) == []
    other = maker.open(kv_path)
    assert list(other.read(keys(chain))) == chain[:1]
    other.close()
    anew = maker.image(chain[0].key, 1, chain[1].token_ids)
    assert pages.write([anew]) == 1
    assert list(pages.read(keys(chain))) == [chain[0], anew, *chain[2:]]
    assert pages.stats().quarantined == 0


def test_quarantine_of_all_that_was_built_on_a_page(pages, chain):
    assert pages.quarantine(chain[1].key, "witness", descendants=True) == 3
    assert list(pages.find(keys(chain))) == [chain[0].key]
    assert pages.stats().quarantined == 3


FLIPS = {
    "checksum": "UPDATE page_data SET data = zeroblob(length(data)) WHERE page_id = 2",
    "size": "UPDATE page_data SET data = substr(data, 2) WHERE page_id = 2",
    "no data": "DELETE FROM page_data WHERE page_id = 2",
    "ids": "UPDATE pages SET token_ids = zeroblob(16) WHERE id = 2",
    "ids, sampled": "UPDATE pages SET sampled = x'01' WHERE id = 2",
    "ids, spare bits": "UPDATE pages SET sampled = x'f0' WHERE id = 2",
    "ids, parent": "UPDATE pages SET parent_key = zeroblob(32) WHERE id = 2",
    "ids, count": "UPDATE pages SET num_tokens = 3, token_ids = zeroblob(12) WHERE id = 2",
    "checksum, crc": "UPDATE pages SET crc = crc + 1 WHERE id = 2",
    "size, wrong": "UPDATE pages SET num_bytes = 1 WHERE id = 2",
}


@pytest.mark.parametrize("reason", FLIPS)
def test_a_page_that_fails_a_check_is_a_miss(pages, chain, kv_path, maker, reason):
    raw(kv_path, FLIPS[reason])
    assert list(pages.read(keys(chain))) == chain[:1]
    assert chain[1].key not in pages.find(keys(chain))
    assert chain[2].key in pages.find(keys(chain))  # computed from good bytes
    assert pages.stats().quarantined == 1
    short = reason.partition(",")[0]
    assert pages.take_notices() == [f"A stored page failed a check ({short}); it is made anew."]
    pages.end_turn()
    assert pages.write([chain[1]]) == 1
    assert list(pages.read(keys(chain))) == chain


def test_every_flipped_bit_of_a_payload_is_caught(pages, chain, kv_path):
    size = len(chain[0].payload)
    for place in range(0, size, size // 16):
        flipped = bytearray(chain[0].payload)
        flipped[place] ^= 1 << place % 8
        raw(kv_path, "UPDATE page_data SET data = ? WHERE page_id = 1", bytes(flipped))
        assert list(pages.read([chain[0].key])) == []
        assert pages.write([chain[0]]) == 1
        raw(kv_path, "UPDATE pages SET id = 1 WHERE key = ?", chain[0].key)
        raw(kv_path, "UPDATE page_data SET page_id = 1 WHERE page_id NOT IN (SELECT id FROM pages)")
        assert list(pages.read([chain[0].key])) == [chain[0]]


def test_swapped_payloads_are_caught_by_the_key_in_the_checksum(pages, chain, kv_path):
    one, two = chain[0].payload, chain[1].payload
    raw(kv_path, "UPDATE page_data SET data = ? WHERE page_id = 1", two)
    raw(kv_path, "UPDATE page_data SET data = ? WHERE page_id = 2", one)
    raw(
        kv_path,
        "UPDATE pages SET crc = (SELECT o.crc FROM pages o WHERE o.id = 3 - pages.id)"
        " WHERE id IN (1, 2)",
    )
    assert list(pages.read(keys(chain))) == []


def test_a_store_without_a_model_does_upkeep_only(pages, chain, kv_path):
    upkeep = SqlitePageStore(kv_path, limit_bytes=1 << 30)
    assert upkeep.stats().pages == 4
    assert upkeep.purge([i for image in chain for i in image.token_ids], 0) == 4
    for call in (lambda: upkeep.find([b"x" * 32]), lambda: upkeep.write(chain)):
        with pytest.raises(ValueError, match=r"without a model|tokens in a page"):
            call()
    upkeep.close()
    assert pages.find(keys(chain)) == {}


def test_one_thread_writes_while_another_reads(pages, maker):
    images = maker.chain(pages.root, list(range(400)))
    wrong: list[object] = []
    done = threading.Event()

    def reader() -> None:
        while not done.is_set():
            for count, image in enumerate(pages.read(keys(images))):
                if image != images[count]:
                    wrong.append(image)
            pages.find(keys(images))
            pages.children(images[0].key)

    thread = threading.Thread(target=reader)
    thread.start()
    for start in range(0, len(images), 8):
        pages.write(images[start : start + 8])
        pages.end_turn()
    pages.shrink(0)
    pages.write(images)
    done.set()
    thread.join()
    assert wrong == []
    assert list(pages.read(keys(images))) == images
    assert pages.take_notices() == []


def test_the_default_budget_counts_what_the_cache_holds_as_free(tmp_path, maker, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100 << 30))
    opened = open_page_store(tmp_path / "a" / "b" / "kv.db", maker.IDENTITY, context_bytes=1 << 20)
    assert opened.store is not None
    assert (opened.store.limit_bytes, opened.notice) == (4 << 30, "")
    opened.store.close()
    opened = open_page_store(
        tmp_path / "a" / "b" / "kv.db", maker.IDENTITY, context_bytes=3 << 30, limit_bytes=2 << 30
    )
    assert opened.store is not None
    assert opened.notice == (
        "One full context of this model takes 3,072 MiB on disk, and the page cache may use "
        "2,048 MiB: long conversations will be computed again in part."
    )
    opened.store.close()
