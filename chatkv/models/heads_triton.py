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

from chatkv.attention.hadamard import hadamard
from chatkv.attention.store import write_rows_plain
from chatkv.attention.triton_store import CODE_LIMITS, CODES, code_of, round_code, scale_of
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
    scales: Tensor | None = None,
    *,
    heads_a_program: int = 1,
    pdl: bool = False,
) -> None:
    """Add the bias, norm and rotate queries and keys, store keys and values in their slots.

    Into quantised pages, rotated queries and keys go multiplied as `hadamard` says.

    Args:
        qkv: [T, (HQ + 2 HK) D] float: query, key, then value heads.
        bias: Of the same width, float32, or None.
        positions: [T] int32.
        slots: [T] int64 physical; -1 stores nothing.
        q: [T, HQ, D], filled.
        pages: [P, 2, HK, S, D] of one layer ([..., D / 2] for int4), contiguous, modified.
        scales: [P, 2, HK, S, C] float16 of quantised pages, contiguous, modified; else None.
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
        pages if scales is None else scales,
        rotary.eps,
        HEADS=rotary.num_heads,
        KV_HEADS=rotary.num_kv_heads,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        BLOCK=heads_a_program,
        PAGE=pages.shape[3],
        CODE=CODES.get(pages.dtype, 0),
        LIMIT=CODE_LIMITS.get(pages.dtype, 0.0),
        STEPS=(half & -half).bit_length() - 1,
        SHARE=(2 * (half & -half)) ** -0.5,
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
    scales: Tensor | None = None,
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
        if scales is not None:
            parts[place] = hadamard(parts[place])
    q.copy_(parts[0])
    write_rows_plain(parts[1], parts[2], pages, scales, slots)


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
def store_codes(
    low, high, head, at, t, slot, q, pages, scales,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    CODE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """`store_heads` into quantised pages; both halves of a head are here whole, [heads, HALF_PAD].

    A row's codes depend on the row alone. CODE and LIMIT as in `triton_store.write_kernel`.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    inside = at < HALF
    is_q = (head < HEADS) & inside
    out = q + (t * HEADS + head) * (2 * HALF) + at
    tl.store(out, low.to(dtype), mask=is_q)
    tl.store(out + HALF, high.to(dtype), mask=is_q)
    is_value = head >= HEADS + KV_HEADS
    kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
    is_kv = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & (slot >= 0)
    line = ((slot // PAGE * 2 + is_value.to(tl.int32)) * KV_HEADS + kv_head) * PAGE + slot % PAGE
    low = tl.where(inside, low, 0.0)
    high = tl.where(inside, high, 0.0)
    if CODE == 2:
        GROUPS: tl.constexpr = HALF // 32
        BLOCK: tl.constexpr = low.shape[0]
        low = tl.reshape(low, (BLOCK, GROUPS, 32))
        high = tl.reshape(high, (BLOCK, GROUPS, 32))
        low_scale = scale_of(low, LIMIT, 2)
        high_scale = scale_of(high, LIMIT, 2)
        low_code = round_code(code_of(low, low_scale[:, :, None], LIMIT), CODE)
        high_code = round_code(code_of(high, high_scale[:, :, None], LIMIT), CODE)
        byte = (low_code + 8.0).to(tl.int32) | ((high_code + 8.0).to(tl.int32) << 4)
        byte = tl.reshape(byte, (BLOCK, HALF)).to(tl.uint8)
        tl.store(pages + line * HALF + at, byte, mask=is_kv & inside)
        place = scales + line * (2 * GROUPS) + tl.arange(0, GROUPS)[None, :]
        tl.store(place, low_scale, mask=is_kv)
        tl.store(place + GROUPS, high_scale, mask=is_kv)
    else:
        scale = scale_of(tl.maximum(tl.abs(low), tl.abs(high)), LIMIT, 1)[:, None]
        out = pages + line * (2 * HALF) + at
        code = round_code(code_of(low, scale, LIMIT), CODE)
        tl.store(out, code.to(pages.dtype.element_ty), mask=is_kv & inside)
        code = round_code(code_of(high, scale, LIMIT), CODE)
        tl.store(out + HALF, code.to(pages.dtype.element_ty), mask=is_kv & inside)
        tl.store(scales + line, scale, mask=is_kv)


@triton.jit
def multiply_heads(low, high, at, STEPS: tl.constexpr, SHARE: tl.constexpr):
    """Both halves of heads, [heads, HALF_PAD], times the matrix of `hadamard.hadamard`.

    STEPS: log2 of its block. SHARE: what a channel has of each of its set.
    """
    low, high = low + high, low - high
    for i in tl.static_range(STEPS):
        other = tl.broadcast_to(at ^ (1 << i), low.shape)
        is_second = (at >> i) & 1 == 1
        of_low = tl.gather(low, other, 1)
        of_high = tl.gather(high, other, 1)
        low = tl.where(is_second, of_low - low, low + of_low)
        high = tl.where(is_second, of_high - high, high + of_high)
    return low * SHARE, high * SHARE


@triton.jit
def _rotate(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, q, pages, scales, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, CODE: tl.constexpr, LIMIT: tl.constexpr,
    STEPS: tl.constexpr, SHARE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
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
    turned = low * c - high * s
    high = high * c + low * s
    if CODE:
        mixed_low, mixed_high = multiply_heads(turned, high, at, STEPS, SHARE)
        turned = tl.where(is_turned, mixed_low, turned)
        high = tl.where(is_turned, mixed_high, high)
        # One slot for all heads of the program.
        slot = tl.load(slots + t) + head.to(tl.int64) * 0
        store_codes(
            turned, high, head, at, t, slot, q, pages, scales,
            HEADS, KV_HEADS, HALF, PAGE, CODE, LIMIT,
        )  # fmt: skip
    else:
        slot = tl.load(slots + t + head * 0)
        store_heads(turned, high, head, at, t, slot, q, pages, HEADS, KV_HEADS, HALF, PAGE)
