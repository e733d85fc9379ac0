"""Keys and values of the CPU decoder on their way into a quantised pool. Knows rows and slots.

Codes are made from the float32 row, so they lose nothing to bfloat16 first. Compiled when first
asked for.
"""

from __future__ import annotations

from chatkv.attention.jit import fma, njit
from chatkv.attention.simd_codes import quantise_row


@njit
def store_codes(rows, num_heads, qkv, cos, sin, slots, pages, scales):
    """Rotate the keys of the first rows, and store keys and values in their slots.

    Args:
        num_heads: HQ.
        qkv: [T, (HQ + 2 HK) D] float32: queries, keys, values. Keys are rotated in place.
        cos, sin: [T, D / 2] float32; channel i turns with channel i + D / 2.
        slots: [T] int64, page * S + offset; below 0 stores nothing.
        pages: [P, 2, HK, S, D] int8 or [..., D / 2] uint8 of one layer.
        scales: [P, 2, HK, S, C] float16 bits.
    """
    kv_heads, size, columns, per_slot = (
        pages.shape[2],
        pages.shape[3],
        pages.shape[4],
        scales.shape[4],
    )
    half = cos.shape[1]
    flat, flat_scales = pages.reshape(-1), scales.reshape(-1)
    for r in range(rows):
        if slots[r] < 0:
            continue
        page, offset = slots[r] // size, slots[r] % size
        row = qkv[r]
        for head in range(kv_heads):
            at = (num_heads + head) * 2 * half
            for i in range(half):
                a, b = row[at + i], row[at + half + i]
                row[at + i] = fma(a, cos[r, i], -(b * sin[r, i]))
                row[at + half + i] = fma(b, cos[r, i], a * sin[r, i])
            for kind in range(2):
                place = ((page * 2 + kind) * kv_heads + head) * size + offset
                start = at + kind * kv_heads * 2 * half
                quantise_row(
                    row, start, 2 * half, flat, place * columns, flat_scales, place * per_slot
                )
