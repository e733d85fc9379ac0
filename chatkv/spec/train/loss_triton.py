"""The loss of guesses against the target's law, and its gradient, in one pass over the logits.

Knows rows of logits; no head. With p the target's probabilities of the draft ids (what is missing
to 1 is the rest) and q the softmax of the guess:

    loss = cross * sum(-p log q) + shift * (1 - sum min(p, q))
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv.sampling_triton_math import INFINITY, NOBODY

CROSS, SHIFT = 0.1, 0.9


def log_totals(logits: Tensor, out: Tensor) -> None:
    """out [N] float32 = log of the sum of exp of each row of logits [N, V] float32."""
    rows, width = logits.shape
    _log_total[(rows,)](logits, out, width, BLOCK=4096, num_warps=8)


def log_totals_plain(logits: Tensor, out: Tensor) -> None:
    out.copy_(logits.logsumexp(-1))


@triton.jit
def _log_total(logits, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    high = tl.full([], -INFINITY, tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * width + at, mask=at < width, other=-INFINITY)
        best = tl.maximum(high, tl.max(x, 0))
        total = total * tl.exp(high - best) + tl.sum(tl.exp(x - best), 0)
        high = best
    tl.store(out + row, high + tl.log(total))


def compare(
    guess: Tensor,
    target: Tensor,
    log_total: Tensor,
    weight: Tensor,
    out: Tensor,
    best: Tensor,
    ahead: int,
) -> None:
    """Loss and overlap of every row; `guess` becomes the gradient of the weighted losses' sum.

    Args:
        guess: [N, K] logits over draft ids, modified.
        target: [N, K] the target's logits of the same ids; row n + ahead belongs to guess n.
        log_total: [N] float32, log of the sum of exp of all the target's logits.
        weight: [N] float32; a row of weight 0 is not read.
        out: [N, 2] float32, filled: loss without weight, sum min(p, q).
        best: [N] int32, filled: place of the largest guess.
        ahead: How many rows later the target's row stands.
    """
    rows, width = guess.shape
    _compare[(rows,)](
        guess, target, log_total, weight, out, best, rows, width, ahead, CROSS, SHIFT,
        BLOCK=triton.next_power_of_2(width), num_warps=16 if width > 4096 else 4,
    )  # fmt: skip


def compare_plain(
    guess: Tensor,
    target: Tensor,
    log_total: Tensor,
    weight: Tensor,
    out: Tensor,
    best: Tensor,
    ahead: int,
) -> None:
    later = (torch.arange(len(guess), device=guess.device) + ahead).clamp(max=len(guess) - 1)
    is_used = (weight > 0)[:, None]
    z = guess.float()
    p = (target[later].float() - log_total[later][:, None]).exp()
    q, log_q = z.softmax(-1), z.log_softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    loss = CROSS * -(p * log_q).sum(-1) + SHIFT * (1 - overlap)
    below = (q < p).float()
    rising = q * (below - (q * below).sum(-1, keepdim=True))
    slope = CROSS * (p.sum(-1, keepdim=True) * q - p) - SHIFT * rising
    best.copy_(z.argmax(-1))
    out.copy_(torch.where(is_used, torch.stack([loss, overlap], -1), 0.0))
    guess.copy_(torch.where(is_used, slope * weight[:, None], 0.0))


@triton.jit
def _compare(
    guess, target, log_total, weight, out, best, rows, width, ahead, cross, shift,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + row)
    line = guess + row * width
    if w == 0:
        tl.store(line + at, tl.zeros([BLOCK], guess.dtype.element_ty), mask=inside)
        tl.store(out + row * 2, 0.0)
        tl.store(out + row * 2 + 1, 0.0)
        tl.store(best + row, 0)
        return
    later = tl.minimum(row + ahead, rows - 1)
    z = tl.load(line + at, mask=inside, other=-INFINITY).to(tl.float32)
    high = tl.max(z, 0)
    tl.store(best + row, tl.min(tl.where(z == high, at, NOBODY), 0))
    weights = tl.where(inside, tl.exp(z - high), 0.0)
    total = tl.sum(weights, 0)
    q = weights / total
    log_q = tl.where(inside, z - high - tl.log(total), 0.0)
    t = tl.load(target + later * width + at, mask=inside, other=-INFINITY).to(tl.float32)
    p = tl.where(inside, tl.exp(t - tl.load(log_total + later)), 0.0)
    overlap = tl.sum(tl.minimum(p, q), 0)
    loss = shift * (1 - overlap) - cross * tl.sum(p * log_q, 0)
    below = (q < p).to(tl.float32)
    rising = q * (below - tl.sum(q * below, 0))
    slope = cross * (tl.sum(p, 0) * q - p) - shift * rising
    tl.store(line + at, (slope * w).to(guess.dtype.element_ty), mask=inside)
    tl.store(out + row * 2, loss)
    tl.store(out + row * 2 + 1, overlap)
