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


EVEN_INT8 = tl.constexpr(
    "{ .reg .b32 t, c; mov.b32 c, 0x64806480; and.b32 t, $1, 0x00FF00FF; xor.b32 t, t, c;"
    " sub.f16x2 $0, t, c; }"
)
"""A code becomes the last bits of 1024 + 128: conversions take several times as long."""
ODD_INT8 = tl.constexpr(
    "{ .reg .b32 t, c; mov.b32 c, 0x64806480; shr.u32 t, $1, 8; and.b32 t, t, 0x00FF00FF;"
    " xor.b32 t, t, c; sub.f16x2 $0, t, c; }"
)
EVEN_FP8 = tl.constexpr(
    "{ .reg .b32 s, m; and.b32 s, $1, 0x00800080; shl.b32 s, s, 8; and.b32 m, $1, 0x007F007F;"
    " shl.b32 m, m, 7; or.b32 $0, s, m; }"
)
"""The same bits under float16's larger exponent: the value over 256."""
ODD_FP8 = tl.constexpr(
    "{ .reg .b32 s, m; and.b32 s, $1, 0x80008000; and.b32 m, $1, 0x7F007F00; shr.u32 m, m, 1;"
    " or.b32 $0, s, m; }"
)
FP8_UNIT = tl.constexpr(256.0)


@triton.jit
def codes_of(pairs, ODD: tl.constexpr, CODE: tl.constexpr, dtype: tl.constexpr, HALF: tl.constexpr):
    """Every other code of a tile of pairs (int16: two neighbouring channels of a row), in `dtype`.

    Sixteen bits in, sixteen out: so a tile goes from shared memory straight to the registers of a
    product, as a tile of float16 would. fp8 comes as its value over FP8_UNIT. Without HALF, in the
    interpreter and for float32, it is plain arithmetic.
    """
    if HALF:
        if CODE == 1:
            asm: tl.constexpr = ODD_INT8 if ODD else EVEN_INT8
        else:
            asm: tl.constexpr = ODD_FP8 if ODD else EVEN_FP8
        return tl.inline_asm_elementwise(
            asm, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    elif CODE == 1:
        if ODD:
            return (pairs >> 8).to(dtype)
        else:
            return ((pairs << 8).to(tl.int16) >> 8).to(dtype)
    else:
        bits = ((pairs >> 8) if ODD else pairs) & 255
        return (bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) / FP8_UNIT).to(
            dtype
        )


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
    CODE: 0 plain, 1 int8 and 3 fp8 (the factors are their scales), 2 int4.
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
    if (CODE == 1) | (CODE == 3):
        factors = tl.load(scales + scale_row, mask=seen, other=0.0).to(tl.float32)
    else:
        factors = tl.full([row.shape[0]], 1.0, tl.float32)
    return tile.to(dtype), factors
