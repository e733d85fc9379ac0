"""What lies between linear layers on a device, one row a program, each beside its plain version.

Knows rows as tensors; no weights matrix, no heads (`heads_triton.py`) and no sequence. A row's bits
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

from chatkv.models.launch_options import EXACT, pdl_options


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
