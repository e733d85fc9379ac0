"""The step kernel of the CPU backend. Knows arrays laid out by `cpu_plan`; no torch, no call.

Exact by construction. A row's keys are cut into splits at fixed logical places, a split is one
softmax, and splits are merged in ascending order. Within a split the keys that a row sees are
listed in logical order: stored slots, then its own ancestors by depth. A score is a sum over
channels and an output a sum over that list, one term after another. So neither siblings nor row
counts nor threads can move a bit, and a tree may be as deep as it likes.

Arrays come in three tuples (B workers, X splits of the longest row, C splits new rows may touch):

    lists  who sees what, see `cpu_plan.lay_out`
    room   scratch of each worker, float32: tiles [B, D * TILE], queries [B, R * G * D], scores
           [B, R * G * (SPLIT + R)], weights [B, R * G * C * SPLIT]; and the constant lists
           key_steps [D] = d * TILE and split_steps [X] = x * D
    parts  of each split: sums [HK, T * G, X, 2], maximum and sum of weights, and
           outs [HK * T * G * X * D], weighted values
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
    fetch,
    load_keys,
    soften,
    store_ratio,
    weigh,
    widen,
)
from chatkv.attention.jit import fma, njit, prange

LN2 = math.log(2.0)


@njit
def score_keys(
    q, flat, slots, at, count, shift, first, num, head, group, scale, tile, queries, scores, steps
):
    """scores[line, i] = scale * q . key, for `count` slots from `at` on and `num` lines.

    A line is a row and one of the query heads that share the key head: row * group + head.
    """
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
def soften_split(first, num, head, group, split, here, lists, scores, width, weights, step, sums):
    """The softmax of each line over the keys of a split that its row sees, listed in order.

    New rows lie behind the `here` stored slots, in the last split and those they reach into.
    """
    _, _, own, _, cuts, limits, lanes, _, counts, _ = lists
    for line in range(num):
        row = first + line // group
        score = scores[line * width : (line + 1) * width]
        for c in range(step // SPLIT):
            if (split + c) * SPLIT >= limits[row]:
                break
            weight = weights[line * step + c * SPLIT : line * step + (c + 1) * SPLIT]
            used = 0
            if c == 0 and counts.shape[0] == 0:
                used = here
                for i in range(used):
                    weight[i] = score[i]
            elif c == 0:
                used = counts[row, split]
                for i in range(used):
                    weight[i] = score[lanes[row, split * SPLIT + i]]
            if here < SPLIT:
                for i in range(cuts[row, c], cuts[row, c + 1]):
                    weight[used] = score[here + own[row, i]]
                    used += 1
            for i in range(used, (used + TILE - 1) // TILE * TILE):
                weight[i] = -np.inf
            top, total = soften(weight, used)
            sums[head, first * group + line, split + c, 0] = top
            sums[head, first * group + line, split + c, 1] = total


@njit
def attend_split(
    q, pages, flat, scale, n, head, split, lists, tile, queries, scores, weights, steps, parts
):
    """One split of one sequence under one key head, for all its rows.

    The last split of a sequence also takes its new slots, and the splits that those reach into.
    """
    seqs, slots, own, places, cuts, _, lanes, stays, counts, _ = lists
    sums, outs = parts
    dim, group, splits = q.shape[2], q.shape[1] // pages.shape[2], sums.shape[2]
    first, rows, stored, base = seqs[n, 0], seqs[n, 1], seqs[n, 2], seqs[n, 3] + split * SPLIT
    here = min(SPLIT, stored - split * SPLIT)
    is_last, is_whole = here < SPLIT, counts.shape[0] == 0
    count = here + rows if is_last else here
    num, width = rows * group, (count + TILE - 1) // TILE * TILE
    pieces = (count + SPLIT - 1) // SPLIT
    step, out_step = pieces * SPLIT, splits * dim
    keys = head * pages.shape[3] * dim
    values = keys + pages.shape[2] * pages.shape[3] * dim
    score_keys(
        q, flat, slots, base, count, keys, first, num, head, group, scale,
        tile, queries, scores, steps,
    )  # fmt: skip
    fetch(flat, slots, base, base + min(TILE, here), values, dim)
    soften_split(first, num, head, group, split, here, lists, scores, width, weights, step, sums)

    out = ((head * sums.shape[1] + first * group) * splits + split) * dim
    for line in range(num):
        for i in range(out + line * out_step, out + line * out_step + pieces * dim):
            outs[i] = np.float32(0.0)
    if is_whole:
        for i in range(0, here, TILE):
            fetch(flat, slots, base + i + TILE, base + min(here, i + 2 * TILE), values, dim)
            weigh(
                weights, i, step, num, flat, values, slots, base + i, min(TILE, here - i),
                outs, out, out_step, dim,
            )  # fmt: skip
    for r in range(rows):
        row, weight, to = first + r, r * group * step, out + r * group * out_step
        used = here
        if not is_whole:
            used = counts[row, split]
            weigh(
                weights, weight, step, group, flat, values,
                stays, row * lanes.shape[1] + split * SPLIT, used, outs, to, out_step, dim,
            )  # fmt: skip
        for c in range(pieces if is_last else 0):
            at = weight + c * SPLIT + (used if c == 0 else 0)
            weigh(
                weights, at, step, group, flat, values,
                places, row * own.shape[1] + cuts[row, c], cuts[row, c + 1] - cuts[row, c],
                outs, to + c * dim, out_step, dim,
            )  # fmt: skip


@njit
def run_tasks(q, pages, scale, begin, end, worker, tasks, lists, room, parts):
    """The share of one worker, in order."""
    tiles, queries, scores, weights, key_steps, _ = room
    flat = pages.reshape(-1)
    for t in range(begin, end):
        attend_split(
            q, pages, flat, scale, tasks[t, 0], tasks[t, 1], tasks[t, 2], lists,
            tiles[worker], queries[worker], scores[worker], weights[worker], key_steps, parts,
        )  # fmt: skip


@njit
def merge_splits(out, lse, lists, room, parts):
    """Fold the splits of each row and head in ascending order, from the first in a window on."""
    limits, begins = lists[5], lists[9]
    sums, outs = parts
    dim, group, splits = out.shape[2], out.shape[1] // sums.shape[0], sums.shape[2]
    folded, weights, split_steps = room[1][0], room[2][0], room[5]
    for row in range(limits.shape[0]):
        count = (limits[row] + SPLIT - 1) // SPLIT
        begin = begins[row] if begins.shape[0] > 0 else 0
        for h in range(out.shape[1]):
            head, line = h // group, row * group + h % group
            place = (head * sums.shape[1] + line) * splits * dim
            top, total = sums[head, line, begin, 0], sums[head, line, begin, 1]
            values = outs[place + begin * dim : place + begin * dim + dim]
            if count > begin + 1:
                for i in range(begin + 1, count):
                    top = max(top, sums[head, line, i, 0])
                total = np.float32(0.0)
                for i in range(begin, count):
                    weights[i] = exp2(sums[head, line, i, 0] - top)
                    total = fma(weights[i], sums[head, line, i, 1], total)
                values = folded[:dim]
                values[:] = np.float32(0.0)
                weigh(
                    weights, begin, 0, 1, outs, place, split_steps, begin, count - begin,
                    values, 0, 0, dim,
                )  # fmt: skip
            store_ratio(values, total, out[row, h])
            if lse.shape[0] > 0:
                lse[row, h] = np.float32((top + math.log2(total)) * LN2)


def _array(dtype, ndim):
    return types.Array(dtype, ndim, "C")


_INT, _FLOAT, _BITS = types.int64, types.float32, types.uint16
_LISTS = types.Tuple([_array(_INT, ndim) for ndim in (2, 1, 2, 1, 2, 1, 2, 1, 2, 1)])
_ROOM = types.Tuple([_array(_FLOAT, 2)] * 4 + [_array(_INT, 1)] * 2)
_PARTS = types.Tuple([_array(_FLOAT, 4), _array(_FLOAT, 1)])
_BF16 = types.void(
    _array(_BITS, 3),
    _array(_BITS, 5),
    _array(_BITS, 3),
    _array(_FLOAT, 2),
    _FLOAT,
    _array(_INT, 2),
    _array(_INT, 1),
    _LISTS,
    _ROOM,
    _PARTS,
)


@njit(_BF16)
def attend_alone(q, pages, out, lse, scale, tasks, shares, lists, room, parts):
    """One layer in the calling thread: the tasks of every worker, then the merge."""
    for w in range(shares.shape[0] - 1):
        run_tasks(q, pages, scale, shares[w], shares[w + 1], w, tasks, lists, room, parts)
    merge_splits(out, lse, lists, room, parts)


@njit(_BF16, parallel=True)
def attend_together(q, pages, out, lse, scale, tasks, shares, lists, room, parts):
    """One layer by several threads: worker w runs tasks[shares[w]:shares[w + 1]]; then a merge."""
    for w in prange(shares.shape[0] - 1):
        run_tasks(q, pages, scale, shares[w], shares[w + 1], np.int64(w), tasks, lists, room, parts)
    merge_splits(out, lse, lists, room, parts)


attend_float32 = njit(attend_alone.py_func)
"""For tests and float32 models: compiled when first asked for."""
