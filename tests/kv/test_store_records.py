"""Records of the page store refuse what cannot be a page."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from chatkv.kv.keys import page_key
from chatkv.kv.store import PageHead, PageImage, Snapshot

PARENT = bytes(range(32))
IDS, SAMPLED = (5, 6, 7), (False, True, True)
IMAGE = PageImage(page_key(PARENT, IDS, SAMPLED), PARENT, 3, 48, IDS, SAMPLED, "mixed", b"rows")
SNAPSHOT = Snapshot(IMAGE.key, 51, bytes(16), tuple(range(8)), (0.5,) * 8, "cpu exact")


def test_image_is_a_head_with_a_payload():
    assert isinstance(IMAGE, PageHead)
    assert IMAGE.num_tokens == 3
    assert IMAGE.payload == b"rows"
    assert type(IMAGE.head) is PageHead
    assert all(getattr(IMAGE.head, f.name) == getattr(IMAGE, f.name) for f in fields(PageHead))


def test_key_covers_parent_ids_and_bits():
    assert IMAGE.key_fits
    assert not replace(IMAGE, parent_key=bytes(32)).key_fits
    assert not replace(IMAGE, token_ids=(5, 6, 8)).key_fits
    assert not replace(IMAGE, sampled=(True, True, True)).key_fits


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"parent_key": bytes(33)},
        {"token_ids": (), "sampled": ()},
        {"sampled": (True,)},
        {"chain_index": -1},
        {"first_position": -1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_impossible_pages(change: dict[str, object]):
    with pytest.raises(ValueError, match=r"\d"):
        replace(IMAGE, **change)


@pytest.mark.parametrize(
    "change",
    [{"head_key": b""}, {"logits_hash": bytes(32)}, {"top_ids": (1,)}, {"num_tokens": 0}],
    ids=lambda change: next(iter(change)),
)
def test_impossible_snapshots(change: dict[str, object]):
    with pytest.raises(ValueError, match=r"\d"):
        replace(SNAPSHOT, **change)
