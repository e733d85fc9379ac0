"""Attention and picks of a batch of conversations that each have one stretch of keys and values.

Knows rows as tensors, one new token a conversation; no model. Each kernel stands beside its plain
version. What is written here is training data: close to the engine's text, not its bits.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv import noise
from chatkv.sampling_triton_math import GUMBEL_MAX, INFINITY, NOBODY, best_of, better, gumbel

LOG2_E = tl.constexpr(1.4426950408889634)


def attend(q: Tensor, pages: Tensor, positions: Tensor, out: Tensor, scale: float) -> None:
    """out [B, HQ, D] = attention of each row to its own keys up to its position.

    Args:
        q: [B, HQ, D].
        pages: [B, 2, HK, S, D] of one layer, the new keys and values included.
        positions: [B] int32, of the new tokens.
    """
    rows, heads, dim = q.shape
    kv_heads, length = pages.shape[2], pages.shape[3]
    _attend[(rows, kv_heads)](
        q,
        pages,
        positions,
        out,
        scale,
        LENGTH=length,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        BLOCK=64,
        num_warps=4,
        num_stages=3,
    )


def attend_plain(q: Tensor, pages: Tensor, positions: Tensor, out: Tensor, scale: float) -> None:
    group = q.shape[1] // pages.shape[2]
    for row, last in enumerate(positions.tolist()):
        keys, values = pages[row, :, :, : last + 1].float().repeat_interleave(group, 1)
        scores = torch.einsum("hd,hld->hl", q[row].float(), keys) * scale
        out[row] = torch.einsum("hl,hld->hd", scores.softmax(-1), values).to(out.dtype)


@triton.jit
def _attend(
    q, pages, positions, out, scale, LENGTH: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    head = tl.arange(0, GROUP_PAD)
    channel = tl.arange(0, DIM)
    place = tl.arange(0, BLOCK)
    length = tl.load(positions + row) + 1
    at = (row * HEADS + kv_head * group + head[:, None]) * DIM + channel[None, :]
    query = tl.load(q + at, mask=head[:, None] < group, other=0.0)
    keys = pages + ((row * 2) * KV_HEADS + kv_head) * LENGTH * DIM
    values = keys + KV_HEADS * LENGTH * DIM
    high = tl.full([GROUP_PAD], -INFINITY, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for first in range(0, length, BLOCK):
        inside = first + place < length
        k = tl.load(
            keys + (first + place)[None, :] * DIM + channel[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        v = tl.load(
            values + (first + place)[:, None] * DIM + channel[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        scores = tl.dot(query, k) * (scale * LOG2_E)
        scores = tl.where(inside[None, :], scores, -INFINITY)
        best = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp2(scores - best[:, None])
        fade = tl.exp2(high - best)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        high = best
    result = mixed / total[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=head[:, None] < group)


def pick(logits: Tensor, inverse_t: Tensor, seeds: Tensor, positions: Tensor, out: Tensor) -> None:
    """out [B] int32: the token each row picks, without filters.

    Args:
        logits: [B, V] float32.
        inverse_t: [B] float32, 1 / temperature, or 0 for the most probable token.
        seeds: [B] int64.
        positions: [B] int32 of the tokens being chosen.
    """
    rows, vocab = logits.shape
    _pick[(rows,)](
        logits, inverse_t, seeds, positions, out, vocab, BLOCK=2048, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip


def pick_plain(
    logits: Tensor, inverse_t: Tensor, seeds: Tensor, positions: Tensor, out: Tensor
) -> None:
    ids = range(logits.shape[1])
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        scores = logits[row]
        if inverse_t[row] > 0:
            drawn = torch.from_numpy(noise.gumbel(seed, position, list(ids)))
            scores = scores * inverse_t[row] + drawn
        out[row] = scores.argmax().to(torch.int32)


@triton.jit
def _pick(logits, inverse_t, seeds, positions, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inv_t = tl.load(inverse_t + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.uint32)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    line = logits + row * vocab
    high = tl.full([], -INFINITY, tl.float32)
    chosen = tl.full([], NOBODY, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score = tl.load(line + token, mask=token < vocab, other=-INFINITY)
        if inv_t > 0:
            score = score * inv_t
            # Below this even the largest noise does not reach the best so far.
            if tl.max(score, 0) + GUMBEL_MAX >= high:
                drawn = gumbel(token, position, key0, key1)
                score = tl.where(token < vocab, score + drawn, -INFINITY)
        top, at = best_of(score, token)
        high, chosen = better(high, chosen, top, at)
    tl.store(out + row, chosen)
