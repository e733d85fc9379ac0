"""Quantised pages on the CPU: right against the reference, and a node's bits are its own."""

from __future__ import annotations

import pytest
import torch
from attention.cases import bits_equal, chain, make_case, random_tree, star

from chatkv.attention import cpu_plan
from chatkv.attention.cpu import CpuBackend
from chatkv.attention.cpu_math import SPLIT
from chatkv.attention.jit import njit
from chatkv.attention.reference import dequantise
from chatkv.attention.simd_codes import quantise_row, widen_row
from chatkv.attention.store import quantise

INT8, INT4 = torch.int8, torch.uint8
BF16, F32 = torch.bfloat16, torch.float32


@njit(cache=False)
def _store(row, codes, code_at, scales, scale_at):
    quantise_row(row, 0, row.shape[0], codes, code_at, scales, scale_at)


@njit(cache=False)
def _load(codes, code_at, scales, scale_at, out, out_at):
    widen_row(codes, code_at, scales, scale_at, 128, out, out_at)


@pytest.fixture
def cpu() -> CpuBackend:
    return CpuBackend()


@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("stored", [0, 1, 15, 16, SPLIT - 1, SPLIT, 777])
def test_values(cpu, kind, dtype, stored):
    trees = [random_tree(7, stored), chain(1), star(3)]
    case = make_case(trees, [stored, 40, 0], dtype=dtype, seed=stored)
    case.quantised(kind).check(cpu)


@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [(INT8, 32), (INT8, 80), (INT8, 96), (INT8, 128), (INT4, 128), (INT4, 192)],
    ids=str,
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_heads(cpu, kind, head_dim, page_size):
    case = make_case(
        [random_tree(5, 1), [-1]], [300, 30], heads=(4, 2), head_dim=head_dim, page_size=page_size
    )
    case.quantised(kind).check(cpu)


@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("window", [None, 20, 400])
def test_a_node_has_the_bits_of_plain_decoding(cpu, kind, holes, window):
    trees = [random_tree(9, 3), chain(4), [], star(4)]
    stored = [600, SPLIT - 6, 10, 33]
    case = make_case(trees, stored, holes=holes, window=window, seed=4).quantised(kind)
    case.check(cpu)
    assert case.differing_nodes(cpu) == 0


@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
def test_threads_change_nothing(monkeypatch, kind):
    case = make_case([random_tree(9, 1), chain(2)], [700, 900]).quantised(kind)
    alone = case.serve(CpuBackend(threads=1))
    monkeypatch.setattr(cpu_plan, "SERIAL_COST", -1)
    for threads in (2, 3):
        together = case.serve(CpuBackend(threads))
        assert all(bits_equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
def test_ragged_batches_are_each_sequence_alone(cpu, kind, batch):
    lengths = [[0, 14, 15, 16, 999][n % 5] for n in range(batch)]
    case = make_case([chain(1)] * batch, lengths, seed=batch).quantised(kind)
    assert case.differing_nodes(cpu) == 0


@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-7, 1e9, 0.0])
def test_compiled_codes_are_those_of_the_plain_version(kind, size):
    rows = torch.randn(50, 128, generator=torch.manual_seed(1)) * size
    rows[::7, 3] *= 50
    codes, scales = quantise(rows, kind)
    own_codes, own_scales = torch.zeros_like(codes), torch.zeros_like(scales)
    values = torch.zeros_like(rows)
    bits = own_scales.view(torch.uint16).numpy().reshape(-1)
    width, per_slot = codes.shape[1], scales.shape[1]
    for i in range(len(rows)):
        place = (own_codes.numpy().reshape(-1), i * width, bits, i * per_slot)
        _store(rows.numpy()[i], *place)
        _load(*place, values.numpy().reshape(-1), i * 128)
    assert torch.equal(own_codes, codes)
    assert torch.equal(own_scales, scales)
    assert torch.equal(values, dequantise(codes, scales, torch.float32))
