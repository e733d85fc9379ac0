"""A prompt chunk: right values, and bits that only the chunk's place and a row's history decide."""

from __future__ import annotations

import pytest
import torch
from attention.cases import HUGE, TOLERANCE, bits_equal, chain, make_case

from chatkv.attention import reference
from chatkv.attention.cpu import CpuBackend

BF16, F32 = torch.bfloat16, torch.float32


def chunk_of(start, rows, dtype=BF16, heads=(9, 3), page_size=16):
    """A chain of `rows` rows behind `start` slots, and the rows' own keys and values apart."""
    case = make_case(
        [chain(rows)], [start], dtype=dtype, heads=heads, page_size=page_size, seed=start
    )
    slots = start + torch.arange(rows)
    page = case.call.page_table[0][slots // page_size].long()
    k, v = case.pages[page, :, :, slots % page_size].unbind(1)
    return case, case.q[:rows].clone(), k.clone(), v.clone()


def run(case, q, k, v, start, num_rows, backend=None):
    table = case.call.page_table[0]
    return (backend or CpuBackend()).prefill(q, k, v, case.pages, table, start, num_rows)


@pytest.mark.parametrize("start", [0, 1, 64, 100, 448, 640])
@pytest.mark.parametrize("kind", [(128, BF16), (64, BF16), (17, BF16), (64, F32)], ids=str)
def test_values(start, kind):
    rows, dtype = kind
    case, q, k, v = chunk_of(start, rows, dtype)
    backend = CpuBackend()
    out = run(case, q, k, v, start, rows, backend)
    assert backend.calls == 1
    assert out.shape == q.shape
    expected, _ = reference.attend(case.call, case.q.double(), case.pages.double(), None)
    # Weights are rounded to bfloat16 as well.
    tolerance = {"rtol": 2**-6, "atol": 2**-7} if dtype == BF16 else TOLERANCE[F32]
    torch.testing.assert_close(out.double(), expected[:rows], **tolerance)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
def test_heads_and_page_sizes(heads):
    case, q, k, v = chunk_of(200, 64, F32, heads, page_size=64)
    expected, _ = reference.attend(case.call, case.q.double(), case.pages.double(), None)
    actual = run(case, q, k, v, 200, 64).double()
    torch.testing.assert_close(actual, expected[:64], **TOLERANCE[F32])


@pytest.mark.parametrize("start", [0, 128, 448, 1920])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("filler", [0.0, torch.nan, HUGE], ids=str)
def test_what_follows_a_row_changes_no_bit(start, rows, filler):
    case, q, k, v = chunk_of(start, rows)
    whole = run(case, q, k, v, start, rows)
    for num_rows in (1, 7, rows - 1):
        part = [x.clone() for x in (q, k, v)]
        for x in part:
            x[num_rows:] = filler
        out = run(case, *part, start, num_rows)
        assert bits_equal(out[:num_rows], whole[:num_rows]), num_rows


def test_queries_before_a_row_change_no_bit():
    case, q, k, v = chunk_of(128, 64)
    whole = run(case, q, k, v, 128, 64)
    q[:40] = torch.nan
    assert bits_equal(run(case, q, k, v, 128, 64)[40:], whole[40:])


def test_page_ids_and_poison_change_no_bit():
    case, q, k, v = chunk_of(200, 64)
    whole = run(case, q, k, v, 200, 64)
    entries = -(-200 // 16)
    pages = torch.full((200, *case.pages.shape[1:]), HUGE).to(BF16)
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:entries]
    pages[ids] = case.pages[case.call.page_table[0, :entries].long()]
    pages[ids[-1], :, :, 200 % 16 :] = HUGE
    moved = CpuBackend().prefill(q, k, v, pages, ids.int(), 200, 64)
    assert bits_equal(moved, whole)


def test_threads_change_no_bit():
    case, q, k, v = chunk_of(448, 128)
    torch.set_num_threads(1)
    alone = run(case, q, k, v, 448, 128)
    torch.set_num_threads(2)
    assert bits_equal(run(case, q, k, v, 448, 128), alone)


def test_another_shape_is_noticed():
    """The control: a chunk cut to its real rows has other bits, which the tests above would see."""
    case, q, k, v = chunk_of(448, 128)
    whole = run(case, q, k, v, 448, 128)
    cut = [run(case, q[:n], k[:n], v[:n], 448, n) for n in (1, 7, 33, 90)]
    assert not all(bits_equal(out, whole[: len(out)]) for out in cut)
