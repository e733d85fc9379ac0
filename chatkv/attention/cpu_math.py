"""Arithmetic of the CPU kernels: exponential, softmax, sums of weighted rows. Flat arrays only.

Every rounding is written down (`fma`, no fastmath) and every sum has one order, so that neither
vector width nor the blocks that are summed together move a bit.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from chatkv.attention.jit import bits_to_float32, float32_to_bits, fma, njit
from chatkv.attention.simd import (
    LANES,
    add_weighted_rows,
    largest_of,
    prefetch,
    sum_of,
    transpose_bf16,
)
from chatkv.attention.simd_codes import transpose_rows

SPLIT = 256
"""Logical keys of one softmax. Part of the bits."""
TILE = 64
"""Keys that are transposed, and channels that are summed, at a time."""


@njit("float32(float32)", inline="always")
def exp2(x):
    """2 ** x for x <= 0, relative error 2e-7; exactly 0 from -126 down.

    Taylor polynomial of degree 7 on [-1/2, 1/2], scaled by adding to the exponent bits.
    """
    n = np.float32(np.rint(max(x, np.float32(-126.0))))
    r = max(x, np.float32(-126.0)) - n
    y = np.float32(1.5252733e-5)
    y = fma(y, r, np.float32(1.5403530e-4))
    y = fma(y, r, np.float32(1.3333558e-3))
    y = fma(y, r, np.float32(9.6181291e-3))
    y = fma(y, r, np.float32(5.5504109e-2))
    y = fma(y, r, np.float32(2.4022651e-1))
    y = fma(y, r, np.float32(6.9314718e-1))
    y = fma(y, r, np.float32(1.0))
    y = bits_to_float32(float32_to_bits(y) + (np.int32(n) << np.int32(23)))
    return y if x > np.float32(-126.0) else np.float32(0.0)


@njit
def soften(row, count):
    """Turn scores (base 2) into weights 2 ** (score - maximum); returns maximum and sum.

    Args:
        row: [SPLIT] float32; -inf from `count` to the end of its tile.
        count: Keys in it. Of none the maximum is -1e30 and the sum 0.
    """
    count = (count + TILE - 1) // TILE * TILE
    top = largest_of(row, count)
    for i in range(count):
        row[i] = exp2(row[i] - top)
    return top, sum_of(row, count)


def _weigh_kinds():
    n, floats, places = types.int64, types.float32[::1], types.int64[::1]
    return [
        types.void(floats, n, n, n, rows[::1], n, places, n, n, floats, n, n, n)
        for rows in (types.uint16, types.float32)
    ]


@njit(_weigh_kinds())
def weigh(
    weights, weight_at, weight_step, num, rows, row_at, offsets, offset_at, count,
    outs, out_at, out_step, width,
):  # fmt: skip
    """outs[o, :width] += sum over i < count of weights[o, i] * rows[i, :width], for o < num.

    Terms are added in the order of i. Arrays and places as in `simd.add_weighted_rows`; rows lie at
    offsets + row_at; width is a multiple of 16.
    """
    for j in range(0, width, TILE):
        r = row_at + j
        if width - j < TILE:
            for v in range(0, width - j, LANES):
                for o in range(num):
                    w, out = weight_at + o * weight_step, out_at + o * out_step + j + v
                    add_weighted_rows(
                        1, 1, weights, w, weight_step, rows, r + v, offsets, offset_at, count,
                        outs, out, out_step,
                    )  # fmt: skip
            return
        for o in range(0, num, 4):
            w, out = weight_at + o * weight_step, out_at + o * out_step + j
            if num - o >= 4:
                add_weighted_rows(
                    4, 4, weights, w, weight_step, rows, r, offsets, offset_at, count,
                    outs, out, out_step,
                )  # fmt: skip
            elif num - o == 3:
                add_weighted_rows(
                    3, 4, weights, w, weight_step, rows, r, offsets, offset_at, count,
                    outs, out, out_step,
                )  # fmt: skip
            elif num - o == 2:
                add_weighted_rows(
                    2, 4, weights, w, weight_step, rows, r, offsets, offset_at, count,
                    outs, out, out_step,
                )  # fmt: skip
            else:
                add_weighted_rows(
                    1, 4, weights, w, weight_step, rows, r, offsets, offset_at, count,
                    outs, out, out_step,
                )  # fmt: skip


def widen(value):
    """A stored value as float32: uint16 holds bfloat16 bits."""
    raise NotImplementedError


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: bits_to_float32(np.int32(value) << np.int32(16))
    return lambda value: value


def fetch(flat, slots, start, stop, shift, dim):
    """Ask for the keys or values of some slots before they are needed. `flat` as in `load_keys`."""
    raise NotImplementedError


@overload(fetch)
def _fetch(flat, slots, start, stop, shift, dim):
    def ask(flat, slots, start, stop, shift, dim):
        for i in range(start, stop):
            for d in range(0, dim, 32):
                prefetch(flat, slots[i] + shift + d)

    def ask_codes(flat, slots, start, stop, shift, dim):
        for i in range(start, stop):
            for d in range(0, dim, 64):
                prefetch(flat[0], slots[i] + shift + d)

    return ask if isinstance(flat, types.Array) else ask_codes


def load_keys(pages, at, dim, tile, lane):
    """Sixteen neighbours, transposed: tile[d * TILE + lane + i] = pages[at + i * dim + d].

    Quantised pages are (codes, scales), `at` a place among the codes.
    """
    raise NotImplementedError


@overload(load_keys)
def _load_keys(pages, at, dim, tile, lane):
    if not isinstance(pages, types.Array):
        per_byte, per_slot = (2, 32) if pages[0].dtype == types.uint8 else (1, 0)

        def load_codes(pages, at, dim, tile, lane):
            scale_at = at // (dim // per_byte)
            if per_slot:
                scale_at *= dim // per_slot
            transpose_rows(pages[0], at, pages[1], scale_at, dim, tile, lane, TILE)

        return load_codes

    def load(pages, at, dim, tile, lane):
        for i in range(LANES):
            for d in range(dim):
                tile[d * TILE + lane + i] = pages[at + i * dim + d]

    def load_bf16(pages, at, dim, tile, lane):
        whole = dim // 32 * 32
        for d in range(0, whole, 32):
            transpose_bf16(pages, at + d, dim, tile, d * TILE + lane, TILE)
        for i in range(LANES):
            for d in range(whole, dim):
                tile[d * TILE + lane + i] = widen(pages[at + i * dim + d])

    return load_bf16 if pages.dtype == types.uint16 else load


def store_ratio(values, divisor, row):
    """row[d] = values[d] / divisor in the stored type, to nearest even."""
    raise NotImplementedError


@overload(store_ratio)
def _store_ratio(values, divisor, row):
    def store(values, divisor, row):
        for d in range(row.shape[0]):
            row[d] = values[d] / divisor

    def store_bf16(values, divisor, row):
        for d in range(row.shape[0]):
            bits = np.uint32(float32_to_bits(values[d] / divisor))
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            row[d] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return store_bf16 if row.dtype == types.uint16 else store
