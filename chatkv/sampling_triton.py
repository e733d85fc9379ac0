"""Choosing a token on the device, all rows at once: the twin of `sampling_plain.py`.

Knows logits and settings as tensors; no sequence and no tree. Integers, and single float32
operations that are not fused, so that the token is that of the plain version, always. No list is
sorted: the best score of all is taken, and kept if its token passes the filters. If not, nothing
ranked behind it passes either, so the search goes on among those before it.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv import noise, sampling_plain
from chatkv.errors import ModelError
from chatkv.sampling import SamplingParams

INTEGERS, FLOATS = 4, 3
"""Columns of the settings of a row."""
BLOCK = 1024
"""Logits of one row looked at together."""
SPLITS = 16
"""Programs a row, in the passes over all logits."""


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
def settings(integers, floats, row):
    """(seed words, position, top_k, top_p, 1 / T or 0, log min_p) of a row."""
    seed = tl.load(integers + row * 4)
    position = tl.load(integers + row * 4 + 1).to(tl.uint32)
    top_k = tl.load(integers + row * 4 + 2)
    top_p = tl.load(floats + row * 3)
    inv_t = tl.load(floats + row * 3 + 1).to(tl.float32)
    log_min_p = tl.load(floats + row * 3 + 2).to(tl.float32)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    return key0, key1, position, top_k, top_p, inv_t, log_min_p


@triton.jit
def best_logit(maxima, row, SPLITS: tl.constexpr):
    """Largest logit of a row; NaN if there is a NaN, or if the best one is infinite."""
    part = tl.load(maxima + row * SPLITS + tl.arange(0, SPLITS))
    spoilt = tl.max((part != part).to(tl.int32), 0) > 0
    top = tl.max(tl.where(part == part, part, -INFINITY), 0)
    spoilt = spoilt | (tl.abs(top) == INFINITY)
    return tl.where(spoilt, float("nan"), top)


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


@triton.jit(do_not_specialize=["rows"])
def row_maxima(logits, rows, maxima, vocab, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """maxima [T, SPLITS]: the largest logit of each part of a row; NaN where one is.

    Grid (T, SPLITS), as for `row_scores`; `rows` [1] holds how many rows are real.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if row >= tl.load(rows):
        return
    size = tl.cdiv(tl.cdiv(vocab, SPLITS), BLOCK) * BLOCK
    start = part * size
    stop = tl.minimum(start + size, vocab)
    high = tl.full([BLOCK], -INFINITY, tl.float32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + token, mask=token < stop, other=-INFINITY)
        spoilt = spoilt | (x != x).to(tl.int32)
        high = tl.maximum(high, x)
    top = tl.where(tl.max(spoilt, 0) > 0, float("nan"), tl.max(high, 0))
    tl.store(maxima + row * SPLITS + part, top)


@triton.jit
def row_scores(
    logits, rows, integers, floats, maxima, scores, tokens, totals, vocab,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """scores, tokens, totals [T, SPLITS]: the best of each part of a row, and the part's weight."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if row >= tl.load(rows):
        return
    key0, key1, position, top_k, top_p, inv_t, _ = settings(integers, floats, row)
    top = best_logit(maxima, row, SPLITS)
    best = top * inv_t
    size = tl.cdiv(tl.cdiv(vocab, SPLITS), BLOCK) * BLOCK
    start = part * size
    stop = tl.minimum(start + size, vocab)
    line = logits + row * vocab
    score = tl.full([], -INFINITY, tl.float32)
    chosen = tl.full([], NOBODY, tl.int32)
    total = tl.zeros([], tl.int64)
    if top == top:
        if inv_t == 0:
            for first in range(start, stop, BLOCK):
                token = first + tl.arange(0, BLOCK)
                x = tl.load(line + token, mask=token < stop, other=-INFINITY)
                high, at = best_of(x, token)
                score, chosen = better(score, chosen, high, at)
        else:
            score, chosen = best_score(
                line, start, stop, INFINITY, 0, best, inv_t, position, key0, key1,
                best + GUMBEL_MIN, BLOCK,
            )  # fmt: skip
            if (top_p < 1) & (top_k == 0):
                for first in range(start, stop, BLOCK):
                    token = first + tl.arange(0, BLOCK)
                    x = tl.load(line + token, mask=token < stop, other=-INFINITY)
                    total += tl.sum(weight_of(x * inv_t - best), 0)
    at = row * SPLITS + part
    tl.store(scores + at, score)
    tl.store(tokens + at, chosen)
    tl.store(totals + at, total)


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
def row_choice(
    logits, rows, integers, floats, maxima, scores, tokens, totals, out, vocab,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out [T] int32: the token of each row, or -1 if its logits are no numbers. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(rows):
        return
    key0, key1, position, top_k, top_p, inv_t, log_min_p = settings(integers, floats, row)
    top = best_logit(maxima, row, SPLITS)
    best = top * inv_t
    at = row * SPLITS + tl.arange(0, SPLITS)
    _, chosen = best_of(tl.load(scores + at), tl.load(tokens + at))
    line = logits + row * vocab
    is_filtered = (top_k > 0) | (top_p < 1) | (log_min_p > -INFINITY)
    searching = is_filtered & (inv_t != 0) & (top == top) & (tl.abs(best) < INFINITY)
    total = tl.sum(tl.load(totals + at), 0)
    if searching & (top_k > 0) & (top_p < 1):
        total = weight_of_best(line, vocab, top_k, inv_t, best, BLOCK)
    goal = top_p * total.to(tl.float64)
    while searching:
        x = tl.load(line + chosen)
        before = tl.zeros([], tl.int64)
        count = tl.zeros([], tl.int64)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            other = tl.load(line + token, mask=token < vocab, other=-INFINITY)
            ahead = (other > x) | ((other == x) & (token < chosen))
            weight = weight_of(other * inv_t - best)
            before += tl.sum(tl.where(ahead, weight, 0), 0)
            count += tl.sum(ahead.to(tl.int32), 0)
        kept = (top_k == 0) | (count < top_k)
        kept = kept & ((top_p >= 1) | (before.to(tl.float64) < goal))
        kept = kept & (x * inv_t - best >= log_min_p)
        searching = not kept
        if searching:
            _, chosen = best_score(
                line, 0, vocab, x, chosen, best, inv_t, position, key0, key1,
                best + GUMBEL_MIN, BLOCK,
            )  # fmt: skip
    usable = (top == top) & (tl.abs(best) < INFINITY)
    tl.store(out + row, tl.where(usable, chosen, -1))


@dataclass(frozen=True, slots=True)
class PickRoom:
    """What picking for up to T rows needs on the device, besides the logits."""

    rows: Tensor
    """[1] int32: how many rows are real."""
    integers: Tensor
    """[T, 4] int64: seed, position, top_k, 0."""
    floats: Tensor
    """[T, 3] float64: top_p, 1 / temperature (0 at temperature 0), log of min_p."""
    maxima: Tensor
    scores: Tensor
    tokens: Tensor
    totals: Tensor
    out: Tensor
    """[T] int32 chosen tokens; -1 where the logits are no numbers."""

    @classmethod
    def of(cls, rows: Tensor, integers: Tensor, floats: Tensor) -> PickRoom:
        """Around the settings' own tensors."""
        count, device = len(integers), integers.device
        sizes = (count, SPLITS)
        return cls(
            rows,
            integers,
            floats,
            torch.zeros(sizes, dtype=torch.float32, device=device),
            torch.zeros(sizes, dtype=torch.float32, device=device),
            torch.zeros(sizes, dtype=torch.int32, device=device),
            torch.zeros(sizes, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
        )


def settings_of(params: SamplingParams, position: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A row of `PickRoom.integers` and of `PickRoom.floats`."""
    greedy = params.temperature == 0
    inv_t = 0.0 if greedy else float(np.float32(1.0 / params.temperature))
    log_min_p = float(np.float32(math.log(params.min_p))) if params.min_p > 0 else -math.inf
    return (params.seed, position, params.top_k, 0), (params.top_p, inv_t, log_min_p)


def pick_rows(logits: Tensor, room: PickRoom) -> None:
    """Choose a token for each row into `room.out`. Three launches; nothing is read back.

    Args:
        logits: [T, V] float32, contiguous.
    """
    count, vocab = logits.shape
    # Fusing a multiply with an add would round once instead of twice.
    exact = {"enable_fp_fusion": False}
    sizes = {"BLOCK": BLOCK, "SPLITS": SPLITS}
    row_maxima[(count, SPLITS)](logits, room.rows, room.maxima, vocab, **sizes, num_warps=4)
    row_scores[(count, SPLITS)](
        logits, room.rows, room.integers, room.floats, room.maxima, room.scores, room.tokens,
        room.totals, vocab, **sizes, num_warps=4, **exact,
    )  # fmt: skip
    row_choice[(count,)](
        logits, room.rows, room.integers, room.floats, room.maxima, room.scores, room.tokens,
        room.totals, room.out, vocab, BLOCK=4 * BLOCK, SPLITS=SPLITS, num_warps=16, **exact,
    )  # fmt: skip


def pick_rows_plain(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """`pick_rows` by the definition, on the host: the token of each row, or -1.

    Args:
        rows: Settings and position of each row.
    """
    chosen: list[int] = []
    for line, (params, position) in zip(logits.cpu().numpy(), rows, strict=True):
        try:
            token, _ = sampling_plain.pick_plain(
                line,
                position,
                seed=params.seed,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
            )
        except ModelError:
            token = -1
        chosen.append(token)
    return chosen
