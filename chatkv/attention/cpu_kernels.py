"""The step kernel of the CPU backend. Knows numpy arrays laid out by `cpu_plan`; no torch, no AttentionCall.

Exact by construction. A row's keys are cut into splits at fixed logical places, a split is one softmax, and splits are
merged in ascending order. Within a split the keys that a row sees are listed in logical order: stored slots, then its
own ancestors by depth. A score is a sum over channels and an output a sum over that list, one term after another. So
neither siblings nor row counts nor threads can move a bit, and a tree may be as deep as it likes.

Three tuples carry the arrays (K tasks, B workers, X splits of the longest row, C splits that new rows may touch):

    lists  who sees what, see `cpu_plan.lay_out`
    room   tiles [B, D * TILE], queries [B, R * G * D], scores [B, R * G * (SPLIT + R)],
           weights [B, R * G * C * SPLIT]: float32 scratch of a worker; key_steps [D], split_steps [X]: i * TILE, i * D
    parts  sums [HK, T * G, X, 2] and outs [HK * T * G * X * D]: maximum, sum and unscaled output of each split
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from chatkv.attention.cpu_math import (
    LANES,
    SPLIT,
    TILE,
    exp2,
    load_keys,
    soften,
    store_ratio,
    weigh,
    widen,
)
from chatkv.attention.jit import fma, njit, prange
from chatkv.attention.simd import prefetch

LN2 = math.log(2.0)


@njit
def fetch(flat, slots, start, stop, shift, dim):
    """Ask for the keys or values of some slots before they are needed."""
    for i in range(start, stop):
        for d in range(0, dim, 32):
            prefetch(flat, slots[i] + shift + d)


@njit
def score_keys(
    q, flat, slots, at, count, shift, first, num, head, group, scale, tile, queries, scores, steps
):  # fmt: skip
    """scores[line, i] = scale * (q of row line / group, head line % group) . (key i), for `count` slots from `at`."""
    dim, width = q.shape[2], (count + TILE - 1) // TILE * TILE
    for line in range(num):
        row, h = first + line // group, head * group + line % group
        for d in range(dim):
            queries[line * dim + d] = widen(q[row, h, d]) * scale
    for i in range(num * width):
        scores[i] = np.float32(0.0)
    for i in range(0, count, TILE):
        fetch(flat, slots, at + i + TILE, at + min(count, i + 2 * TILE), shift, dim)
        for lane in range(0, min(TILE, count - i), LANES):
            load_keys(flat, slots[at + i + lane] + shift, dim, tile, lane)
        weigh(queries, 0, dim, num, tile, 0, steps, 0, dim, scores, i, width, TILE)


@njit
def attend_split(q, pages, flat, scale, n, head, split, lists, tile, queries, scores, weights, steps, parts):
    """One split of one sequence under one key head, for all rows: maxima, sums and unscaled outputs.

    The last split of a sequence also takes its new slots, and with them the splits that those reach into.    """
    seqs, slots, own, places, cuts, limits, lanes, stays, counts = lists
    sums, outs = parts
    dim, group = q.shape[2], q.shape[1] // pages.shape[2]
    first, rows, stored, base = seqs[n, 0], seqs[n, 1], seqs[n, 2], seqs[n, 3] + split * SPLIT
    here = min(SPLIT, stored - split * SPLIT)
    is_last = here < SPLIT
    count = here + rows if is_last else here
    num, width = rows * group, (count + TILE - 1) // TILE * TILE
    pieces = (count + SPLIT - 1) // SPLIT
    keys = head * pages.shape[3] * dim
    values = keys + pages.shape[2] * pages.shape[3] * dim
    step = pieces * SPLIT
    score_keys(
        q, flat, slots, base, count, keys, first, num, head, group, scale, tile, queries, scores, steps
    )  # fmt: skip

    fetch(flat, slots, base, base + min(TILE, here), values, dim)
    for line in range(num):
        row = first + line // group
        for c in range(pieces):
            if (split + c) * SPLIT >= limits[row]:
                break
            weight = weights[line * step + c * SPLIT : line * step + (c + 1) * SPLIT]
            score = scores[line * width : (line + 1) * width]
            used = 0
            if c == 0 and counts.shape[0] == 0:
                used = here
                for i in range(used):
                    weight[i] = score[i]
            elif c == 0:
                used = counts[row, split]
                for i in range(used):
                    weight[i] = score[lanes[row, split * SPLIT + i]]
            if is_last:
                for i in range(cuts[row, c], cuts[row, c + 1]):
                    weight[used] = score[here + own[row, i]]
                    used += 1
            for i in range(used, (used + TILE - 1) // TILE * TILE):
                weight[i] = -np.inf
            top, total = soften(weight, used)
            sums[head, first * group + line, split + c, 0] = top
            sums[head, first * group + line, split + c, 1] = total

    splits = sums.shape[2]
    out_step = splits * dim
    out = ((head * sums.shape[1] + first * group) * splits + split) * dim
    for line in range(num):
        for i in range(out + line * out_step, out + line * out_step + pieces * dim):
            outs[i] = np.float32(0.0)
    if counts.shape[0] == 0:
        for i in range(0, here, TILE):
            fetch(flat, slots, base + i + TILE, base + min(here, i + 2 * TILE), values, dim)
            weigh(
                weights, i, step, num, flat, values, slots, base + i, min(TILE, here - i),
                outs, out, out_step, dim,
            )  # fmt: skip
    for r in range(rows):
        row, line = first + r, r * group
        used = here
        if counts.shape[0] > 0:
            used = counts[row, split]
            weigh(
                weights, line * step, step, group, flat, values,
                stays, row * lanes.shape[1] + split * SPLIT, used, outs, out + line * out_step, out_step, dim,
            )  # fmt: skip
        if is_last:
            for c in range(pieces):
                weigh(
                    weights, line * step + c * SPLIT + (used if c == 0 else 0), step, group, flat, values,
                    places, row * own.shape[1] + cuts[row, c], cuts[row, c + 1] - cuts[row, c],
                    outs, out + line * out_step + c * dim, out_step, dim,
                )  # fmt: skip


@njit
def run_tasks(q, pages, scale, begin, end, worker, tasks, lists, room, parts):
    """The share of one worker, in order."""
    tiles, queries, scores, weights, key_steps, _ = room
    flat = pages.reshape(-1)
    for t in range(begin, end):
        attend_split(
            q, pages, flat, scale, tasks[t, 0], tasks[t, 1], tasks[t, 2], lists,
            tiles[worker], queries[worker], scores[worker], weights[worker],
            key_steps, parts,
        )  # fmt: skip


@njit
def merge_splits(out, lse, limits, room, parts):
    """Fold the splits of each row and head in ascending order."""
    sums, outs = parts
    dim, group, splits = out.shape[2], out.shape[1] // sums.shape[0], sums.shape[2]
    acc, weights, split_steps = room[1][0], room[2][0], room[5]
    for row in range(limits.shape[0]):
        count = (limits[row] + SPLIT - 1) // SPLIT
        for h in range(out.shape[1]):
            head, line = h // group, row * group + h % group
            place = (head * sums.shape[1] + line) * splits * dim
            top, total = sums[head, line, 0, 0], sums[head, line, 0, 1]
            values = outs[place : place + dim]
            if count > 1:
                for i in range(1, count):
                    top = max(top, sums[head, line, i, 0])
                total = np.float32(0.0)
                for i in range(count):
                    weights[i] = exp2(sums[head, line, i, 0] - top)
                    total = fma(weights[i], sums[head, line, i, 1], total)
                for d in range(dim):
                    acc[d] = np.float32(0.0)
                weigh(weights, 0, 0, 1, outs, place, split_steps, 0, count, acc, 0, 0, dim)
                values = acc[:dim]
            store_ratio(values, total, out[row, h])
            if lse.shape[0] > 0:
                lse[row, h] = np.float32((top + math.log2(total)) * LN2)


def _arrays(*kinds):
    return types.Tuple([types.Array(dtype, ndim, "C") for dtype, ndim in kinds])


_INT, _FLOAT, _BITS = types.int64, types.float32, types.uint16
LISTS = _arrays(
    (_INT, 2), (_INT, 1), (_INT, 2), (_INT, 1), (_INT, 2), (_INT, 1), (_INT, 2), (_INT, 1), (_INT, 2)
)  # fmt: skip
ROOM = _arrays(
    (_FLOAT, 2), (_FLOAT, 2), (_FLOAT, 2), (_FLOAT, 2), (_INT, 1), (_INT, 1)
)  # fmt: skip
PARTS = _arrays((_FLOAT, 4), (_FLOAT, 1))
BF16 = types.void(
    types.Array(_BITS, 3, "C"),
    types.Array(_BITS, 5, "C"),
    types.Array(_BITS, 3, "C"),
    types.Array(_FLOAT, 2, "C"),
    _FLOAT,
    types.Array(_INT, 2, "C"),
    types.Array(_INT, 1, "C"),
    LISTS,
    ROOM,
    PARTS,
)


# Two functions and not one with an option: numba's cache would take one for the other.
@njit(BF16)
def attend_alone(q, pages, out, lse, scale, tasks, shares, lists, room, parts):
    """One layer in the calling thread: all splits, then their merge."""
    for w in range(shares.shape[0] - 1):
        run_tasks(q, pages, scale, shares[w], shares[w + 1], w, tasks, lists, room, parts)
    merge_splits(out, lse, lists[5], room, parts)


@njit(BF16, parallel=True)
def attend_together(q, pages, out, lse, scale, tasks, shares, lists, room, parts):
    """One layer by several threads: worker w runs tasks[shares[w]:shares[w + 1]], then the splits are merged."""
    for w in prange(shares.shape[0] - 1):
        run_tasks(q, pages, scale, shares[w], shares[w + 1], np.int64(w), tasks, lists, room, parts)
    merge_splits(out, lse, lists[5], room, parts)


attend_float32 = njit(attend_alone.py_func)
"""For tests and float32 models: compiled when first asked for."""
