"""What picking on a device computes: noise, weights and ranks, the twins of `noise.py` and
`sampling_plain.py`. Knows lanes of logits; no settings and no launches.

Integers, and single float32 operations that are not fused: the same bits as numpy's.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import triton
import triton.language as tl

from chatkv import noise, sampling_plain


def _constant(value: float) -> tl.constexpr:
    # Through float(): a numpy number is no constant to the compiler. float32 values stay exact.
    return tl.constexpr(float(value))


HALF = tl.constexpr(0.5)
LN2, LOG2_E, FAR = (
    _constant(noise.LN2),
    _constant(sampling_plain.LOG2_E),
    _constant(sampling_plain.FAR),
)
GUMBEL_MAX, GUMBEL_MIN = _constant(noise.GUMBEL_MAX), _constant(noise.GUMBEL_MIN)
T_SCALE = tl.constexpr(2.0**-25)
A0, A1, A2, A3, A4, A5, A6, A7, A8, A9, A10 = (_constant(c) for c in noise.A)
B0, B1, B2, B3, B4, B5, B6, B7, B8, B9 = (_constant(c) for c in noise.B)
E0, E1, E2, E3, E4, E5, E6 = (_constant(c) for c in sampling_plain.EXP2)
M0, M1 = (tl.constexpr(m) for m in noise.MULTIPLIERS)
W0, W1 = (tl.constexpr(w) for w in noise.WEYL)
SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
WEIGHT_BIAS = tl.constexpr(sampling_plain.WEIGHT_BITS + 127)
NOBODY = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(math.inf)


@triton.jit
def weight_of(distance):
    """`sampling_plain.weights`, int64."""
    y = tl.maximum(distance, FAR) * LOG2_E
    n = (y - HALF).to(tl.int32)
    f = y - n.to(tl.float32)
    power = (((((E6 * f + E5) * f + E4) * f + E3) * f + E2) * f + E1) * f + E0
    scale = ((n + WEIGHT_BIAS) << 23).to(tl.float32, bitcast=True)
    return (power * scale).to(tl.int64)


@triton.jit
def gumbel(token, position, key0, key1):
    """`noise.gumbel` of int32 tokens; position and keys are uint32."""
    c0 = token.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        a, b = c0, c2
        c0 = tl.umulhi(b, tl.full(b.shape, M1, tl.uint32)) ^ c1 ^ key0
        c2 = tl.umulhi(a, tl.full(a.shape, M0, tl.uint32)) ^ c3 ^ key1
        c1 = b * tl.full(b.shape, M1, tl.uint32)
        c3 = a * tl.full(a.shape, M0, tl.uint32)
        key0 = key0 + tl.full([], W0, tl.uint32)
        key1 = key1 + tl.full([], W1, tl.uint32)
    top = (c0 >> 8).to(tl.int32).to(tl.float32)
    k = tl.minimum(24, 150 - (top.to(tl.int32, bitcast=True) >> 23)).to(tl.float32)
    t = ((c1 >> 8).to(tl.int32).to(tl.float32) + HALF) * T_SCALE
    a = ((((A10 * t + A9) * t + A8) * t + A7) * t + A6) * t + A5
    a = ((((a * t + A4) * t + A3) * t + A2) * t + A1) * t + A0
    bits = (k * LN2 + t * a).to(tl.int32, bitcast=True)
    n = (bits - SQRT_HALF_BITS) >> 23
    r = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1.0
    b = ((((B9 * r + B8) * r + B7) * r + B6) * r + B5) * r + B4
    b = (((b * r + B3) * r + B2) * r + B1) * r + B0
    return -(n.to(tl.float32) * LN2 + r * b)


@triton.jit
def better(score_a, token_a, score_b, token_b):
    """The higher score; the lower token among equals."""
    first = (score_a > score_b) | ((score_a == score_b) & (token_a < token_b))
    return tl.where(first, score_a, score_b), tl.where(first, token_a, token_b)


@triton.jit
def best_of(score, token):
    """(score, token) of the best lane."""
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, token, NOBODY), 0)


@triton.jit
def best_score(
    logits, start, stop, bound, bound_token, best, inv_t, position, key0, key1, floor,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(score, token) of the best of the tokens start..stop that rank before a bound.

    best: The best logit over T. floor: A score that somebody is known to reach.
    """
    high = tl.full([], -INFINITY, tl.float32)
    chosen = tl.full([], NOBODY, tl.int32)
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < stop, other=-INFINITY)
        x = tl.where((x > bound) | ((x == bound) & (token < bound_token)), x, -INFINITY)
        scaled = x * inv_t
        # Rounding is monotone: below this even the largest noise does not reach the best so far.
        if tl.max(scaled, 0) + GUMBEL_MAX >= tl.maximum(high, floor):
            score = tl.where(
                x == -INFINITY, -INFINITY, scaled + gumbel(token, position, key0, key1)
            )
            top, at = best_of(score, tl.where(x == -INFINITY, NOBODY, token))
            high, chosen = better(high, chosen, top, at)
    return high, chosen


@triton.jit
def weigh_before(line, start, stop, x, token, best, inv_t, BLOCK: tl.constexpr):
    """(weight, number) of the tokens start..stop that rank before a token with logit x."""
    before = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    for first in range(start, stop, BLOCK):
        other_token = first + tl.arange(0, BLOCK)
        other = tl.load(line + other_token, mask=other_token < stop, other=-INFINITY)
        ahead = (other > x) | ((other == x) & (other_token < token))
        before += tl.sum(tl.where(ahead, weight_of(other * inv_t - best), 0), 0)
        count += tl.sum(ahead.to(tl.int32), 0)
    return before, count


@triton.jit
def ordered(x):
    """float32 to int64 from 0 on, in the same order; -0.0 equals 0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return key.to(tl.int64) + 0x80000000


@triton.jit
def weight_of_best(line, vocab, count, inv_t, best, BLOCK: tl.constexpr):
    """The weights of the `count` best tokens, added up: the count-th best by digits of 8 bits."""
    left = tl.minimum(count, vocab.to(tl.int64)).to(tl.int32)
    prefix = tl.zeros([], tl.int64)
    digit = tl.arange(0, 256)
    for step in range(0, 4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            inside = token < vocab
            key = ordered(tl.load(line + token, mask=inside, other=0.0))
            inside = inside & ((key >> (shift + 8)) == prefix)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=inside)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        found = tl.max(tl.where(above + counts >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit == found, above, 0), 0)
        prefix = prefix * 256 + found
    total = tl.zeros([], tl.int64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(line + token, mask=token < vocab, other=-INFINITY)
        weight = weight_of(x * inv_t - best)
        key = ordered(x)
        total += tl.sum(tl.where(key > prefix, weight, 0), 0)
    # The last ones have the same logit, so the same weight, whichever they are.
    bits = (prefix - 0x80000000).to(tl.int32)
    last = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return total + left * weight_of(last * inv_t - best)


@triton.jit
def passes(x, before, count, best, goal, top_k, top_p, inv_t, log_min_p):
    """Whether the filters keep a token, from the weight and the number of those ranked before."""
    kept = (top_k == 0) | (count < top_k)
    kept = kept & ((top_p >= 1) | (before.to(tl.float64) < goal))
    return kept & (x * inv_t - best >= log_min_p)
