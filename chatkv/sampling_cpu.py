"""The compiled twin of `sampling_plain.pick_plain`: the same token, about fifty times faster.

Knows that only few tokens can win: blocks of logits too far below the best one are skipped, top-k
and top-p find their cut by selection instead of sorting, and noise is made for survivors only.
All of it is exact: weights are integers and float32 operations round as in the plain version. One
file, because a compiled function is cached by the time stamp of its own file.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from chatkv.attention import jit
from chatkv.attention.jit import njit
from chatkv.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    LN2,
    MULTIPLIERS,
    SQRT_HALF_BITS,
    WEYL,
    A,
    B,
    FloatArray,
)
from chatkv.sampling_plain import EXP2, FAR, LOG2_E, WEIGHT_BITS, check

# numba passes their first parameter itself, which a type checker cannot know.
bits_to_float32: Any = jit.bits_to_float32
float32_to_bits: Any = jit.float32_to_bits

BLOCK = 64
"""Logits that are skipped or looked at together."""
BATCH = 256
"""Tokens that get their noise in one vectorised loop."""

M0, M1 = (np.uint64(word) for word in MULTIPLIERS)
W0, W1 = (np.uint64(word) for word in WEYL)
U32, MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
A0, A1, A2, A3, A4, A5, A6, A7, A8, A9, A10 = A
B0, B1, B2, B3, B4, B5, B6, B7, B8, B9 = B
E0, E1, E2, E3, E4, E5, E6 = EXP2
HALF, ONE, SCALE = np.float32(0.5), np.float32(1), np.float32(2.0**-25)
NEAR, NEARER = np.float32(-9.0), np.float32(-4.5)
LOWEST = np.float32(-np.inf)


class Scratch:
    """Memory that a pick writes before it reads. Grows to the vocabulary on first use."""

    def __init__(self) -> None:
        self.size = 0
        self.resize(BLOCK)

    def resize(self, size: int) -> None:
        """Room for logits of `size` tokens."""
        self.size = size
        self.maxima = np.empty(-(-size // BLOCK), dtype=np.float32)
        self.keys = np.empty(size, dtype=np.int64)
        self.weights = np.empty(size, dtype=np.int64)
        self.out = np.empty(4, dtype=np.float64)


@njit(inline="always")
def _weight(distance):
    """`sampling_plain.weights` of one number."""
    y = (distance if distance > FAR else FAR) * LOG2_E
    n = np.int32(y - HALF)
    f = y - np.float32(n)
    power = (((((E6 * f + E5) * f + E4) * f + E3) * f + E2) * f + E1) * f + E0
    scale = bits_to_float32(np.int32((n + np.int32(WEIGHT_BITS + 127)) << np.int32(23)))
    return np.int32(power * scale)


@njit(inline="always")
def _noise(token, position, key0, key1):
    """`noise.gumbel` of one token; all arguments uint64."""
    c0, c1, c2, c3 = token, position, np.uint64(0), np.uint64(0)
    for _ in range(10):
        low, high = c0 * M0, c2 * M1
        c0 = (high >> U32) ^ c1 ^ key0
        c1 = high & MASK
        c2 = (low >> U32) ^ c3 ^ key1
        c3 = low & MASK
        key0 = (key0 + W0) & MASK
        key1 = (key1 + W1) & MASK
    top = np.float32(np.int32(c0 >> np.uint64(8)))
    k = np.int32(150) - (float32_to_bits(top) >> np.int32(23))
    k = np.int32(24) if k > 24 else np.int32(k)
    t = (np.float32(np.int32(c1 >> np.uint64(8))) + HALF) * SCALE
    a = ((((A10 * t + A9) * t + A8) * t + A7) * t + A6) * t + A5
    a = ((((a * t + A4) * t + A3) * t + A2) * t + A1) * t + A0
    bits = float32_to_bits(np.float32(k) * LN2 + t * a)
    n = np.int32((bits - np.int32(SQRT_HALF_BITS)) >> np.int32(23))
    r = bits_to_float32(np.int32(bits - np.int32(n << np.int32(23)))) - ONE
    b = ((((B9 * r + B8) * r + B7) * r + B6) * r + B5) * r + B4
    b = (((b * r + B3) * r + B2) * r + B1) * r + B0
    return -(np.float32(n) * LN2 + r * b)


@njit("void(int64[::1], int64, int64, int64, float32[::1])")
def noise_into(tokens, count, position, seed, out):
    """Noise of the first `count` tokens, for stream 0."""
    key0, key1 = np.uint64(seed) & MASK, np.uint64(seed) >> U32
    where = np.uint64(position)
    for i in range(count):
        out[i] = _noise(np.uint64(tokens[i]), where, key0, key1)


@njit(inline="always")
def _ordered(bits):
    """int32 bits of a float as an integer that is ordered like the floats; and back again."""
    return np.int32(bits ^ np.int32((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit("boolean(float32[::1], float32[::1])")
def block_maxima(logits, maxima):
    """Largest logit of each block. False if a logit is NaN.

    Compares integers: only those are vectorised, and well where a block's length is a constant.
    """
    bits = logits.view(np.int32)
    size = len(bits)
    worst = np.int32(0)
    for block in range(len(maxima)):
        start, best = block * BLOCK, np.int32(-0x80000000)
        if start + BLOCK <= size:
            for i in range(BLOCK):
                x = bits[start + i]
                best = max(best, _ordered(x))
                worst = max(worst, np.int32(x & np.int32(0x7FFFFFFF)))
        else:
            for i in range(start, size):
                x = bits[i]
                best = max(best, _ordered(x))
                worst = max(worst, np.int32(x & np.int32(0x7FFFFFFF)))
        maxima[block] = bits_to_float32(_ordered(best))
    return worst <= 0x7F800000


@njit("void(float32[::1], float32[::1], float32, float64[::1])")
def greedy(logits, maxima, best, out):
    """out = (lowest id of the best logit, best, second best)."""
    token, second = -1, LOWEST
    for block in range(len(maxima)):
        if maxima[block] < best:
            second = max(second, maxima[block])
            continue
        for i in range(block * BLOCK, min(len(logits), (block + 1) * BLOCK)):
            if logits[i] == best and token < 0:
                token = i
            else:
                second = max(second, logits[i])
    out[0], out[1], out[2] = token, best, second


@njit(inline="always")
def _rank(logit, token):
    """int64 that ascends with rank: higher logit first, then lower id."""
    x = np.int64(float32_to_bits(np.float32(logit + np.float32(0))))  # -0.0 ranks as 0.0
    x ^= (x >> 31) & 0x7FFFFFFF
    return (-1 - x) << 32 | np.int64(token)


@njit("int64(float32[::1], float32[::1], float32, float32, float32, int64[::1])")
def collect(logits, maxima, inv_t, best, reach, keys):
    """Ranks of all tokens within `reach` (not above 0) of the best; returns how many."""
    count = 0
    for block in range(len(maxima)):
        if maxima[block] * inv_t - best < reach:
            continue
        for i in range(block * BLOCK, min(len(logits), (block + 1) * BLOCK)):
            if logits[i] * inv_t - best >= reach:
                keys[count] = _rank(logits[i], i)
                count += 1
    return count


@njit("void(float32[::1], float32, float32, int64[::1])")
def total_weight(logits, inv_t, best, sums):
    """sums = weight of all tokens, of those within -NEAR and of those within -NEARER."""
    everything, near, nearer = np.int64(0), np.int64(0), np.int64(0)
    for i in range(len(logits)):
        distance = logits[i] * inv_t - best
        weight = np.int64(_weight(distance))
        everything += weight
        near += weight if distance >= NEAR else np.int64(0)
        nearer += weight if distance >= NEARER else np.int64(0)
    sums[0], sums[1], sums[2] = everything, near, nearer


@njit("int64(int64[::1], int64[::1], int64, float64)")
def cut(keys, weights, count, goal):
    """Move the keys that stay to the front: those with less than `goal` ranked before them.

    Quickselect by weight: the keys are unique, so the result does not depend on the pivots.
    """
    low, high, before = 0, count, np.int64(0)
    state = np.uint64(count)
    while low < high:
        # Pivots from a congruence, so that no order of the logits is a bad one.
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        chosen = low + np.int64((state >> np.uint64(33)) % np.uint64(high - low))
        pivot, weight = keys[chosen], weights[chosen]
        keys[chosen], weights[chosen] = keys[high - 1], weights[high - 1]
        keys[high - 1], weights[high - 1] = pivot, weight
        middle, left = low, np.int64(0)
        for i in range(low, high - 1):
            if keys[i] < pivot:
                key, moved = keys[i], weights[i]
                keys[i], weights[i] = keys[middle], weights[middle]
                keys[middle], weights[middle] = key, moved
                left += moved
                middle += 1
        keys[high - 1], weights[high - 1] = keys[middle], weights[middle]
        keys[middle], weights[middle] = pivot, weight
        if np.float64(before + left) < goal:
            before += left + weight
            low = middle + 1
        else:
            high = middle
    return low


@njit("void(float32[::1], float32, int64[::1], int64, int64, int64, float64[::1])")
def draw(logits, inv_t, keys, count, position, seed, out):
    """out = (token, best score, second best) of the collected tokens."""
    tokens = np.empty(BATCH, dtype=np.int64)
    noise = np.empty(BATCH, dtype=np.float32)
    token, best, second = np.int64(-1), LOWEST, LOWEST
    start = 0
    while start < count:
        waiting = 0
        while start < count and waiting < BATCH:
            i = keys[start] & 0xFFFFFFFF
            start += 1
            # Rounding is monotone: below this even the largest noise cannot reach second place.
            if logits[i] * inv_t + GUMBEL_MAX >= second:
                tokens[waiting] = i
                waiting += 1
        noise_into(tokens, waiting, position, seed, noise)
        for j in range(waiting):
            i = tokens[j]
            score = logits[i] * inv_t + noise[j]
            if token < 0 or score > best or (score == best and i < token):
                second = best
                token, best = i, score
            elif score > second:
                second = score
    out[0], out[1], out[2] = token, best, second


@njit(
    "boolean(float32[::1], float32[::1], int64[::1], int64[::1], float64[::1],"
    " int64, int64, float64, int64, float64, float64)"
)
def pick(logits, maxima, keys, weights, out, position, seed, temperature, top_k, top_p, min_p):
    """out = (token, best score, second best, best logit over T). False if a logit is NaN."""
    numbers = block_maxima(logits, maxima)
    top, runner_up = LOWEST, LOWEST
    for block in range(len(maxima)):
        value = maxima[block]
        if value > top:
            top, runner_up = value, top
        elif value > runner_up:
            runner_up = value
    out[3] = top
    if not numbers or not np.isfinite(top):
        return numbers
    if temperature == 0:
        greedy(logits, maxima, top, out)
        return True
    inv_t = np.float32(1.0 / temperature)
    best = np.float32(top * inv_t)
    out[3] = best
    if not np.isfinite(best):
        return True
    size = len(logits)
    limited = 0 < top_k < size
    goal = 0.0
    if limited:
        reach = NEARER
        count = collect(logits, maxima, inv_t, best, reach, keys)
        if count < top_k:
            count = collect(logits, maxima, inv_t, best, NEAR, keys)
        if count < top_k:
            count = collect(logits, maxima, inv_t, best, LOWEST, keys)
        for i in range(count):
            weights[i] = 1
        count = cut(keys, weights, count, np.float64(top_k))
    elif top_p < 1:
        sums = np.empty(3, dtype=np.int64)
        total_weight(logits, inv_t, best, sums)
        goal = top_p * np.float64(sums[0])
        reach = LOWEST
        if np.float64(sums[2]) >= goal:
            reach = NEARER
        elif np.float64(sums[1]) >= goal:
            reach = NEAR
        count = collect(logits, maxima, inv_t, best, reach, keys)
    else:
        # The two best blocks hold two tokens whose scores are at least this far up.
        floor = runner_up * inv_t + GUMBEL_MIN
        reach = np.float32(floor - GUMBEL_MAX - best - ONE)
        if min_p > 0:
            reach = max(reach, np.float32(math.log(min_p)))
        count = collect(logits, maxima, inv_t, best, reach, keys)
    if top_p < 1:
        total = np.int64(0)
        for i in range(count):
            weights[i] = _weight(np.float32(logits[keys[i] & 0xFFFFFFFF] * inv_t - best))
            total += weights[i]
        if limited:
            goal = top_p * np.float64(total)
        count = cut(keys, weights, count, goal)
    if min_p > 0:
        least = np.float32(math.log(min_p))
        kept = 0
        for i in range(count):
            if logits[keys[i] & 0xFFFFFFFF] * inv_t - best >= least:
                keys[kept] = keys[i]
                kept += 1
        count = kept
    draw(logits, inv_t, keys, count, position, seed, out)
    return True


def pick_fast(
    logits: FloatArray,
    position: int,
    *,
    scratch: Scratch,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[int, float]:
    """`sampling_plain.pick_plain`, compiled. `logits` must be contiguous."""
    if scratch.size != len(logits):
        scratch.resize(len(logits))
    out = scratch.out
    numbers = pick(
        logits, scratch.maxima, scratch.keys, scratch.weights, out,
        position, seed, temperature, top_k, top_p, min_p,
    )  # fmt: skip
    check(float(out[3]) if numbers else math.nan)
    return int(out[0]), float(np.float32(out[1]) - np.float32(out[2]))


def noise_fast(seed: int, position: int, token_ids: npt.ArrayLike) -> FloatArray:
    """`noise.gumbel` of stream 0, compiled."""
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    out = np.empty(len(ids), dtype=np.float32)
    noise_into(ids, len(ids), position, seed, out)
    return out
