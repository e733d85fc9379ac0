"""The compiled parts of a head on a CPU, one row at a time but for products. Knows arrays only."""

# pyright: standard, reportCallIssue=false
# The checker takes numba's intrinsics for the functions that generate their code.

from __future__ import annotations

import math

import numpy as np

from chatkv.attention.cpu_math import exp2
from chatkv.attention.jit import njit, prange
from chatkv.models.layers import gate_row, norm_row, quantise_row
from chatkv.models.linear import share_rows

HIDDEN_SCORE = np.float32(-1e30)
LOG2E = np.float32(math.log2(math.e))


@njit(
    "void(uint8[::1], int64[::1], int64, float32[:,::1], int16[:,::1], float32[:,:,::1], int64,"
    "float32[:,::1])",
    parallel=True,
)
def project(weights, matrix, workers, x, codes, scales, rows, out):
    """out[:rows] = x[:rows] times a packed matrix. Arguments as in `linear.tile_rows`."""
    for r in range(rows):
        quantise_row(x[r], codes[r], scales[r])
    for worker in prange(workers):
        share_rows(weights, matrix, worker, workers, codes, scales, rows, out, 0)


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


@njit("void(float32[:,:,::1], float32[:,:,::1], int64, float32[:,::1], float32[:,::1])")
def store(keys, values, slot, key, value):
    """Put a row's keys and values [HK, D] in their slot."""
    for head in range(key.shape[0]):
        for i in range(key.shape[1]):
            keys[head, i, slot] = key[head, i]
            values[head, slot, i] = value[head, i]


@njit(
    "void(float32[:,::1], float32[:,:,::1], float32[:,:,::1], int64, int64, float32[:,:,::1],"
    "float32[:,:,::1], int64, float32[::1], float32[:,::1])"
)
def look(q, keys, values, first, stop, own_keys, own_values, own, scores, out):
    """One row's attention to stored rows first..stop and to `own` nodes of its path.

    Args:
        q: [HQ, D], rotated.
        keys: [HK, D, S]. values: [HK, S, D]. Row p of the sequence is in slot p % S.
        own_keys, own_values: [nodes, HK, D].
        scores: Room for S + nodes.
        out: [HQ, D], filled.
    """
    heads, dim = q.shape
    group, size = heads // keys.shape[0], keys.shape[2]
    used = min(stop, size)
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    stored = scores[:used]
    for head in range(heads):
        kv = head // group
        stored[:] = np.float32(0.0)
        for d in range(dim):  # arrays of one step each: what LLVM makes vectors of
            factor, line = q[head, d] * scale, keys[kv, d, :used]
            for s in range(used):
                stored[s] += factor * line[s]
        if first > stop - size:
            for s in range(used):
                if stop - 1 - (stop - 1 - s) % size < first:
                    stored[s] = HIDDEN_SCORE
        for node in range(own):
            total = np.float32(0.0)
            for d in range(dim):
                total += q[head, d] * own_keys[node, kv, d]
            scores[used + node] = total * scale
        best = HIDDEN_SCORE
        for s in range(used + own):
            best = max(best, scores[s])
        total = np.float32(0.0)
        for s in range(used + own):
            scores[s] = exp2((scores[s] - best) * LOG2E)
            total += scores[s]
        mixed = out[head]
        mixed[:] = np.float32(0.0)
        for s in range(used + own):
            share = scores[s] / total
            value = values[kv, s] if s < used else own_values[s - used, kv]
            for d in range(dim):
                mixed[d] += share * value[d]
