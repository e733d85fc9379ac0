"""The compiled parts of a head on a CPU, one row at a time but for products. Knows arrays only."""

# pyright: standard, reportCallIssue=false
# The checker takes numba's intrinsics for the functions that generate their code.

from __future__ import annotations

import math

import numpy as np
from numba import types

from chatkv.attention.cpu_math import LANES, TILE, exp2, soften, weigh
from chatkv.attention.jit import njit, prange
from chatkv.models.layers import embed_row, gate_row, norm_row, quantise_row
from chatkv.models.linear import share_rows
from chatkv.sampling_cpu import noise_into

LOG2E = np.float32(math.log2(math.e))
MANY = 4096
"""Outputs from which several threads share a product."""
_PRODUCT = types.Tuple(
    [
        types.uint8[::1],
        types.int64[::1],
        types.float32[:, ::1],
        types.int16[:, ::1],
        types.float32[:, :, ::1],
        types.float32[:, ::1],
    ]
)
"""`cpu_parts.Product.arrays`: weights, matrix, x, codes, scales, out."""


@njit(types.void(_PRODUCT, types.int64, types.int64), parallel=True)
def project(product, workers, rows):
    """out[:rows] = x[:rows] times a packed matrix, by several threads."""
    weights, matrix, x, codes, scales, out = product
    for r in range(rows):
        quantise_row(x[r], codes[r], scales[r])
    for worker in prange(workers):
        share_rows(weights, matrix, worker, workers, codes, scales, rows, out, 0)


@njit(types.void(_PRODUCT, types.int64))
def project_alone(product, rows):
    """The same in the calling thread: waking others takes longer than a small matrix."""
    weights, matrix, x, codes, scales, out = product
    for r in range(rows):
        quantise_row(x[r], codes[r], scales[r])
    share_rows(weights, matrix, 0, 1, codes, scales, rows, out, 0)


@njit(types.void(_PRODUCT, types.int64))
def project_one(product, workers):
    """The first row; by several threads where there are outputs enough for that."""
    if workers > 1 and product[5].shape[1] >= MANY:
        project(product, workers, 1)
    else:
        project_alone(product, 1)


@njit("void(float32[::1], float32[::1], float32, float32[::1])")
def norm(x, weight, eps, out):
    """out = x / rms(x) * weight."""
    norm_row(x, weight, eps, out)


@njit("void(float32[::1], float32[::1], float32[::1], float32[::1], float32, float32[::1])")
def norm_pair(a, a_weight, b, b_weight, eps, out):
    """out = both, each normed on its own, one behind the other."""
    norm_row(a, a_weight, eps, out[: len(a)])
    norm_row(b, b_weight, eps, out[len(a) :])


@njit("void(float32[::1], float32[::1])")
def gate(pairs, out):
    """As `layers.gate_row`."""
    gate_row(pairs, out)


@njit("void(float32[:,::1], float32[::1], float32[::1])")
def rotate(heads, cos, sin):
    """Turn [heads, D] in place; channel i with channel i + D / 2."""
    half = heads.shape[1] // 2
    for head in range(heads.shape[0]):
        for i in range(half):
            a, b = heads[head, i], heads[head, half + i]
            heads[head, i] = a * cos[i] - b * sin[i]
            heads[head, half + i] = b * cos[i] + a * sin[i]


@njit(
    types.void(
        types.float32[:, :, ::1], types.float32[:, ::1], types.boolean, types.float32[:, ::1],
        types.float32, types.int64, types.float32[:, ::1], types.float32[:, ::1], _PRODUCT,
        _PRODUCT, types.float32[:, :, ::1], types.float32[:, :, ::1], types.float32[::1],
    )
)  # fmt: skip
def store_rows(
    taps, embedded, as_they_are, norms, eps, place, cos, sin, fuse, kv, keys, values, state
):  # fmt: skip
    """Keep rows: their features, and from those keys and values. A row's bits are its own.

    Args:
        taps: [rows, taps, H], each normed unless `as_they_are`.
        embedded: [rows, H] of the ids behind the rows.
        norms: [4, H]: of ids, of features, one not used here, and of taps.
        place: Of the first row. cos, sin: [rows, D / 2] of their places.
        fuse, kv: Products for several rows.
        keys: [HK, D, room]. values: [HK, S, D]. Row p goes to slot p % S.
        state: [H], filled with the features of the last row.
    """
    hidden, at_once, size = len(state), fuse[2].shape[0], values.shape[1]
    heads, dim = keys.shape[0], keys.shape[1]
    for first in range(0, taps.shape[0], at_once):
        count = min(at_once, taps.shape[0] - first)
        for row in range(count):
            for tap in range(taps.shape[1]):
                to = fuse[2][row, tap * hidden : (tap + 1) * hidden]
                if as_they_are:
                    to[:] = taps[first + row, tap]
                else:
                    norm_row(taps[first + row, tap], norms[3], eps, to)
        project_alone(fuse, count)
        for row in range(count):
            pair = kv[2][row]
            norm_row(embedded[first + row], norms[0], eps, pair[:hidden])
            norm_row(fuse[5][row], norms[1], eps, pair[hidden:])
        project_alone(kv, count)
        for row in range(count):
            both = kv[5][row].reshape(2, heads, dim)
            rotate(both[0], cos[first + row], sin[first + row])
            slot = (place + first + row) % size
            for head in range(heads):
                for i in range(dim):
                    keys[head, i, slot] = both[0, head, i]
                    values[head, slot, i] = both[1, head, i]
        state[:] = fuse[5][count - 1]


@njit(
    types.void(
        types.float32[:, ::1], types.float32[:, :, ::1], types.float32[:, :, ::1], types.int64,
        types.int64, types.float32[:, :, ::1], types.float32[:, :, ::1], types.int64,
        types.UniTuple(types.int64[::1], 2), types.float32[:, ::1], types.float32[::1],
    )
)  # fmt: skip
def look(q, keys, values, first, stop, own_keys, own_values, own, steps, room, out):
    """One row's attention to stored rows first..stop and to `own` nodes of its path.

    Args:
        q: [HQ, D], rotated.
        keys: [HK, D, at least S, a multiple of TILE]. values: [HK, S, D]. Row p is in slot p % S.
        own_keys, own_values: [nodes, HK, D].
        steps: Where channels of keys begin, and rows of values.
        room: [2 group, places of keys + TILE]: queries, then scores of the heads that share keys.
        out: [HQ D], filled.
    """
    heads, dim = q.shape
    group, size, places = heads // keys.shape[0], values.shape[1], keys.shape[2]
    used, width = min(stop, size), room.shape[1]
    scale = LOG2E / np.sqrt(np.float32(dim))
    flat, flat_keys, flat_values = room.reshape(-1), keys.reshape(-1), values.reshape(-1)
    out[:] = np.float32(0.0)
    for kv in range(keys.shape[0]):
        for line in range(group):
            for d in range(dim):
                room[line, d] = q[kv * group + line, d] * scale
            room[group + line, :] = np.float32(0.0)
        weigh(
            flat, 0, width, group, flat_keys, kv * dim * places, steps[0], 0, dim,
            flat, group * width, width, (used + LANES - 1) // LANES * LANES,
        )  # fmt: skip
        at = kv * group * dim
        for line in range(group):
            scores = room[group + line]
            if first > stop - size:
                for s in range(used):
                    if stop - 1 - (stop - 1 - s) % size < first:
                        scores[s] = -np.inf
            for node in range(own):
                total = np.float32(0.0)
                for d in range(dim):
                    total += room[line, d] * own_keys[node, kv, d]
                scores[used + node] = total
            count = used + own
            scores[count : (count + TILE - 1) // TILE * TILE] = -np.inf
            _, total = soften(scores, count)
            for node in range(own):
                for d in range(dim):
                    out[at + line * dim + d] += scores[used + node] * own_values[node, kv, d]
            scores[:used] /= total
            for d in range(dim):
                out[at + line * dim + d] /= total
        weigh(
            flat, group * width, width, group, flat_values, kv * size * dim, steps[1], 0, used,
            out, at, dim, dim,
        )  # fmt: skip


@njit("int64(float32[::1], int64[::1], float32, int64[::1], float32[::1])")
def not_far(logits, ids, far, near, scores):
    """How many logits [D] are at most `far` below the best one; their ids and they themselves go to
    `near` and `scores`."""
    top = logits[0]
    for i in range(len(logits)):
        top = max(top, logits[i])
    count = 0
    for i in range(len(logits)):
        if logits[i] >= top - far:
            near[count] = ids[i]
            scores[count] = logits[i]
            count += 1
    return count


@njit("int64(float32[::1], int64, int64[::1], int64[::1], float32[::1])")
def best_of(scores, count, ids, best, shares):
    """The best ids by the first `count` scores, which are lost; how many, up to len(best).

    Args:
        best, shares: Filled with ids, and with their shares among all.
    """
    found = min(count, len(best))
    first = total = np.float32(0.0)
    for place in range(found):
        at = 0
        for i in range(count):
            if scores[i] > scores[at]:
                at = i
        if place == 0:
            first = scores[at]
            for i in range(count):
                total += exp2((scores[i] - first) * LOG2E)
        best[place] = ids[at]
        shares[place] = exp2((scores[at] - first) * LOG2E) / total
        scores[at] = -np.inf
    return found


@njit(
    types.void(
        types.int64, types.uint8[::1], types.int64[::1], types.float32[::1], types.boolean,
        types.float32[:, ::1], types.float32, types.float32[::1], types.float32[::1],
        types.UniTuple(_PRODUCT, 5), types.int64, types.float32[:, :, ::1],
        types.float32[:, :, ::1], types.int64, types.int64, types.float32[:, :, ::1],
        types.float32[:, :, ::1], types.int64, types.UniTuple(types.int64[::1], 2),
        types.float32[:, ::1],
    )
)  # fmt: skip
def advance(
    token, weights, vocabulary, state, norms_residual, norms, eps, cos, sin, products, workers,
    keys, values, first, stop, own_keys, own_values, own, steps, room,
):  # fmt: skip
    """An eagle head's layer for one token, `own` guesses below the root: [H] state, in place.

    Args:
        weights, vocabulary: The target's, and the matrix of its embedding.
        norms_residual: Whether the residual is the normed state.
        norms: [4, H]: of ids, of states, before the feed-forward part.
        cos, sin: [D / 2] of the token's place.
        products: Queries; keys and values; output; gates and ups; down.
        keys, values, first, stop, own_keys, own_values, steps, room: As in `look`. The own key and
            value of a guess are kept behind those above it.
    """
    query, both, output, gates, down = products
    hidden, pair = len(state), query[2][0]
    embed_row(weights, vocabulary, token, pair[:hidden])
    norm_row(pair[:hidden], norms[0], eps, pair[:hidden])
    norm_row(state, norms[1], eps, pair[hidden:])
    project_one(query, workers)
    q = query[5][0].reshape(-1, keys.shape[1])
    rotate(q, cos, sin)
    if own:  # the root's own key and value are stored
        both[2][0] = pair
        project_one(both, workers)
        kv = both[5][0].reshape(2, keys.shape[0], keys.shape[1])
        rotate(kv[0], cos, sin)
        own_keys[own - 1], own_values[own - 1] = kv[0], kv[1]
    look(q, keys, values, first, stop, own_keys, own_values, own, steps, room, output[2][0])
    if norms_residual:
        state[:] = pair[hidden:]
    project_one(output, workers)
    state += output[5][0]
    norm_row(state, norms[2], eps, gates[2][0])
    project_one(gates, workers)
    gate_row(gates[5][0], down[2][0])
    project_one(down, workers)
    state += down[5][0]


@njit(
    types.int64(
        types.float32[::1], types.float32[::1], types.float32, _PRODUCT, types.int64,
        types.int64[::1], types.float32, types.float32, types.int64, types.int64, types.int64[::1],
        types.float32[:, ::1], types.int64[::1], types.float32[::1],
    )
)  # fmt: skip
def guess(
    state, gamma, eps, product, workers, ids, far, sharpness, position, seed, near, room, best,
    shares,
):  # fmt: skip
    """The best guesses behind a state, as `best_of`; how many.

    Args:
        gamma: [H] of the norm before the rows that guess, `product`, whose ids are `ids`.
        far: Logits so far below the best one get no noise.
        sharpness: 1 / temperature; 0 is greedy.
        near, room: [D] and [2, D], written.
    """
    norm_row(state, gamma, eps, product[2][0])
    project_one(product, workers)
    scores, noise = room[0], room[1]
    count = not_far(product[5][0], ids, far, near, scores)
    if sharpness > 0:
        noise_into(near, count, position, seed, noise)
        for i in range(count):
            scores[i] = scores[i] * sharpness + noise[i]
    return best_of(scores, count, near, best, shares)
