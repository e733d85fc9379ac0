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
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv import sampling_plain
from chatkv.errors import ModelError
from chatkv.sampling import SamplingParams
from chatkv.sampling_triton_math import (
    GUMBEL_MIN,
    INFINITY,
    NOBODY,
    best_of,
    best_score,
    better,
    passes,
    weigh_before,
    weight_of,
    weight_of_best,
)

INTEGERS, FLOATS = 2, 3
"""Columns of the settings of a row."""
BLOCK = 1024
"""Logits of one row looked at together."""
SPLITS = 16
"""Programs a row, in the passes over all logits."""


@triton.jit
def settings(positions, integers, floats, row):
    """(seed words, position, top_k, top_p, 1 / T or 0, log min_p) of a row."""
    seed = tl.load(integers + row * 2)
    # The token stands right behind its row.
    position = (tl.load(positions + row) + 1).to(tl.uint32)
    top_k = tl.load(integers + row * 2 + 1)
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
def part_of(vocab, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The tokens of this program: start, stop."""
    size = tl.cdiv(tl.cdiv(vocab, SPLITS), BLOCK) * BLOCK
    start = tl.program_id(1) * size
    return start, tl.minimum(start + size, vocab)


@triton.jit
def candidate(scores, tokens, row, SPLITS: tl.constexpr):
    """The token with the best score of all parts."""
    at = row * SPLITS + tl.arange(0, SPLITS)
    _, token = best_of(tl.load(scores + at), tl.load(tokens + at))
    return token


@triton.jit
def kept_in_round(
    line, token, ranks, goals, row, best, top_k, top_p, inv_t, log_min_p, ROUND: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Whether a round's candidate passes, from what `row_ranks` found in each part."""
    at = ranks + ((row * 2 + ROUND) * SPLITS + tl.arange(0, SPLITS)) * 2
    before = tl.sum(tl.load(at), 0)
    count = tl.sum(tl.load(at + 1), 0)
    x = tl.load(line + token)
    return passes(x, before, count, best, tl.load(goals + row), top_k, top_p, inv_t, log_min_p)


@triton.jit
def row_maxima(
    logits, rows, maxima, vocab,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """maxima [T, SPLITS]: the largest logit of each part of a row; NaN where one is.

    Grid (T, SPLITS), as for all but `row_choice`; `rows` [1] holds how many rows are real.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(rows):
        return
    start, stop = part_of(vocab, BLOCK, SPLITS)
    high = tl.full([BLOCK], -INFINITY, tl.float32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + token, mask=token < stop, other=-INFINITY)
        spoilt = spoilt | (x != x).to(tl.int32)
        high = tl.maximum(high, x)
    top = tl.where(tl.max(spoilt, 0) > 0, float("nan"), tl.max(high, 0))
    tl.store(maxima + row * SPLITS + tl.program_id(1), top)


@triton.jit
def row_scores(
    logits, rows, positions, integers, floats, maxima, scores, tokens, totals, ranks, goals, vocab,
    ROUND: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scores, tokens [2, T, SPLITS]: the best of each part of a row; totals [T, SPLITS]: weights.

    Round 1 looks among those ranked before the candidate of round 0, if that was dropped.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(rows):
        return
    key0, key1, position, top_k, top_p, inv_t, log_min_p = settings(
        positions, integers, floats, row
    )
    top = best_logit(maxima, row, SPLITS)
    best = top * inv_t
    start, stop = part_of(vocab, BLOCK, SPLITS)
    line = logits + row * vocab
    at = row * SPLITS + tl.program_id(1)
    score = tl.full([], -INFINITY, tl.float32)
    chosen = tl.full([], NOBODY, tl.int32)
    if ROUND == 0:
        total = tl.zeros([], tl.int64)
        if top == top:
            if inv_t == 0:
                for first in range(start, stop, BLOCK):
                    token = first + tl.arange(0, BLOCK)
                    x = tl.load(line + token, mask=token < stop, other=-INFINITY)
                    high, where = best_of(x, token)
                    score, chosen = better(score, chosen, high, where)
            else:
                score, chosen = best_score(
                    line, start, stop, -INFINITY, 0, best, inv_t, position, key0, key1,
                    best + GUMBEL_MIN, BLOCK,
                )  # fmt: skip
                if (top_p < 1) & (top_k == 0):
                    for first in range(start, stop, BLOCK):
                        token = first + tl.arange(0, BLOCK)
                        x = tl.load(line + token, mask=token < stop, other=-INFINITY)
                        total += tl.sum(weight_of(x * inv_t - best), 0)
        tl.store(scores + at, score)
        tl.store(tokens + at, chosen)
        tl.store(totals + at, total)
    else:
        if is_searching(top, best, top_k, top_p, inv_t, log_min_p):
            token = candidate(scores, tokens, row, SPLITS)
            if not kept_in_round(
                line, token, ranks, goals, row, best, top_k, top_p, inv_t, log_min_p, 0, SPLITS
            ):
                score, chosen = best_score(
                    line, start, stop, tl.load(line + token), token, best, inv_t, position, key0,
                    key1, best + GUMBEL_MIN, BLOCK,
                )  # fmt: skip
                at += tl.num_programs(0) * SPLITS
                tl.store(scores + at, score)
                tl.store(tokens + at, chosen)


@triton.jit
def is_searching(top, best, top_k, top_p, inv_t, log_min_p):
    """Whether filters can drop a candidate; not for greedy rows and rows that are no numbers."""
    is_filtered = (top_k > 0) | (top_p < 1) | (log_min_p > -INFINITY)
    return is_filtered & (inv_t != 0) & (top == top) & (tl.abs(best) < INFINITY)


@triton.jit
def row_ranks(
    logits, rows, positions, integers, floats, maxima, scores, tokens, totals, ranks, goals, vocab,
    ROUND: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ranks [T, 2, SPLITS, 2] int64: weight and number of those before a round's candidate.

    Round 0 also writes goals [T] float64: the weight before a token from which top-p drops it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(rows):
        return
    _, _, _, top_k, top_p, inv_t, log_min_p = settings(positions, integers, floats, row)
    top = best_logit(maxima, row, SPLITS)
    best = top * inv_t
    if is_searching(top, best, top_k, top_p, inv_t, log_min_p):
        line = logits + row * vocab
        token = candidate(scores, tokens, row, SPLITS)
        open_round = True
        if ROUND == 0:
            total = tl.sum(tl.load(totals + row * SPLITS + tl.arange(0, SPLITS)), 0)
            if (top_k > 0) & (top_p < 1):
                total = weight_of_best(line, vocab, top_k, inv_t, best, 4 * BLOCK)
            if tl.program_id(1) == 0:
                tl.store(goals + row, top_p * total.to(tl.float64))
        else:
            open_round = not kept_in_round(
                line, token, ranks, goals, row, best, top_k, top_p, inv_t, log_min_p, 0, SPLITS
            )
        if open_round:
            if ROUND == 1:
                second = tl.num_programs(0) * SPLITS
                token = candidate(scores + second, tokens + second, row, SPLITS)
            start, stop = part_of(vocab, BLOCK, SPLITS)
            x = tl.load(line + token)
            before, count = weigh_before(line, start, stop, x, token, best, inv_t, BLOCK)
            at = ranks + ((row * 2 + ROUND) * SPLITS + tl.program_id(1)) * 2
            tl.store(at, before)
            tl.store(at + 1, count)


@triton.jit
def row_choice(
    logits, rows, positions, integers, floats, maxima, scores, tokens, ranks, goals, out, vocab,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T] int32: the token of each row, or -1 if its logits are no numbers. Grid (T,)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(rows):
        return
    key0, key1, position, top_k, top_p, inv_t, log_min_p = settings(
        positions, integers, floats, row
    )
    top = best_logit(maxima, row, SPLITS)
    best = top * inv_t
    line = logits + row * vocab
    chosen = candidate(scores, tokens, row, SPLITS)
    searching = is_searching(top, best, top_k, top_p, inv_t, log_min_p)
    if searching:
        searching = not kept_in_round(
            line, chosen, ranks, goals, row, best, top_k, top_p, inv_t, log_min_p, 0, SPLITS
        )
        if searching:
            second = tl.num_programs(0) * SPLITS
            chosen = candidate(scores + second, tokens + second, row, SPLITS)
            searching = not kept_in_round(
                line, chosen, ranks, goals, row, best, top_k, top_p, inv_t, log_min_p, 1, SPLITS
            )
    # Two rounds were made with many programs a row; what is left is rare.
    while searching:
        _, chosen = best_score(
            line, 0, vocab, tl.load(line + chosen), chosen, best, inv_t, position, key0, key1,
            best + GUMBEL_MIN, BLOCK,
        )  # fmt: skip
        x = tl.load(line + chosen)
        before, count = weigh_before(line, 0, vocab, x, chosen, best, inv_t, BLOCK)
        searching = not passes(
            x, before, count, best, tl.load(goals + row), top_k, top_p, inv_t, log_min_p
        )
    usable = (top == top) & (tl.abs(best) < INFINITY)
    tl.store(out + row, tl.where(usable, chosen, -1))


@dataclass(frozen=True, slots=True)
class PickRoom:
    """What picking for up to T rows needs on the device, besides the logits."""

    rows: Tensor
    """[1] int32: how many rows are real."""
    positions: Tensor
    """[T] int32, of each row: the token chosen stands one behind."""
    integers: Tensor
    """[T, 2] int64: seed, top_k."""
    floats: Tensor
    """[T, 3] float64: top_p, 1 / temperature (0 at temperature 0), log of min_p."""
    maxima: Tensor
    scores: Tensor
    tokens: Tensor
    totals: Tensor
    ranks: Tensor
    goals: Tensor
    out: Tensor
    """[T] int32 chosen tokens; -1 where the logits are no numbers."""

    @classmethod
    def of(cls, rows: Tensor, positions: Tensor, integers: Tensor, floats: Tensor) -> PickRoom:
        """Around the settings' own tensors."""
        count, device = len(integers), integers.device
        return cls(
            rows,
            positions,
            integers,
            floats,
            torch.zeros(count, SPLITS, dtype=torch.float32, device=device),
            torch.zeros(2, count, SPLITS, dtype=torch.float32, device=device),
            torch.zeros(2, count, SPLITS, dtype=torch.int32, device=device),
            torch.zeros(count, SPLITS, dtype=torch.int64, device=device),
            torch.zeros(count, 2, SPLITS, 2, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.float64, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
        )


def settings_of(params: SamplingParams) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A row of `PickRoom.integers` and of `PickRoom.floats`."""
    greedy = params.temperature == 0
    inv_t = 0.0 if greedy else float(np.float32(1.0 / params.temperature))
    log_min_p = float(np.float32(math.log(params.min_p))) if params.min_p > 0 else -math.inf
    return (params.seed, params.top_k), (params.top_p, inv_t, log_min_p)


def pick_rows(logits: Tensor, room: PickRoom, *, pdl: bool = False) -> None:
    """Choose a token for each row into `room.out`. Six launches; nothing is read back.

    Args:
        logits: [T, V] float32, contiguous.
        pdl: The device starts a kernel before the one before it has ended.
    """
    count, vocab = logits.shape
    grid = (count, SPLITS)
    # Fusing a multiply with an add would round once instead of twice.
    options: dict[str, Any] = {"SPLITS": SPLITS, "PDL": pdl, "enable_fp_fusion": False}
    options |= {"launch_pdl": True} if pdl else {}
    small: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4, **options}
    given = (
        logits, room.rows, room.positions, room.integers, room.floats, room.maxima, room.scores,
        room.tokens,
    )  # fmt: skip
    found = (room.totals, room.ranks, room.goals)
    row_maxima[grid](logits, room.rows, room.maxima, vocab, **small)
    for turn in range(2):
        row_scores[grid](*given, *found, vocab, ROUND=turn, **small)
        row_ranks[grid](*given, *found, vocab, ROUND=turn, **small)
    row_choice[(count,)](
        *given, room.ranks, room.goals, room.out, vocab, BLOCK=4 * BLOCK, num_warps=16, **options
    )


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
