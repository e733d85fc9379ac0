"""A backend computes what the reference computes, and reads nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention.cases import HUGE, chain, comb, make_case, random_tree, star

from chatkv.attention import backends
from chatkv.attention.cpu import CpuBackend
from chatkv.attention.cpu_math import SPLIT
from chatkv.errors import BackendUnavailable

BF16, F32 = torch.bfloat16, torch.float32
BORDERS = sorted({1, 2, 15, 16, 17, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 7, 1000})


@pytest.fixture
def cpu() -> CpuBackend:
    return CpuBackend()


@pytest.mark.parametrize("kv_len", BORDERS)
@pytest.mark.parametrize("poison", [torch.nan, HUGE], ids=["nan", "huge"])
def test_plain_decoding_at_every_border(cpu, kv_len, poison):
    make_case([[-1]], [kv_len - 1], poison=poison, seed=kv_len).check(cpu)


@pytest.mark.parametrize("rows", [2, 5, 16, 17, 64, 65])
@pytest.mark.parametrize("stored", [0, 3, SPLIT - 5, 300])
@pytest.mark.parametrize("shape", [chain, random_tree], ids=["chain", "tree"])
def test_new_rows(cpu, rows, stored, shape):
    tree = chain(rows) if shape is chain else random_tree(rows, seed=rows)
    make_case([tree], [stored], seed=rows + stored).check(cpu)


@pytest.mark.parametrize("tree", [star(8), comb(15), chain(16), random_tree(24, 3)], ids=len)
@pytest.mark.parametrize("stored", [14, 31, 16 * 16 - 1])
def test_trees_over_a_page_border(cpu, tree, stored):
    make_case([tree], [stored], poison=HUGE).check(cpu)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (4, 1), (8, 1), (10, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_heads(cpu, heads, head_dim):
    make_case([random_tree(5, 1), [-1]], [70, 30], heads=heads, head_dim=head_dim).check(cpu)


@pytest.mark.parametrize("page_size", [16, 64, 128, 512])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_page_sizes_and_dtypes(cpu, page_size, dtype):
    case = make_case([random_tree(7, 2), chain(3)], [500, 77], page_size=page_size, dtype=dtype)
    case.check(cpu)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_sequences_of_mixed_lengths_and_without_rows(cpu, dtype):
    trees = [[], chain(1), random_tree(9, 4), [], chain(20), star(3)]
    make_case(trees, [40, 0, 511, 0, 260, 1000], dtype=dtype).check(cpu)


def test_no_rows_at_all(cpu):
    out, lse = make_case([[], []], [40, 0]).serve(cpu)
    assert out.shape[0] == lse.shape[0] == 0


@pytest.mark.parametrize("window", [None, 1, 16, 100, 1000])
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_windows_and_holes(cpu, window, holes, dtype):
    trees = [chain(1), random_tree(12, 5), chain(6)]
    case = make_case(trees, [0, 300, 530], holes=holes, window=window, dtype=dtype, seed=7)
    case.check(cpu)


def test_everything_but_the_new_rows_is_forgotten(cpu):
    case = make_case([random_tree(6, 6)], [600], holes=True)
    assert case.call.valid is not None
    nothing = replace(case.call, valid=torch.zeros_like(case.call.valid))
    replace(case, call=nothing).check(cpu)


def test_one_key_far_above_the_others(cpu):
    case = make_case([chain(1)], [600], dtype=F32)
    slot = 333
    page = case.call.page_table[0, slot // 16]
    case.pages[page, 0, :, slot % 16] = 300 * case.q[0].view(3, 3, 64)[:, 0]
    out, lse = case.serve(cpu)
    assert torch.isfinite(out).all()
    assert torch.equal(out[0, ::3], case.pages[page, 1, :, slot % 16])
    assert (lse[0, ::3] > 500).all()


def test_another_scale(cpu):
    case = make_case([chain(2)], [100])
    replace(case, call=replace(case.call, scale=0.03)).check(cpu)


def test_forks_share_pages(cpu):
    case = make_case([chain(1), chain(1)], [96, 96])
    table = case.call.page_table
    table[1, :6] = table[0, :6]
    case.check(cpu)


def test_rows_of_padding_are_left_alone(cpu):
    case = make_case([chain(3)], [50])
    out = torch.full_like(case.q, 7.0)
    plan = cpu.plan(case.call, 9, 3, 64, 16)
    q, pages, raw = (t.view(torch.uint16).numpy() for t in (case.q, case.pages, out))
    cpu.attend_rows(plan, q, pages, raw)
    assert (out[3:] == 7).all()
    assert torch.equal(out[:3], case.serve(cpu)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_sweep(cpu, dtype, page_size, heads, head_dim):
    kind = {"dtype": dtype, "page_size": page_size, "heads": heads, "head_dim": head_dim}
    sizes = (1, 2, 5, 16, 17, 64, 65)
    for seed, stored in enumerate([0, 1, 47, 130, 255, 256, 700, 1500]):
        for rows in (sizes[seed % 7], sizes[(seed + 3) % 7]):
            trees = [random_tree(rows, seed), chain(rows), star(3)]
            for holes, window in ((False, None), (True, None), (True, 50), (False, 300)):
                starts = [stored, seed, stored // 2]
                make_case(trees, starts, seed=seed, holes=holes, window=window, **kind).check(cpu)


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31(cpu):
    case = make_case([chain(2)], [60])
    entries, far = -(-62 // 16), 2**31 // case.pages[0].numel() + 5
    pages = torch.empty((far + entries, *case.pages.shape[1:]), dtype=case.pages.dtype)
    table = case.call.page_table.clone()
    pages[far:] = case.pages[table[0, :entries].long()]
    table[0, :entries] = torch.arange(far, far + entries)
    moved = replace(case, call=replace(case.call, page_table=table), pages=pages)
    expected, actual = case.serve(cpu), moved.serve(cpu)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_pages_the_cpu_does_not_serve_are_refused_with_the_reason(cpu):
    case = make_case([chain(1)], [20], dtype=torch.float16)
    with pytest.raises(BackendUnavailable, match="float16"):
        case.serve(cpu)
    fp8 = make_case([chain(1)], [20]).quantised(torch.float8_e4m3fn)
    with pytest.raises(BackendUnavailable, match="float8"):
        fp8.serve(cpu)


def test_choosing_a_backend():
    assert backends.backend().name == "cpu"
    assert backends.backend("reference").name == "reference"
    with pytest.raises(BackendUnavailable, match="the pages are on cuda"):
        backends.backend("cpu", "cuda:0")
    with pytest.raises(BackendUnavailable, match="triton: the pages are on cpu"):
        backends.backend("triton")
    assert backends.backend(device="cuda:0").name == "triton"
