"""Rows as heads: bias, norm, rotation, and their way into q and the pages. Plain version beside it.

Knows heads, pages and rotary angles as tensors; no weights matrix and no sequence. A row's bits
depend on that row only.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.models.launch_options import EXACT, pdl_options


@dataclass(frozen=True, slots=True)
class Rotary:
    """Angles of all positions, and how heads are laid out in a row of q, k and v."""

    cos: Tensor
    """[positions, D / 2] float32."""
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    """[D] float32 weights of a norm over each query head, as Qwen3 has; None without."""
    k_norm: Tensor | None = None
    eps: float = 0.0
    """Of those norms."""

    @property
    def all_heads(self) -> int:
        """Query, key and value heads."""
        return self.num_heads + 2 * self.num_kv_heads


def rotate_rows(
    qkv: Tensor,
    bias: Tensor | None,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor,
    q: Tensor,
    pages: Tensor,
    *,
    heads_a_program: int = 1,
    pdl: bool = False,
) -> None:
    """Add the bias, norm and rotate queries and keys, store keys and values in their slots.

    Args:
        qkv: [T, (HQ + 2 HK) D] float: query, key, then value heads.
        bias: Of the same width, float32, or None.
        positions: [T] int32.
        slots: [T] int64 physical; -1 stores nothing.
        q: [T, HQ, D], filled.
        pages: [P, 2, HK, S, D] of one layer, contiguous, modified.
        heads_a_program: Part of the bits when heads are normed.
    """
    rows = len(qkv)
    half = rotary.head_dim // 2
    has_norm = rotary.q_norm is not None
    _rotate[(rows, triton.cdiv(rotary.all_heads, heads_a_program))](
        qkv,
        qkv if bias is None else bias,
        rotary.q_norm if has_norm else qkv,
        rotary.k_norm if has_norm else qkv,
        rotary.cos,
        rotary.sin,
        positions,
        slots,
        q,
        pages,
        rotary.eps,
        HEADS=rotary.num_heads,
        KV_HEADS=rotary.num_kv_heads,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        BLOCK=heads_a_program,
        PAGE=pages.shape[3],
        HAS_BIAS=bias is not None,
        HAS_NORM=has_norm,
        PDL=pdl,
        num_warps=1 if heads_a_program == 1 else 4,
        **EXACT,
        **pdl_options(pdl),
    )


def rotate_rows_plain(
    qkv: Tensor,
    bias: Tensor | None,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor,
    q: Tensor,
    pages: Tensor,
) -> None:
    heads, kv_heads = rotary.num_heads, rotary.num_kv_heads
    rows = qkv.float() if bias is None else qkv.float() + bias
    rows = rows.view(len(qkv), -1, rotary.head_dim)
    parts = list(rows.split([heads, kv_heads, kv_heads], 1))
    cos, sin = (table[positions.long()][:, None] for table in (rotary.cos, rotary.sin))
    for place, weight in enumerate((rotary.q_norm, rotary.k_norm)):
        part = parts[place]
        if weight is not None:
            part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + rotary.eps) * weight
        a, b = part.chunk(2, -1)
        parts[place] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    q.copy_(parts[0])
    kept = slots >= 0
    page, offset = slots[kept] // pages.shape[3], slots[kept] % pages.shape[3]
    pages[page, 0, :, offset] = parts[1][kept].to(pages.dtype)
    pages[page, 1, :, offset] = parts[2][kept].to(pages.dtype)


@triton.jit
def store_heads(
    low, high, head, at, t, slot, q, pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Store both halves of heads: queries to q, keys and values to their slot.

    low, high: rotated, [.., ..] float32. head, at, t, slot: broadcast to the same shape; `at` is
    the channel within a half, `slot` is -1 where nothing is stored.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    inside = at < HALF
    is_q = (head < HEADS) & inside
    out = q + (t * HEADS + head) * (2 * HALF) + at
    tl.store(out, low.to(dtype), mask=is_q)
    tl.store(out + HALF, high.to(dtype), mask=is_q)
    is_value = head >= HEADS + KV_HEADS
    kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
    is_kv = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & (slot >= 0) & inside
    line = (slot // PAGE * 2 + is_value.to(tl.int32)) * KV_HEADS + kv_head
    out = pages + (line * PAGE + slot % PAGE) * (2 * HALF) + at
    tl.store(out, low.to(dtype), mask=is_kv)
    tl.store(out + HALF, high.to(dtype), mask=is_kv)


@triton.jit
def _rotate(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, q, pages, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    at = tl.arange(0, HALF_PAD)[None, :]
    inside = (at < HALF) & (head < HEADS + 2 * KV_HEADS)
    column = head * (2 * HALF) + at
    row = qkv + t * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    low = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + column + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias + column, mask=inside, other=0.0)
        high += tl.load(bias + column + HALF, mask=inside, other=0.0)
    is_turned = inside & (head < HEADS + KV_HEADS)
    if HAS_NORM:
        mean = tl.sum(low * low + high * high, 1) / (2 * HALF)
        inverse = tl.where(head < HEADS + KV_HEADS, tl.rsqrt(mean + eps)[:, None], 1.0)
        is_q = is_turned & (head < HEADS)
        is_k = is_turned & (head >= HEADS)
        w_low = tl.load(q_norm + at + head * 0, mask=is_q, other=1.0)
        w_high = tl.load(q_norm + at + HALF + head * 0, mask=is_q, other=1.0)
        w_low = tl.where(is_k, tl.load(k_norm + at + head * 0, mask=is_k, other=1.0), w_low)
        w_high = tl.where(
            is_k, tl.load(k_norm + at + HALF + head * 0, mask=is_k, other=1.0), w_high
        )
        low = low * inverse * w_low
        high = high * inverse * w_high
    angle = tl.load(positions + t).to(tl.int64) * HALF + at + head * 0
    c = tl.load(cos + angle, mask=is_turned, other=1.0)
    s = tl.load(sin + angle, mask=is_turned, other=0.0)
    slot = tl.load(slots + t + head * 0)
    store_heads(
        low * c - high * s, high * c + low * s, head, at, t, slot, q, pages,
        HEADS, KV_HEADS, HALF, PAGE,
    )  # fmt: skip
