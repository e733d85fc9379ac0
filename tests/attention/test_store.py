"""Rows go where their slots say, and bits are kept; the fast way and the plain way agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.attention.reference import dequantise
from chatkv.attention.store import (
    compact,
    compact_plain,
    copy_page,
    quantise,
    write_rows,
    write_rows_plain,
)

CODES = [torch.int8, torch.float8_e4m3fn, torch.uint8]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, *CODES]
LAYERS, PAGES, HEADS, SIZE, DIM = 2, 5, 3, 16, 64


def random_pages(dtype, layers=LAYERS):
    """Pages of random bytes, whatever they mean, and scales."""
    width = DIM // 2 if dtype == torch.uint8 else DIM
    shape = (layers, PAGES, 2, HEADS, SIZE, width * dtype.itemsize)
    pages = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    per_slot = DIM // 32 if dtype == torch.uint8 else 1
    scales = torch.rand(*pages.shape[:5], per_slot).half() if dtype in CODES else None
    return pages, scales


def same(a, b):
    if a is None:
        return b is None
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def clone(*tensors):
    return [None if tensor is None else tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_rows(dtype):
    pages, scales = random_pages(dtype, layers=1)
    pages, scales = pages[0], None if scales is None else scales[0]
    kind = torch.bfloat16 if dtype in CODES else dtype
    k, v = torch.randn(4, HEADS, DIM).to(kind), torch.randn(4, HEADS, DIM).to(kind)
    slots = torch.tensor([17, -1, 78, 0])
    before, plain = clone(pages, scales), clone(pages, scales)
    write_rows(k, v, pages, scales, slots)
    write_rows_plain(k, v, *plain, slots)
    assert same(pages, plain[0])
    assert same(scales, plain[1])
    for row, (page, offset) in {0: (1, 1), 2: (4, 14), 3: (0, 0)}.items():
        stored = pages[page, :, :, offset]
        shared = None if scales is None else scales[page, :, :, offset]
        step = 0 if shared is None else shared.float().amax()
        error = (
            (dequantise(stored, shared, torch.float32) - torch.stack([k, v], 1)[row]).abs().max()
        )
        # Half a step; fp8 has three bits behind the leading one.
        limit = {torch.float8_e4m3fn: 16.0}.get(dtype, 0.5) * step
        assert error <= limit * 1.001
        pages[page, :, :, offset] = before[0][page, :, :, offset]
    assert same(pages, before[0])


def test_write_rows_into_pages_that_are_not_contiguous():
    pages, _ = random_pages(torch.bfloat16)
    k, v = torch.randn(2, 2, HEADS, DIM).bfloat16().unbind(0)
    strided, plain = pages.transpose(0, 1)[:, 0], pages[0].clone()
    write_rows(k, v, strided, None, torch.tensor([3, 40]))
    write_rows_plain(k, v, plain, None, torch.tensor([3, 40]))
    assert same(pages[0], plain)


def test_codes_are_rounded_with_the_stored_scale_to_even():
    rows = torch.tensor([127.0, 1.5, 2.5, -0.5]).repeat(16)
    codes, scales = quantise(rows, torch.int8)
    assert scales.tolist() == [1.0]
    assert codes[:4].tolist() == [127, 2, 2, 0]


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-12, 1e30], ids=str)
def test_rows_of_nothing_and_of_too_much_stay_finite(dtype, value):
    codes, scales = quantise(torch.full((2, DIM), value), dtype)
    values = dequantise(codes, scales, torch.float32)
    assert torch.isfinite(values).all()
    if value < 1:
        assert not values.any()
        assert not scales.any()


def test_int4_halves_share_no_scale():
    row = torch.cat([torch.full((32,), 0.7), torch.full((32,), -70.0)])
    codes, scales = quantise(row, torch.uint8)
    assert codes.shape == (32,)
    assert set(codes.tolist()) == {15 | 1 << 4}
    torch.testing.assert_close(scales, torch.tensor([0.1, 10.0]).half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compact_moves_the_path_down(dtype):
    pages, scales = random_pages(dtype)
    before, plain = clone(pages, scales), clone(pages, scales)
    # Slots 30.. of a table with pages 3, 1: rows 0, 2, 5 of the step become 30, 31, 32.
    src, dst = torch.tensor([62, 16, 19]), torch.tensor([62, 63, 16])
    compact(pages, scales, src, dst)
    compact_plain(*plain, src, dst)
    for kept, old, other in zip((pages, scales), before, plain, strict=True):
        assert same(kept, other)
        if kept is not None:
            rows = kept[:, dst // SIZE, :, :, dst % SIZE]
            assert same(rows, old[:, src // SIZE, :, :, src % SIZE])
            kept[:, dst // SIZE, :, :, dst % SIZE] = old[:, dst // SIZE, :, :, dst % SIZE]
            assert same(kept, old)


@settings(max_examples=50)
@given(st.data())
def test_compact_survives_any_overlap(data):
    slots = st.integers(0, PAGES * SIZE - 1)
    dst = data.draw(st.lists(slots, unique=True, max_size=12))
    src = data.draw(st.lists(slots, min_size=len(dst), max_size=len(dst)))
    pages, _ = random_pages(torch.bfloat16)
    expected = pages.clone()
    for a, b in zip(src, dst, strict=True):
        expected[:, b // SIZE, :, :, b % SIZE] = pages[:, a // SIZE, :, :, a % SIZE]
    plain = pages.clone()
    paths = [torch.tensor(path, dtype=torch.int64) for path in (src, dst)]
    compact(pages, None, *paths)
    compact_plain(plain, None, *paths)
    assert same(pages, expected)
    assert same(plain, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_page(dtype):
    pages, scales = random_pages(dtype)
    before = clone(pages, scales)
    copy_page(pages, scales, 4, 1)
    for tensor, old in zip((pages, scales), before, strict=True):
        if tensor is not None:
            assert same(tensor[:, 1].contiguous(), old[:, 4].contiguous())
            tensor[:, 1] = old[:, 1]
            assert same(tensor, old)
