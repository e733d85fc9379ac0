"""What lies between linear layers on a device, one row a program, each beside its plain version.

Knows rows, pages and rotary angles as tensors; no weights matrix and no sequence. A row's bits
depend on that row only: the number of rows is in the grid and nowhere else.
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

EXACT = {"enable_fp_fusion": False}
"""Whether products are fused into sums does not depend on the compiler's mood."""


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


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one before it has ended."""
    return {"launch_pdl": True} if pdl else {}


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows on their way through an RMS norm, when what follows is a product.

    A norm divides a row by one number, so a product may take the row before the division and
    divide its results. Whoever writes the residual writes these beside it.
    """

    x: Tensor
    """[T, H] residual times norm weight, in the dtype of the weights."""
    squares: Tensor
    """[T, P] float32: sums of the residual's squares over each of P blocks of columns."""
    eps: float


def embed_rows(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    *,
    norm: Tensor | None = None,
    scaled: Scaled | None = None,
    pdl: bool = False,
) -> None:
    """hidden [T, H] float32 = the embedding of tokens [T] int32 in table [V, H].

    Args:
        norm: [H] weight of the norm in front of the first product, with `scaled`.
        scaled: Filled as well; its squares stand in block 0.
    """
    width = table.shape[1]
    _embed[(len(tokens),)](
        tokens,
        table,
        hidden,
        hidden if norm is None else norm,
        hidden if scaled is None else scaled.x,
        hidden if scaled is None else scaled.squares,
        width,
        BLOCK=triton.next_power_of_2(width),
        BLOCKS=0 if scaled is None else scaled.squares.shape[1],
        BLOCKS_PAD=1 if scaled is None else triton.next_power_of_2(scaled.squares.shape[1]),
        PDL=pdl,
        num_warps=_warps(width),
        **EXACT,
        **pdl_options(pdl),
    )


def embed_rows_plain(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    *,
    norm: Tensor | None = None,
    scaled: Scaled | None = None,
) -> None:
    hidden.copy_(table[tokens.long()])
    if norm is not None and scaled is not None:
        scaled.x.copy_(hidden * norm)
        scaled.squares.zero_()
        scaled.squares[:, 0] = hidden.square().sum(-1)


@triton.jit
def _embed(
    tokens, table, hidden, norm, x, squares, width,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + t).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    row = tl.load(table + token * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + t * width + at, row, mask=inside)
    if BLOCKS:
        w = tl.load(norm + at, mask=inside, other=0.0)
        tl.store(x + t * width + at, (row * w).to(x.dtype.element_ty), mask=inside)
        block = tl.arange(0, BLOCKS_PAD)
        total = tl.where(block == 0, tl.sum(row * row, 0), 0.0)
        tl.store(squares + t * BLOCKS + block, total, mask=block < BLOCKS)


def norm_rows(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """hidden += delta, then out = RMS norm of hidden.

    Args:
        hidden: [T, H] float32, modified when there is a delta.
        delta: [T, H] float, or [S, T, H] to add one after another, or None. May be `out`.
        weight: [H] float32.
        out: [T, H], rounded to its dtype once.
    """
    rows, width = hidden.shape
    parts = 0 if delta is None else delta.shape[0] if delta.dim() == 3 else 1
    _norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        eps,
        rows,
        width,
        BLOCK=triton.next_power_of_2(width),
        PARTS=parts,
        PDL=pdl,
        num_warps=_warps(width),
        **EXACT,
        **pdl_options(pdl),
    )


def norm_rows_plain(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    if delta is not None:
        for part in delta.view(-1, *hidden.shape):
            hidden += part.float()
    mean = hidden.square().mean(-1, keepdim=True)
    out.copy_(hidden * torch.rsqrt(mean + eps) * weight)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    hidden, delta, weight, out, eps, rows, width,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(hidden + t * width + at, mask=inside, other=0.0)
    if PARTS:
        for part in tl.static_range(PARTS):
            line = (part * rows.to(tl.int64) + t) * width
            row += tl.load(delta + line + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + t * width + at, row, mask=inside)
    inverse = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    tl.store(out + t * width + at, (row * inverse * w).to(out.dtype.element_ty), mask=inside)


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


def gate_rows(gate_up: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """out [T, I] = SiLU(gate) * up of gate_up [T, 2 I], the gates first."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _gate[(rows, triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, PDL=pdl, num_warps=4, **EXACT, **pdl_options(pdl)
    )


def gate_rows_plain(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), with no overflow on either side."""
    small = tl.exp2(tl.abs(x) * -1.4426950408889634)
    return x * tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + t * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (t * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * width + at, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


def _warps(width: int) -> int:
    """Of a program that holds a row: a rule of the width alone, since it decides a sum's order."""
    return 4 if width <= 2048 else 8
