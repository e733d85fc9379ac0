"""The step kernel over quantised pages. Knows codes and scales beside what `cpu_kernels` knows.

Keys become float32 on their way into a tile, values once for all rows of a split; from there on it
is the arithmetic of `cpu_kernels`, in the same order, so a row has the same bits in any company.
Compiled when first asked for.

Room beside that of `cpu_kernels` (B workers): values [B, (SPLIT + R) * D] float32, where they lie
for a row [B, SPLIT + R], and value_steps [SPLIT + R] = i * D.
"""

from __future__ import annotations

import numpy as np

from chatkv.attention.cpu_kernels import merge_splits, score_keys, soften_split
from chatkv.attention.cpu_math import SPLIT, weigh
from chatkv.attention.jit import njit, prange
from chatkv.attention.simd_codes import widen_row


@njit
def attend_split(
    q, pages, flat, scale, n, head, split, lists, tile, queries, scores, weights, steps,
    values, local, value_steps, parts,
):  # fmt: skip
    """One split of one sequence under one key head, for all its rows: see `cpu_kernels`.

    flat: (codes, scales), flat.
    """
    seqs, slots, own, _, cuts, _, lanes, _, counts, _ = lists
    sums, outs = parts
    dim, group, splits = q.shape[2], q.shape[1] // pages.shape[2], sums.shape[2]
    first, rows, stored, base = seqs[n, 0], seqs[n, 1], seqs[n, 2], seqs[n, 3] + split * SPLIT
    here = min(SPLIT, stored - split * SPLIT)
    is_last, is_whole = here < SPLIT, counts.shape[0] == 0
    count = here + rows if is_last else here
    num, width = rows * group, (count + 63) // 64 * 64
    pieces = (count + SPLIT - 1) // SPLIT
    step, out_step = pieces * SPLIT, splits * dim
    codes, scales = flat
    columns, per_slot = pages.shape[4], scales.shape[0] * pages.shape[4] // codes.shape[0]
    keys = head * pages.shape[3] * columns
    shift = keys + pages.shape[2] * pages.shape[3] * columns
    score_keys(
        q, flat, slots, base, count, keys, first, num, head, group, scale,
        tile, queries, scores, steps,
    )  # fmt: skip
    soften_split(first, num, head, group, split, here, lists, scores, width, weights, step, sums)
    for i in range(count):
        at = slots[base + i] + shift
        widen_row(codes, at, scales, at // columns * per_slot, dim, values, i * dim)

    out = ((head * sums.shape[1] + first * group) * splits + split) * dim
    for line in range(num):
        for i in range(out + line * out_step, out + line * out_step + pieces * dim):
            outs[i] = np.float32(0.0)
    if is_whole:
        weigh(weights, 0, step, num, values, 0, value_steps, 0, here, outs, out, out_step, dim)
    for r in range(rows):
        row, weight, to = first + r, r * group * step, out + r * group * out_step
        used = here
        if not is_whole:
            used = counts[row, split]
            for i in range(used):
                local[i] = lanes[row, split * SPLIT + i] * dim
            weigh(weights, weight, step, group, values, 0, local, 0, used, outs, to, out_step, dim)
        for c in range(pieces if is_last else 0):
            at = weight + c * SPLIT + (used if c == 0 else 0)
            for i in range(cuts[row, c], cuts[row, c + 1]):
                local[i - cuts[row, c]] = (here + own[row, i]) * dim
            weigh(
                weights, at, step, group, values, 0, local, 0, cuts[row, c + 1] - cuts[row, c],
                outs, to + c * dim, out_step, dim,
            )  # fmt: skip


@njit
def run_tasks(q, pages, flat, scale, begin, end, worker, tasks, lists, room, values, parts):
    """The share of one worker, in order."""
    tiles, queries, scores, weights, key_steps, _ = room
    for t in range(begin, end):
        attend_split(
            q, pages, flat, scale, tasks[t, 0], tasks[t, 1], tasks[t, 2], lists,
            tiles[worker], queries[worker], scores[worker], weights[worker], key_steps,
            values[0][worker], values[1][worker], values[2], parts,
        )  # fmt: skip


@njit
def attend_alone(
    q, pages, scales, out, lse, scale, tasks, shares, lists, room, parts, values
):  # fmt: skip
    """One layer in the calling thread: the tasks of every worker, then the merge."""
    flat, factor = (pages.reshape(-1), scales.reshape(-1)), np.float32(scale)
    for w in range(shares.shape[0] - 1):
        begin, end = shares[w], shares[w + 1]
        run_tasks(q, pages, flat, factor, begin, end, w, tasks, lists, room, values, parts)
    merge_splits(out, lse, lists, room, parts)


@njit(parallel=True)
def attend_together(
    q, pages, scales, out, lse, scale, tasks, shares, lists, room, parts, values
):  # fmt: skip
    """One layer by several threads: worker w runs tasks[shares[w]:shares[w + 1]]; then a merge."""
    flat, factor = (pages.reshape(-1), scales.reshape(-1)), np.float32(scale)
    for w in prange(shares.shape[0] - 1):
        begin, end, worker = shares[w], shares[w + 1], np.int64(w)
        run_tasks(q, pages, flat, factor, begin, end, worker, tasks, lists, room, values, parts)
    merge_splits(out, lse, lists, room, parts)
