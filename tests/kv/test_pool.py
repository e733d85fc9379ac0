"""The pool counts holders, never hands out a held page, and stores images bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chatkv.errors import OutOfPages
from chatkv.kv.pool import PagePool

LAYERS, HEADS, DIM, SIZE = 3, 2, 8, 4


def make_pool(num_pages: int = 6, dtype: torch.dtype = torch.bfloat16) -> PagePool:
    """A pool whose every slot holds NaN, so that rows nobody wrote are seen."""
    pool = PagePool(
        num_pages=num_pages,
        page_size=SIZE,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
    )
    pool.data.fill_(torch.nan)
    return pool


def fill(pool: PagePool, page: int, seed: int = 0) -> torch.Tensor:
    """Write random rows to a page; returns them, [L, 2, HK, S, D]."""
    rows = torch.randn(LAYERS, 2, HEADS, SIZE, DIM, generator=torch.manual_seed(seed))
    pool.data[:, page] = rows.to(pool.data.dtype)
    return pool.data[:, page].clone()


def test_take_share_release():
    pool = make_pool()
    first, second = pool.take(2)
    assert (pool.free, pool.used) == (4, 2)
    assert pool.share(first) == first
    assert (pool.refs(first), pool.refs(second)) == (2, 1)
    pool.release(first)
    assert pool.used == 2
    pool.release(first)
    assert (pool.free, pool.used, pool.refs(first)) == (5, 1, 0)
    assert len({second, *pool.take(5)}) == 6


def test_release_twice_and_sharing_a_free_page_are_bugs():
    pool = make_pool()
    (page,) = pool.take()
    pool.release(page)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(page)
    with pytest.raises(AssertionError, match="free"):
        pool.share(page)
    with pytest.raises(AssertionError, match="free"):
        pool.image(page, 1)
    assert pool.free == 6


def test_out_of_pages_takes_nothing():
    pool = make_pool()
    pool.take(4)
    with pytest.raises(OutOfPages, match="Need 3 pages of 4 tokens, but 2 are free"):
        pool.take(3)
    assert pool.free == 2


def test_reclaim_is_asked_for_what_is_missing_and_only_then():
    pool = make_pool()
    held = pool.take(5)
    asked: list[int] = []

    def reclaim(missing: int) -> int:
        asked.append(missing)
        pool.release(held.pop())
        return 1

    pool.reclaim = reclaim
    pool.take(1)
    assert asked == []
    pool.take(1)
    assert asked == [1]
    with pytest.raises(OutOfPages, match="Need 3 pages of 4 tokens, but 1 are free"):
        pool.take(3)
    assert asked == [1, 3]


def test_copy_has_the_same_bits_and_one_holder():
    pool = make_pool()
    pool.take(2)
    (src,) = pool.take()
    rows = fill(pool, src)
    dst = pool.copy(src)
    assert dst != src
    assert (pool.refs(src), pool.refs(dst)) == (1, 1)
    assert torch.equal(pool.data[:, dst], rows)
    pool.data[:, dst] = 0
    assert torch.equal(pool.data[:, src], rows)


def test_copy_does_not_reclaim_its_own_source():
    pool = make_pool(num_pages=2)
    src, other = pool.take(2)
    rows = fill(pool, src)

    def reclaim(missing: int) -> int:
        freed = [page for page in (src, other) if pool.refs(page) == 1]
        for page in freed:
            pool.release(page)
        return len(freed)

    pool.reclaim = reclaim
    dst = pool.copy(src)
    assert dst == other
    assert torch.equal(pool.data[:, dst], rows)


def test_a_shared_page_is_not_written():
    pool = make_pool()
    src, dst = pool.take(2)
    payload = pool.image(src, 1)
    pool.share(dst)
    with pytest.raises(AssertionError, match="2 holders"):
        pool.copy_into(src, dst)
    with pytest.raises(AssertionError, match="2 holders"):
        pool.load(dst, payload, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", range(1, SIZE + 1))
def test_image_round_trip(num_tokens: int, dtype: torch.dtype):
    pool = make_pool(dtype=dtype)
    src, dst = pool.take(2)
    rows = fill(pool, src)
    payload = pool.image(src, num_tokens)
    assert len(payload) == pool.payload_bytes(num_tokens)
    pool.load(dst, payload, num_tokens)
    assert torch.equal(pool.data[:, dst, :, :, :num_tokens], rows[..., :num_tokens, :])
    assert pool.data[:, dst, :, :, num_tokens:].isnan().all()
    assert pool.image(dst, num_tokens) == payload


def test_image_is_layer_major_and_keeps_every_bit_pattern():
    pool = make_pool(dtype=torch.bfloat16)
    (page,) = pool.take()
    bits = np.arange(LAYERS * 2 * HEADS * SIZE * DIM, dtype=np.int16) * 401  # NaN, inf, -0 too
    rows = bits.reshape(LAYERS, 2, HEADS, SIZE, DIM)
    pool.data[:, page] = torch.from_numpy(rows).view(torch.bfloat16)
    assert pool.image(page, SIZE) == bits.astype("<i2").tobytes()
    assert pool.image(page, 3) == rows[..., :3, :].astype("<i2").tobytes()


@pytest.mark.parametrize("num_tokens", [-1, 0, SIZE + 1])
def test_no_image_of_rows_that_are_not_there(num_tokens: int):
    pool = make_pool()
    (page,) = pool.take()
    with pytest.raises(ValueError, match="tokens in a page"):
        pool.image(page, num_tokens)
    with pytest.raises(ValueError, match="tokens in a page"):
        pool.load(page, b"", num_tokens)


def test_load_refuses_every_wrong_size():
    pool = make_pool()
    src, dst = pool.take(2)
    fill(pool, src)
    before = fill(pool, dst, seed=1)
    payload = pool.image(src, 2)
    longer = payload + pool.image(src, 3)
    for length in {*range(len(longer) + 1)} - {len(payload)}:
        with pytest.raises(ValueError, match=f"^{length} bytes for 2 tokens of 192 bytes"):
            pool.load(dst, longer[:length], 2)
    assert torch.equal(pool.data[:, dst], before)
    pool.load(dst, memoryview(payload), 2)
    assert pool.image(dst, 2) == payload


def test_impossible_pools():
    for num_pages, page_size in [(0, 16), (1, 0), (1, 12)]:
        with pytest.raises(ValueError, match="power of two"):
            PagePool(
                num_pages=num_pages, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=2
            )


def test_an_image_owns_all_state_of_a_page():
    """A new buffer in the pool has to go into the image too, and then into this set."""
    tensors = {name for name, value in vars(make_pool()).items() if torch.is_tensor(value)}
    assert tensors == {"data"}
