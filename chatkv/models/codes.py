"""Queries and keys of the CPU decoder on their way to and into a quantised pool. Knows rows, slots.

Codes are made from the float32 row, so they lose nothing to bfloat16 first. Compiled when first
asked for.
"""

from __future__ import annotations

from chatkv.attention.jit import fma, njit, prange
from chatkv.attention.simd_codes import quantise_row
from chatkv.attention.simd_hadamard import multiply_head
from chatkv.models.layers import to_bf16

FEW_ROWS = 8
"""Up to so many rows the calling thread does all: waking the others costs more."""


@njit
def rotate_head(x, at, cos, sin):
    """Rotate the head at x[at:], then multiply it, in place."""
    half = cos.shape[0]
    for i in range(half):
        a, b = x[at + i], x[at + half + i]
        x[at + i] = fma(a, cos[i], -(b * sin[i]))
        x[at + half + i] = fma(b, cos[i], a * sin[i])
    multiply_head(x, at, half)


@njit
def code_row(qkv, cos, sin, slot, q, pages, scales):
    """One row of `store_codes`."""
    num_heads, dim = q.shape
    kv_heads, size, columns = pages.shape[2], pages.shape[3], pages.shape[4]
    per_slot = scales.shape[4]
    for head in range(num_heads):
        rotate_head(qkv, head * dim, cos, sin)
        for i in range(dim):
            q[head, i] = to_bf16(qkv[head * dim + i])
    if slot < 0:
        return
    flat, flat_scales = pages.reshape(-1), scales.reshape(-1)
    page, offset = slot // size, slot % size
    for head in range(kv_heads):
        key = (num_heads + head) * dim
        rotate_head(qkv, key, cos, sin)
        for kind in range(2):
            place = ((page * 2 + kind) * kv_heads + head) * size + offset
            start = key + kind * kv_heads * dim
            quantise_row(qkv, start, dim, flat, place * columns, flat_scales, place * per_slot)


@njit(parallel=True)
def store_codes(rows, qkv, cos, sin, slots, q, pages, scales):
    """Rotate and multiply queries and keys of the first rows; queries go to q, keys and values to
    their slots.

    Args:
        qkv: [T, (HQ + 2 HK) D] float32: queries, keys, values. The first two are changed in place.
        cos, sin: [T, D / 2] float32; channel i turns with channel i + D / 2.
        slots: [T] int64, page * S + offset; below 0 stores nothing.
        q: [T, HQ, D] uint16, filled with bfloat16 bits.
        pages: [P, 2, HK, S, D] int8 or [..., D / 2] uint8 of one layer.
        scales: [P, 2, HK, S, C] float16 bits.
    """
    if rows <= FEW_ROWS:
        for r in range(rows):
            code_row(qkv[r], cos[r], sin[r], slots[r], q[r], pages, scales)
    else:
        for r in prange(rows):
            code_row(qkv[r], cos[r], sin[r], slots[r], q[r], pages, scales)
