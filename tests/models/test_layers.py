"""Each row kernel against its plain version, alone and on odd values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from chatkv.models import layers
from chatkv.models.linear import describe
from chatkv.models.packing import pack
from chatkv.models.weights import Matrix

FLOATS = st.floats(-(2.0**120), 2.0**120, width=32)


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = np.empty(len(x), np.int16), np.empty((len(x) // 32, 2), np.float32)
    layers.quantise_row(x, codes, scales)
    return codes, scales


@given(npst.arrays(np.float32, 64, elements=FLOATS))
def test_codes_are_within_half_a_step(x):
    codes, scales = quantise(x)
    wide = codes.reshape(2, 32) * scales[:, :1].astype(np.float64)
    top = np.abs(x.reshape(2, 32)).max(-1, keepdims=True).astype(np.float64)
    tiny = top <= np.float32(1e-30)
    assert (np.abs(wide - x.reshape(2, 32)) <= np.where(tiny, top, top / 65000)).all()
    sums = codes.reshape(2, 32).sum(-1) * scales[:, 0].astype(np.float64)
    np.testing.assert_allclose(scales[:, 1], sums, rtol=1e-6)


def test_codes_match_the_plain_version():
    x = np.random.default_rng(0).normal(size=(20, 128)).astype(np.float32)
    x[3, :32] = 0
    expected = layers.quantise_plain(x)
    for row, codes, scales in zip(x, *expected, strict=True):
        ours = quantise(row)
        np.testing.assert_array_equal(ours[0], codes)
        np.testing.assert_array_equal(ours[1], scales)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_number_are_not_hidden(bad):
    x = np.ones(32, np.float32)
    x[7] = bad
    assert not np.isfinite(quantise(x)[1]).all()


def test_norm_matches_the_plain_version():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(5, 576)) * np.array([[1e-6], [1], [30], [1e4], [0]])).astype(np.float32)
    weight, out = rng.normal(size=576).astype(np.float32), np.empty(576, np.float32)
    for row, expected in zip(x, layers.norm_plain(x, weight, 1e-5), strict=True):
        layers.norm_row(row, weight, np.float32(1e-5), out)
        np.testing.assert_allclose(out, expected, rtol=2e-6)


def test_gate_matches_the_plain_version():
    gate = np.linspace(-120, 120, 4000, dtype=np.float32)
    pairs = np.stack([gate.reshape(-1, 32), np.cos(gate).reshape(-1, 32)], axis=1).reshape(-1)
    out = np.empty_like(gate)
    layers.gate_row(pairs, out)
    expected = layers.gate_plain(pairs)
    # The exponent is rounded before it is raised: up to 120 * 1.44 * 2 ** -24.
    np.testing.assert_allclose(out, expected, rtol=1.1e-5, atol=1e-36)
    near = np.abs(gate) < 8
    np.testing.assert_allclose(out[near], expected[near], rtol=1e-6)


@given(npst.arrays(np.float32, 16, elements=FLOATS))
def test_bfloat16_rounds_as_torch_does(x):
    import torch

    bits = layers.to_bf16_plain(x)
    expected = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal([layers.to_bf16(v) for v in x], expected)
    np.testing.assert_array_equal([layers.from_bf16(b) for b in bits], layers.from_bf16_plain(bits))


def test_rotation_matches_the_plain_version_and_fills_its_slot_only():
    rng = np.random.default_rng(2)
    heads, kv_heads, dim, size = 4, 2, 32, 16
    qkv = rng.normal(size=(heads + 2 * kv_heads) * dim).astype(np.float32)
    cos, sin = layers.rotary_tables(dim, 10000.0, (), 37, 38)
    q, pages = np.zeros((heads, dim), np.uint16), np.zeros((3, 2, kv_heads, size, dim), np.uint16)
    layers.rotate_row(qkv, cos[0], sin[0], q, pages, 2 * size + 5)
    parts = qkv.reshape(-1, dim)
    turned = layers.rotate_plain(parts[None, : heads + kv_heads], cos, sin)[0]
    # A value between two bfloat16 may fall to either side when computed with other roundings.
    close = {"rtol": 2**-8, "atol": 1e-6}
    np.testing.assert_allclose(layers.from_bf16_plain(q), turned[:heads], **close)
    keys, values = layers.from_bf16_plain(pages[2, :, :, 5])
    np.testing.assert_allclose(keys, turned[heads:], **close)
    np.testing.assert_array_equal(
        pages[2, 1, :, 5], layers.to_bf16_plain(parts[heads + kv_heads :])
    )
    assert values.any()
    pages[2, :, :, 5] = 0
    assert not pages.any()
    layers.rotate_row(qkv, cos[0], sin[0], q, pages, -1)
    assert not pages.any()


def test_rotary_tables_depend_on_the_position_only():
    whole = layers.rotary_tables(64, 1e5, (), 0, 300)
    part = layers.rotary_tables(64, 1e5, (), 117, 300)
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(a[117:], b)
    halved = layers.rotary_tables(64, 1e5, (2.0,) * 32, 0, 300)
    np.testing.assert_allclose(halved[0][2::2], whole[0][1:150], atol=1e-6)


def test_embedding_is_exact():
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(np.random.default_rng(3).normal(size=(48, 64)).astype(np.float32), kind)
    raw[5, :2] = np.array([3e-7], np.float16).view(np.uint8)  # a subnormal scale
    packed = pack("Q8_0", raw).reshape(-1)
    matrix, out = np.array(describe(Matrix("q8", 0, 48, 64)), np.int64), np.empty(64, np.float32)
    for token, expected in enumerate(gguf.dequantize(raw, kind)):
        layers.embed_row(packed, matrix, token, out)
        np.testing.assert_array_equal(out, expected)
