"""What lies between the linear layers, one row at a time, each beside its plain version.

Knows rows (float32 [width], or bfloat16 as uint16 bits), pages and rotary angles. Knows no sequence
and no threads: a row's bits depend on that row only. Plain versions are numpy on many rows and
agree within rounding.
"""

# pyright: reportCallIssue=false
# The checker takes numba's intrinsics for the functions that generate their code.

from __future__ import annotations

import math

import numpy as np

from chatkv.attention.cpu_math import exp2
from chatkv.attention.jit import bits_to_float32, float32_to_bits, fma, njit
from chatkv.models.packing import Q8_GROUP_BYTES
from chatkv.models.row_lanes import MAX_CODE, SMALLEST, quantise_blocks

_LOG2E = np.float32(math.log2(math.e))


@njit("uint16(float32)", inline="always")
def to_bf16(value):
    """float32 to bfloat16 bits, to nearest even."""
    bits = np.uint32(float32_to_bits(value))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit("float32(uint16)", inline="always")
def from_bf16(bits):
    """bfloat16 bits to float32."""
    return bits_to_float32(np.int32(bits) << np.int32(16))


def to_bf16_plain(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16_plain(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@njit
def quantise_row(x, codes, scales):
    """A row as int16 codes, each block of 32 scaled to its own largest value.

    Args:
        x: [K] float32.
        codes: [K] int16, filled. x is close to codes * scale, within half a step of max / 32767.
        scales: [K / 32, 2] float32, filled: scale, and scale * sum of the block's codes.
    """
    quantise_blocks(x.ctypes.data, codes.ctypes.data, scales.ctypes.data, scales.shape[0])


def quantise_plain(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T, K] float32 to codes [T, K] int16 and scales [T, K / 32, 2] float32."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(
            largest > np.float32(SMALLEST), np.float32(MAX_CODE) / largest, np.float32(0)
        )
    codes = np.rint(blocks * inverse[..., None].astype(np.float32)).astype(np.int16)
    scale = largest / np.float32(MAX_CODE)
    sums = scale * codes.sum(-1, dtype=np.int32).astype(np.float32)
    return codes.reshape(x.shape), np.stack([scale, sums], -1)


@njit
def norm_row(x, weight, eps, out):
    """out = x / sqrt(mean(x ** 2) + eps) * weight, all [H] float32; H is a multiple of 8."""
    a = b = c = d = e = f = g = h = np.float32(0.0)
    for i in range(0, x.shape[0], 8):  # eight sums in a fixed order, so the chain is short
        a, b = fma(x[i], x[i], a), fma(x[i + 1], x[i + 1], b)
        c, d = fma(x[i + 2], x[i + 2], c), fma(x[i + 3], x[i + 3], d)
        e, f = fma(x[i + 4], x[i + 4], e), fma(x[i + 5], x[i + 5], f)
        g, h = fma(x[i + 6], x[i + 6], g), fma(x[i + 7], x[i + 7], h)
    squares = ((a + e) + (b + f)) + ((c + g) + (d + h))
    inverse = np.float32(1.0) / np.sqrt(squares / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * inverse * weight[i]


def norm_plain(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """[T, H] float32 to the same, in float64."""
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight).astype(np.float32)


@njit
def widen_row(bits, out):
    """bfloat16 bits [K] to float32 [K]."""
    for i in range(out.shape[0]):
        out[i] = from_bf16(bits[i])


@njit
def rotate_row(qkv, cos, sin, q, pages, slot):
    """Rotate a row's queries and key, and store key and value in their slot.

    Args:
        qkv: [(HQ + 2 HK) D] float32: queries, keys, values.
        cos, sin: [D / 2] float32 of the row's position; channel i turns with channel i + D / 2.
        q: [HQ, D] uint16, filled with bfloat16 bits.
        pages: [P, 2, HK, S, D] uint16 of one layer.
        slot: page * S + offset; below 0 stores nothing.
    """
    num_heads, dim = q.shape
    num_kv_heads, size = pages.shape[2], pages.shape[3]
    half = dim // 2
    for head in range(num_heads):
        at = head * dim
        for i in range(half):
            a, b = qkv[at + i], qkv[at + half + i]
            q[head, i] = to_bf16(fma(a, cos[i], -(b * sin[i])))
            q[head, half + i] = to_bf16(fma(b, cos[i], a * sin[i]))
    if slot < 0:
        return
    page, offset = slot // size, slot % size
    for head in range(num_kv_heads):
        at = (num_heads + head) * dim
        key, value = pages[page, 0, head, offset], pages[page, 1, head, offset]
        for i in range(half):
            a, b = qkv[at + i], qkv[at + half + i]
            key[i] = to_bf16(fma(a, cos[i], -(b * sin[i])))
            key[half + i] = to_bf16(fma(b, cos[i], a * sin[i]))
        at += num_kv_heads * dim
        for i in range(dim):
            value[i] = to_bf16(qkv[at + i])


def rotate_plain(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate [T, heads, D] float32 by [T, D / 2] cos and sin: the same, float32."""
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(np.float32)


def rotary_tables(
    head_dim: int, theta: float, factors: tuple[float, ...], start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [stop - start, D / 2] float32; a row depends on its position only."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if factors:
        frequencies = frequencies / np.array(factors, np.float64)
    angles = np.arange(start, stop, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@njit
def gate_row(pairs, out):
    """out = gate / (1 + exp(-gate)) * up.

    Args:
        pairs: [2 n] float32: 32 gates, then the 32 ups of the same channels, and so on.
        out: [n] float32, n a multiple of 32.
    """
    for block in range(0, out.shape[0], 32):
        # Three arrays of one step each: what LLVM makes vectors of.
        gate, up = pairs[2 * block : 2 * block + 32], pairs[2 * block + 32 : 2 * block + 64]
        to = out[block : block + 32]
        for i in range(32):
            # exp2 wants arguments up to 0: e / (1 + e) and 1 / (1 + e) are the sigmoid's two sides.
            small = exp2(-abs(gate[i]) * _LOG2E)
            top = np.float32(1.0) if gate[i] >= np.float32(0.0) else small
            to[i] = gate[i] * top / (np.float32(1.0) + small) * up[i]


def gate_plain(pairs: np.ndarray) -> np.ndarray:
    """[2 n] float32 to [n], in float64."""
    gate, up = pairs.reshape(-1, 2, 32).swapaxes(0, 1).astype(np.float64)
    return (gate / (1 + np.exp(-gate)) * up).astype(np.float32).reshape(-1)


@njit
def embed_row(weights, matrix, token, out):
    """The embedding of a token, exact: out [H] float32, from packed q8 weights."""
    at, groups, lane = matrix[1] + (token // 16) * matrix[4], matrix[3], token % 16
    for group in range(groups):
        base = at + group * Q8_GROUP_BYTES
        for i in range(32):
            pair = base + (i // 2) * 32 + lane * 2 + i % 2
            out[group * 32 + i] = np.float32(np.int8(weights[pair])) * _half(
                weights[base + 512 + lane * 2], weights[base + 513 + lane * 2]
            )


@njit
def _half(low, high):
    """A float16 from its two bytes, exact; scales are finite."""
    bits = np.int32(low) | (np.int32(high) << np.int32(8))
    sign = np.float32(-1.0) if bits & 0x8000 else np.float32(1.0)
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    if exponent == 0:
        return sign * np.float32(fraction) * np.float32(2.0**-24)
    return sign * bits_to_float32(np.int32(((exponent + 112) << 23) | (fraction << 13)))
