"""The compiled halves of a decoder layer, around its attention. Knows buffers and threads.

Kept to few calls and few parallel regions: at one row a layer takes a tenth of a millisecond, so
a Python call or a barrier more is felt.
"""

from __future__ import annotations

from chatkv.attention.cpu_kernels import attend_alone, attend_together
from chatkv.attention.jit import njit, prange
from chatkv.models.layers import (
    embed_row,
    gate_row,
    norm_row,
    quantise_row,
    rotate_row,
    widen_row,
)
from chatkv.models.linear import share, share_rows, tile_rows

PARTS = ("qkv", "o", "gate_up", "down")
"""Order of a layer's matrices in `table`."""
QKV, OUT, GATE_UP, DOWN = range(4)
FEW_ROWS = 2
"""Up to so many rows, row work is done by the calling thread: waking the others costs more."""

GATE_BLOCKS, GATE_ROWS = 8, 8
"""Blocks of 32 channels, and rows, that are gated while they are still in the nearest cache."""

_ROWS = "float32[:,::1], int16[:,::1], float32[:,:,::1]"


@njit
def _norm_and_quantise(hidden, norm, eps, wide, codes, scales):
    norm_row(hidden, norm, eps, wide)
    quantise_row(wide, codes, scales)


@njit
def _widen_and_quantise(bits, wide, codes, scales):
    widen_row(bits, wide)
    quantise_row(wide, codes, scales)


@njit
def _share_gates(
    weights, matrix, worker, workers, rows, codes, scales, pairs, acts, act_codes, act_scales
):  # fmt: skip
    """A worker's channels of the feed-forward layer: gate and up, their product, its codes."""
    begin, end = share(matrix[2] // 4, worker, workers)  # in blocks of 32 channels
    for start in range(begin, end, GATE_BLOCKS):
        stop = min(start + GATE_BLOCKS, end)
        for first in range(0, rows, GATE_ROWS):
            count = min(GATE_ROWS, rows - first)
            tiles = (start * 4, stop * 4)
            tile_rows(weights, matrix, *tiles, codes, scales, first, count, pairs, 0)
            for r in range(first, first + count):
                row = acts[r, start * 32 : stop * 32]
                gate_row(pairs[r, start * 64 : stop * 64], row)
                quantise_row(row, act_codes[r, start * 32 : stop * 32], act_scales[r, start:stop])


@njit("void(uint8[::1], int64[::1], int32[::1], float32[:,::1])")
def embed(weights, matrix, tokens, hidden):
    """hidden[:T] = embeddings of T tokens."""
    for r in range(tokens.shape[0]):
        embed_row(weights, matrix, tokens[r], hidden[r])


@njit(
    "void(int64, int64, int64, uint8[::1], int64[:,:,::1], float32[:,::1], float32, float32[:,::1],"
    f"{_ROWS}, float32[:,::1], float32[:,::1], float32[:,::1], int64[::1], uint16[:,:,::1],"
    "uint16[:,:,:,:,::1])",
    parallel=True,
)
def before_attention(
    layer, rows, workers, weights, table, norms, eps, hidden, wide, codes, scales, qkv, cos, sin,
    slots, q, pages,
):  # fmt: skip
    """Norm, q k v projections, rotation; keys and values go to their slots, queries to q.

    Args:
        layer: Which one. rows: How many of the buffers' rows are used. workers: Shares of the work.
        weights, table: Packed weights; int64 [L, 4, 5] of `linear.describe`.
        norms: [2 L + 1, H]. eps: Of the norms.
        hidden: [T, H] float32, the residual stream, read.
        wide, codes, scales: Room for [T, H] rows.
        qkv: Room for [T, (HQ + 2 HK) D].
        cos, sin: [T, D / 2]. slots: [T] int64.
        q: [T, HQ, D] uint16, filled. pages: [P, 2, HK, S, D] uint16 of this layer, written.
    """
    norm = norms[2 * layer]
    if rows <= FEW_ROWS:
        for r in range(rows):
            _norm_and_quantise(hidden[r], norm, eps, wide[r], codes[r], scales[r])
    else:
        for r in prange(rows):
            _norm_and_quantise(hidden[r], norm, eps, wide[r], codes[r], scales[r])
    matrix = table[layer, QKV]
    for worker in prange(workers):
        share_rows(weights, matrix, worker, workers, codes, scales, rows, qkv, 0)
    if rows <= FEW_ROWS:
        for r in range(rows):
            rotate_row(qkv[r], cos[r], sin[r], q[r], pages, slots[r])
    else:
        for r in prange(rows):
            rotate_row(qkv[r], cos[r], sin[r], q[r], pages, slots[r])


@njit(
    "void(int64, int64, int64, uint8[::1], int64[:,:,::1], float32[:,::1], float32, float32[:,::1],"
    f"{_ROWS}, uint16[:,::1], {_ROWS}, float32[:,::1], {_ROWS})",
    parallel=True,
)
def after_attention(
    layer, rows, workers, weights, table, norms, eps, hidden, wide, codes, scales,
    attended, head_wide, head_codes, head_scales, pairs, acts, act_codes, act_scales,
):  # fmt: skip
    """Output projection and feed-forward layer, each added to the residual stream.

    Args:
        hidden: [T, H] float32, read and written. Others as in `before_attention`.
        attended: [T, HQ D] uint16, the attention's output.
        head_wide, head_codes, head_scales: Room for [T, HQ D] rows.
        pairs: Room for [T, 2 I]. acts, act_codes, act_scales: Room for [T, I] rows.
    """
    if rows <= FEW_ROWS:
        for r in range(rows):
            _widen_and_quantise(attended[r], head_wide[r], head_codes[r], head_scales[r])
    else:
        for r in prange(rows):
            _widen_and_quantise(attended[r], head_wide[r], head_codes[r], head_scales[r])
    matrix = table[layer, OUT]
    for worker in prange(workers):
        share_rows(weights, matrix, worker, workers, head_codes, head_scales, rows, hidden, 1)
    norm = norms[2 * layer + 1]
    if rows <= FEW_ROWS:
        for r in range(rows):
            _norm_and_quantise(hidden[r], norm, eps, wide[r], codes[r], scales[r])
    else:
        for r in prange(rows):
            _norm_and_quantise(hidden[r], norm, eps, wide[r], codes[r], scales[r])
    gate_up = table[layer, GATE_UP]
    for worker in prange(workers):
        _share_gates(
            weights, gate_up, worker, workers, rows, codes, scales, pairs,
            acts, act_codes, act_scales,
        )  # fmt: skip
    down = table[layer, DOWN]
    for worker in prange(workers):
        share_rows(weights, down, worker, workers, act_codes, act_scales, rows, hidden, 1)


@njit
def run_layers(
    count, rows, workers, weights, table, norms, eps, hidden, normed, qkv, cos, sin, slots, q,
    stored, attended, lse, plan, joined, pairs, acts, taps, tapped,
):  # fmt: skip
    """The first `count` layers whole, where all rows are stored plain and see by one plan.

    One call for all: of three a layer, each would take longer to be made than a norm.

    Args:
        normed, joined, acts: Rooms of rows as (float32, codes, scales): [T, H], [T, HQ D], [T, I].
        stored: [L, P, 2, HK, S, D] uint16.
        attended: [T, HQ, D] uint16, written. lse: As in `attend_alone`.
        plan: `CpuPlan.arguments`.
        taps: [N] int64, layers counted from 1, behind which the residual goes to tapped[n], of
            [N, T, H] float32.
    """
    flat = attended.reshape(attended.shape[0], -1)
    for layer in range(count):
        before_attention(
            layer, rows, workers, weights, table, norms, eps, hidden, *normed, qkv, cos, sin,
            slots, q, stored[layer],
        )  # fmt: skip
        if plan[2].shape[0] > 2:
            attend_together(q, stored[layer], attended, lse, *plan)
        else:
            attend_alone(q, stored[layer], attended, lse, *plan)
        after_attention(
            layer, rows, workers, weights, table, norms, eps, hidden, *normed, flat, *joined, pairs,
            *acts,
        )  # fmt: skip
        for n in range(taps.shape[0]):
            if taps[n] == layer + 1:
                tapped[n, :rows] = hidden[:rows]


@njit(
    "void(int64, int64, uint8[::1], int64[::1], float32[::1], float32, float32[:,::1],"
    f"{_ROWS}, float32[:,::1])",
    parallel=True,
)
def head(rows, workers, weights, matrix, norm, eps, hidden, wide, codes, scales, logits):
    """logits[:rows] = float32 logits of the first rows of the residual stream, [T, V]."""
    for r in range(rows):
        _norm_and_quantise(hidden[r], norm, eps, wide[r], codes[r], scales[r])
    for worker in prange(workers):
        share_rows(weights, matrix, worker, workers, codes, scales, rows, logits, 0)
