"""What the Triton kernels share: tiles of keys and values, and the fold of partial softmaxes."""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

EMPTY_MAX = tl.constexpr(-1e30)
"""Maximum of no keys: finite, so that weights of empty parts are 0 and never NaN."""
ONES = tl.constexpr(8)
"""Columns of the matrix of ones that sums probabilities: the fewest that an MMA takes."""


@triton.jit
def fold(max_a, sum_a, acc_a, max_b, sum_b, acc_b, factor):
    """Join two partial softmaxes of the same rows, a before b. An empty b changes nothing."""
    joint = tl.maximum(max_a, max_b)
    weight_a = tl.exp2((max_a - joint) * factor)
    weight_b = tl.exp2((max_b - joint) * factor)
    total = tl.fma(sum_a, weight_a, sum_b * weight_b)
    acc = tl.fma(acc_a, weight_a[:, None], acc_b * weight_b[:, None])
    return joint, total, acc


@triton.jit
def leaf_end(tiles, leaf, LEAVES: tl.constexpr):
    """How many of the first `tiles` tiles of a group are the leaf's."""
    return tl.maximum(tl.cdiv(tiles - leaf, LEAVES), 0)


@triton.jit
def load_page(table, slot, lane, num_entries, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of the tile at `slot`, or of each of its lanes; anything if it begins past the last."""
    if PAGE % BLOCK_N != 0:
        slot += lane
    return tl.load(table + tl.minimum(slot // PAGE, num_entries - 1))


@triton.jit
def nibble_values(codes):
    """Codes 0 to 15, minus 8, as float32.

    A code becomes the last bits of 2**23: conversions take several times as long.
    """
    bits = codes.to(tl.uint32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def load_tile(
    pages,
    scales,
    row,
    scale_row,
    seen,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CODE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys or values [lanes, DIM_PAD] in `dtype`, and the factors [lanes] that they still lack.

    row, scale_row: [lanes] int64 element offsets. Lanes that are not `seen` are read as zeros.
    CODE: 0 plain, 1 int8 or fp8 (the factors are their scales), 2 int4.
    """
    if CODE == 2:
        half = tl.arange(0, DIM_PAD // 2)
        codes = tl.load(pages + row[:, None] + half[None, :], mask=seen[:, None], other=0)
        group = half // 32
        low_scale = tl.load(
            scales + scale_row[:, None] + group[None, :], mask=seen[:, None], other=0.0
        )
        high_scale = tl.load(
            scales + scale_row[:, None] + (DIM_PAD // 64) + group[None, :],
            mask=seen[:, None],
            other=0.0,
        )
        low = nibble_values(codes & 15) * low_scale.to(tl.float32)
        high = nibble_values(codes >> 4) * high_scale.to(tl.float32)
        tile = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (row.shape[0], DIM_PAD))
        factors = tl.full([row.shape[0]], 1.0, tl.float32)
        return tile.to(dtype), factors
    d = tl.arange(0, DIM_PAD)
    pointer = pages + row[:, None] + d[None, :]
    if DIM == DIM_PAD:
        tile = tl.load(pointer, mask=seen[:, None], other=0.0)
    else:
        tile = tl.load(pointer, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
    if CODE == 1:
        factors = tl.load(scales + scale_row, mask=seen, other=0.0).to(tl.float32)
    else:
        factors = tl.full([row.shape[0]], 1.0, tl.float32)
    return tile.to(dtype), factors
