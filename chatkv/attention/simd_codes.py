"""Rows of codes (int8, int4) to float32 and back: LLVM vectors beside the loops that use them.

Knows flat arrays and places. A code times its scale is exact in float32, so a value read here is
the value of `reference.dequantise`. Scales are float16, held as uint16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import overload

from chatkv.attention.jit import intrinsic, njit
from chatkv.attention.simd import (
    FLOATS,
    LANES,
    WORDS,
    data_of,
    place_of,
    splat,
    times,
    transpose,
)

BLOCK = 32
"""Channels that are taken at a time, and that share a scale in int4."""
BYTES = ir.VectorType(ir.IntType(8), LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
EIGHT = ir.VectorType(ir.IntType(32), 8)
LARGEST_SCALE = np.float32(65504.0)


@intrinsic
def half_value(_context: Any, bits: Any) -> Any:
    """The float32 of float16 bits (uint16)."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def half_bits(_context: Any, value: Any) -> Any:
    """The bits (uint16) of a float32 as float16, to nearest even."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def transpose_block(
    _context: Any, codes: Any, code_at: Any, code_step: Any, scales: Any, scale_at: Any,
    scale_step: Any, apart: Any, columns: Any, column_at: Any, step: Any, half: Any,
) -> Any:  # fmt: skip
    """columns[c, r] = value of code c of row r, for 16 rows of 32 bytes, as float32.

    int8 codes are 32 channels. int4 codes (uint8) are 64: nibbles low are the first 32, nibbles
    high the 32 from channel `half` on, with the scale `apart` behind the first.

    codes[r]      is 32 bytes at code_at + r * code_step         int8 or uint8
    scale of r    is scales[scale_at + r * scale_step]           uint16, float16 bits
    columns[c, r] is columns[column_at + c * step + r]           float32
    """
    n = types.int64
    signature = types.void(codes, n, n, scales, n, n, n, columns, n, n, n)
    is_int4 = codes.dtype == types.uint8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, scale, column = (data_of(context, builder, signature, args, i) for i in (0, 3, 7))
        _, code_at, code_step, _, scale_at, scale_step, apart, _, column_at, step, half = args

        def scales_from(first: Any) -> Any:
            bits = ir.Constant(ir.VectorType(ir.IntType(16), LANES), ir.Undefined)
            for r in range(LANES):
                at = builder.add(first, times(builder, scale_step, r))
                one = builder.load(builder.gep(scale, [at]))
                bits = builder.insert_element(bits, one, ir.IntType(32)(r))
            return builder.fpext(builder.bitcast(bits, HALVES), FLOATS)

        rows = []
        for r in range(LANES):
            at = builder.add(code_at, times(builder, code_step, r))
            rows.append(builder.load(place_of(builder, code, at, EIGHT), align=1))
        # Rows r and r + 8 side by side: then both halves are transposed at once.
        both = WORDS(list(range(LANES)))
        words = [builder.shuffle_vector(rows[r], rows[r + 8], both) for r in range(8)]
        transpose(builder, words, (4, 2, 1))
        first = scales_from(scale_at)
        second = scales_from(builder.add(scale_at, apart)) if is_int4 else None
        for r, word in enumerate(words):
            for i in range(4):
                at = builder.add(column_at, times(builder, step, 4 * r + i))
                for values, factor, place in _values(builder, word, 8 * i, first, second):
                    to = at if place == 0 else builder.add(at, builder.mul(half, step))
                    whole = builder.fmul(values, factor)
                    builder.store(whole, place_of(builder, column, to, FLOATS), align=4)
        return context.get_dummy_value()

    return signature, codegen


def _values(builder: Any, word: Any, shift: int, first: Any, second: Any | None) -> Any:
    """The codes at bits `shift` to `shift + 8` of words as float32, with their scale and half."""
    if second is None:
        up = builder.shl(word, WORDS([24 - shift] * LANES))
        signed = builder.ashr(up, WORDS([24] * LANES))
        yield builder.sitofp(signed, FLOATS), first, 0
        return
    for nibble, factor in enumerate((first, second)):
        moved = builder.lshr(word, WORDS([shift + 4 * nibble] * LANES))
        code = builder.and_(moved, WORDS([15] * LANES))
        signed = builder.sub(code, WORDS([8] * LANES))
        yield builder.sitofp(signed, FLOATS), factor, nibble


@intrinsic
def widen_codes(
    _context: Any, codes: Any, code_at: Any, low: Any, high: Any, out: Any, out_at: Any, half: Any
) -> Any:
    """out = values of 16 bytes of codes: 16 of int8 with scale `low`, or 32 of int4, those in the
    high nibbles with scale `high` and `half` behind the others."""
    n, f = types.int64, types.float32
    signature = types.void(codes, n, f, f, out, n, n)
    is_int4 = codes.dtype == types.uint8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, out = (data_of(context, builder, signature, args, i) for i in (0, 4))
        _, code_at, low, high, _, out_at, half = args
        packed = builder.load(place_of(builder, code, code_at, BYTES), align=1)
        second = splat(builder, high) if is_int4 else None
        word = builder.zext(packed, WORDS)
        for values, factor, place in _values(builder, word, 0, splat(builder, low), second):
            at = out_at if place == 0 else builder.add(out_at, half)
            builder.store(builder.fmul(values, factor), place_of(builder, out, at, FLOATS), align=4)
        return context.get_dummy_value()

    return signature, codegen


def widen_row(codes, at, scales, scale_at, dim, out, out_at):
    """out[out_at:][:dim] = the values of the row whose codes begin at `at`."""
    raise NotImplementedError


@overload(widen_row)
def _widen_row(codes, at, scales, scale_at, dim, out, out_at):
    def widen(codes, at, scales, scale_at, dim, out, out_at):
        scale = half_value(scales[scale_at])
        for d in range(0, dim, LANES):
            widen_codes(codes, at + d, scale, scale, out, out_at + d, 0)

    def widen_int4(codes, at, scales, scale_at, dim, out, out_at):
        half = dim // 2
        for d in range(0, half, LANES):
            low = half_value(scales[scale_at + d // BLOCK])
            high = half_value(scales[scale_at + (half + d) // BLOCK])
            widen_codes(codes, at + d, low, high, out, out_at + d, half)

    return widen_int4 if codes.dtype == types.uint8 else widen


def transpose_rows(codes, at, scales, scale_at, dim, tile, lane, step):
    """Sixteen neighbours, transposed: tile[d * step + lane + i] = value d of the i-th row."""
    raise NotImplementedError


@overload(transpose_rows)
def _transpose_rows(codes, at, scales, scale_at, dim, tile, lane, step):
    def transpose_int8(codes, at, scales, scale_at, dim, tile, lane, step):
        whole = dim // BLOCK * BLOCK
        for d in range(0, whole, BLOCK):
            transpose_block(
                codes, at + d, dim, scales, scale_at, 1, 0, tile, d * step + lane, step, 0
            )
        for i in range(LANES if whole < dim else 0):
            scale = half_value(scales[scale_at + i])
            for d in range(whole, dim):
                tile[d * step + lane + i] = np.float32(codes[at + i * dim + d]) * scale

    def transpose_int4(codes, at, scales, scale_at, dim, tile, lane, step):
        half, groups = dim // 2, dim // BLOCK
        for d in range(0, half, BLOCK):
            transpose_block(
                codes, at + d, half, scales, scale_at + d // BLOCK, groups, groups // 2,
                tile, d * step + lane, step, half,
            )  # fmt: skip

    return transpose_int4 if codes.dtype == types.uint8 else transpose_int8


@njit
def scale_bits(x, at, count, limit):
    """The stored scale of `count` values: largest magnitude over the largest code."""
    largest = np.float32(0.0)
    for i in range(at, at + count):
        largest = max(largest, abs(x[i]))
    return half_bits(min(largest / limit, LARGEST_SCALE))


@njit
def code_of(value, divisor, limit):
    """The nearest code, ties to even, as float32."""
    return np.rint(min(max(value / divisor, -limit), limit))


@njit
def divisor_of(bits):
    """What to divide by: the stored scale, so that reading gives back what was meant."""
    scale = half_value(bits)
    return scale if scale > np.float32(0.0) else np.float32(np.inf)


def quantise_row(x, at, dim, codes, code_at, scales, scale_at):
    """Store the row x[at:][:dim] as codes and scales, as `store.quantise` does."""
    raise NotImplementedError


@overload(quantise_row)
def _quantise_row(x, at, dim, codes, code_at, scales, scale_at):
    def quantise_int8(x, at, dim, codes, code_at, scales, scale_at):
        limit = np.float32(127.0)
        scales[scale_at] = scale_bits(x, at, dim, limit)
        divisor = divisor_of(scales[scale_at])
        for i in range(dim):
            codes[code_at + i] = np.int8(code_of(x[at + i], divisor, limit))

    def quantise_int4(x, at, dim, codes, code_at, scales, scale_at):
        limit, half = np.float32(7.0), dim // 2
        for group in range(dim // BLOCK):
            scales[scale_at + group] = scale_bits(x, at + group * BLOCK, BLOCK, limit)
        for first in range(0, half, BLOCK):
            low = divisor_of(scales[scale_at + first // BLOCK])
            high = divisor_of(scales[scale_at + (half + first) // BLOCK])
            for i in range(first, first + BLOCK):
                a = np.uint8(code_of(x[at + i], low, limit) + np.float32(8.0))
                b = np.uint8(code_of(x[at + half + i], high, limit) + np.float32(8.0))
                codes[code_at + i] = a | b << np.uint8(4)

    return quantise_int4 if codes.dtype == types.uint8 else quantise_int8
