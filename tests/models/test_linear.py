"""A row of a linear layer has its own bits, whoever is beside it and whatever machine runs it."""

from __future__ import annotations

import re

import gguf
import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.attention.jit import njit, set_threads
from chatkv.models.lanes import HOST_DOT, tile_kernel
from chatkv.models.layers import quantise_plain
from chatkv.models.linear import describe, linear, linear_plain
from chatkv.models.packing import KINDS, pack, unpack
from chatkv.models.weights import Matrix

# Every shape of the default model: qkv, output, gate and up, down, head.
SHAPES = [
    ("Q4_1", 960, 576),
    ("Q4_1", 576, 576),
    ("Q4_1", 3072, 576),
    ("Q4_1", 576, 1536),
    ("Q8_0", 49152, 576),
]


class Layer:
    """A random matrix, packed and aligned as the loader leaves it, with 64 random rows."""

    def __init__(self, tensor_type: str, outputs: int, inputs: int) -> None:
        rng = np.random.default_rng(outputs + inputs)
        values = rng.normal(size=(outputs, inputs)).astype(np.float32)
        packed = pack(
            tensor_type, gguf.quantize(values, getattr(gguf.GGMLQuantizationType, tensor_type))
        )
        self.dense = unpack(KINDS[tensor_type], packed)
        room = np.empty(packed.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        self.data = room[start : start + packed.nbytes]
        self.data[:] = packed.reshape(-1)
        self.matrix = np.array(
            describe(Matrix(KINDS[tensor_type], 0, outputs, inputs)), dtype=np.int64
        )
        rows = rng.normal(size=(64, inputs)) * rng.lognormal(size=(64, 1), sigma=3)
        self.rows = rows.astype(np.float32)
        self.outputs = outputs
        self.workers = 2

    def run(self, picked: list[int]) -> np.ndarray:
        codes, scales = quantise_plain(self.rows[picked])
        out = np.full((len(picked), self.outputs), np.nan, np.float32)
        linear(self.data, self.matrix, self.workers, codes, scales, len(picked), out)
        return out


@pytest.fixture(scope="module", params=["Q4_0", "Q4_1", "Q8_0"])
def small(request) -> Layer:
    return Layer(request.param, 80, 96)


def test_matches_the_plain_version(small):
    picked = list(range(64))
    expected = linear_plain(small.dense, *quantise_plain(small.rows))
    error = np.abs(small.run(picked) - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() < 1e-6


def test_codes_lose_less_than_bfloat16(small):
    exact = small.rows.astype(np.float64) @ small.dense.T.astype(np.float64)
    error = np.abs(small.run(list(range(64))) - exact).max(-1) / np.abs(exact).max(-1)
    assert error.max() < 2**-12


@given(picked=st.lists(st.integers(0, 63), min_size=1, max_size=64))
def test_a_row_has_the_same_bits_in_any_company(small, picked):
    alone = getattr(small, "alone", None)
    if alone is None:
        alone = small.alone = np.concatenate([small.run([row]) for row in range(64)])
    np.testing.assert_array_equal(small.run(picked), alone[picked])


def test_threads_do_not_change_bits(small):
    before = numba.get_num_threads()
    outs = []
    for count, small.workers in ((1, 1), (1, 3), (2, 2), (before, 5)):
        set_threads(count)
        outs.append(small.run(list(range(30))))
    set_threads(before)
    assert all(np.array_equal(outs[0], out) for out in outs)


def ways() -> list[str]:
    features = llvm.get_host_cpu_features()
    needs = {"vnni": "avx512vnni", "avx512": "avx512bw", "avx2": "avx2"}
    return [*(way for way, name in needs.items() if features.get(name)), "plain"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("way", ways())
def test_every_way_to_multiply_gives_the_same_bits(kind, tiles, way):
    tile = tile_kernel(kind, 2, tiles, way)
    layer = Layer({"q4": "Q4_1", "q8": "Q8_0"}[kind], 16 * tiles, 96)
    codes, scales = quantise_plain(layer.rows[:2])

    @njit(cache=False)
    def run(weights, groups, codes, scales, out):
        tile(
            weights.ctypes.data, groups, codes.ctypes.data, scales.ctypes.data,
            out.ctypes.data, 16 * tiles, 0,
        )  # fmt: skip

    out = np.zeros((2, 16 * tiles), np.float32)
    run(layer.data, 3, codes, scales, out)
    assert HOST_DOT in ways()
    np.testing.assert_array_equal(out, layer.run([0, 1]))


@pytest.mark.skipif(HOST_DOT != "vnni", reason="this processor has no vpdpwssd")
def test_products_of_pairs_are_added_in_one_instruction():
    """LLVM would make three of it on older Intel processors: 30 % slower from six rows up."""
    tile = tile_kernel("q4", 4, 2)

    @numba.cfunc(numba.types.void(*[numba.types.int64] * 7))
    def run(weights, groups, codes, scales, out, width, add):
        tile(weights, groups, codes, scales, out, width, add)

    code = run._library.get_asm_str()
    assert code.count("vpdpwssd") >= 2 * 4 * 16
    assert "vpmaddwd" not in code
    # One load of a value for both tiles: six rows took a third longer with a load for each.
    assert not re.search(r"vpdpwssd.*1to16", code)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor_type", "outputs", "inputs"), SHAPES)
def test_rows_of_every_weight_shape_are_independent(tensor_type, outputs, inputs):
    layer = Layer(tensor_type, outputs, inputs)
    alone = np.concatenate([layer.run([row]) for row in range(64)])
    expected = linear_plain(layer.dense, *quantise_plain(layer.rows))
    assert np.abs(alone - expected).max() / np.abs(expected).max() < 1e-6
    rng = np.random.default_rng(0)
    for count in range(1, 65):
        picked = rng.permutation(64)[:count]
        assert np.array_equal(layer.run(list(picked)), alone[picked]), count
