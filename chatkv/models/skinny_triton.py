"""Linear layers of a step, with what stands behind them in the same launch.

Knows rows, weight matrices and pages as tensors; no model and no sequence. One program multiplies
a block of rows with a few weight rows, its part of the inner dimension in ascending order, and
where that is cut, it is cut at fixed places: a row's bits do not depend on how many rows there
are. Each function stands beside its plain version.

Rows come normed, or as `fused_triton.Scaled`: then results are divided by the row's norm.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.models.fused_triton import (
    EXACT,
    Rotary,
    Scaled,
    gate_rows_plain,
    pdl_options,
    rotate_rows_plain,
    silu,
    store_heads,
)
from chatkv.models.skinny_tiles import (
    LINE_WEIGHTS,
    Tile,
    pair_tile,
    residual_columns,
    residual_tile,
    single_tile,
    split_tile,
)

ROWS = 16
"""Rows of a block at least; buffers hold a multiple of this."""
MOST_ROWS = 64
"""Rows of a block at most."""
SHARED_BYTES = 200_000
"""Of one program, at most; its stages are fewer where rows are many."""
LINE = tl.constexpr(LINE_WEIGHTS)


def project(
    x: Tensor | Scaled, weight: Tensor, out: Tensor, *, tile: Tile | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """out [T, N] = x [T, K] times weight [N, K], rounded to the dtype of out (float32: not)."""
    tile = tile or single_tile(*weight.shape)
    _launch(_project, x, weight, len(weight), tile, pdl, out=out)


def project_plain(x: Tensor | Scaled, weight: Tensor, out: Tensor) -> None:
    out.copy_(_product(x, weight))


def project_parts(
    x: Tensor, weight: Tensor, parts: Tensor, *, tile: Tile | None = None, pdl: bool = False
) -> None:
    """parts [S, T, N] float32, which add up to x [T, K] times weight [N, K]."""
    tile = tile or split_tile(*weight.shape)
    assert tile.split == len(parts), f"{len(parts)} parts for a split in {tile.split}"
    _launch(_project, x, weight, len(weight), tile, pdl, out=parts)


def project_parts_plain(x: Tensor, weight: Tensor, parts: Tensor) -> None:
    pieces = zip(parts, x.chunk(len(parts), 1), weight.chunk(len(parts), 1), strict=True)
    for out, rows, columns in pieces:
        out.copy_(_product(rows, columns))


def add_project(
    x: Tensor, weight: Tensor, hidden: Tensor, norm: Tensor, scaled: Scaled, *,
    tile: Tile | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """hidden [T, N] float32 += x [T, K] times weight [N, K]; `scaled` gets it for the next product.

    Args:
        norm: [N] weight of the norm that comes next.
    """
    tile = replace(tile or residual_tile(*weight.shape), n=residual_columns(len(weight)))
    _launch(
        _add_project, x, weight, len(weight), tile, pdl,
        hidden=hidden, norm=norm, x_out=scaled.x, squares_out=scaled.squares,
        BLOCKS_OUT=scaled.squares.shape[1],
    )  # fmt: skip


def add_project_plain(
    x: Tensor, weight: Tensor, hidden: Tensor, norm: Tensor, scaled: Scaled
) -> None:
    hidden += _product(x, weight)
    scaled.x.copy_(hidden * norm)
    for block, piece in enumerate(hidden.split(residual_columns(len(weight)), 1)):
        scaled.squares[:, block] = piece.square().sum(-1)


def gate_project(
    x: Tensor | Scaled, weight: Tensor, out: Tensor, *, tile: Tile | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """out [T, I] = SiLU(gate) * up, where weight [2 I, K] holds the gates, then the ups."""
    inner, inputs = len(weight) // 2, weight.shape[1]
    tile = tile or pair_tile(inner, inputs)
    _launch(_gate_project, x, weight, inner, tile, pdl, out=out)


def gate_project_plain(x: Tensor | Scaled, weight: Tensor, out: Tensor) -> None:
    gate_rows_plain(_product(x, weight), out)


def rotate_project(
    x: Tensor | Scaled, weight: Tensor, bias: Tensor | None, rotary: Rotary, positions: Tensor,
    slots: Tensor, q: Tensor, pages: Tensor, *, tile: Tile | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Queries, keys and values of rows: product, bias, rotation, and into q and the pages.

    As `fused_triton.rotate_rows` behind `project`, for heads that are not normed.
    """
    half = rotary.head_dim // 2
    tile = tile or pair_tile(rotary.all_heads * half, weight.shape[1])
    while half % tile.n:
        tile = replace(tile, n=tile.n // 2)
    _launch(
        _rotate_project, x, weight, rotary.all_heads * half, tile, pdl,
        bias=weight if bias is None else bias, cos=rotary.cos, sin=rotary.sin,
        positions=positions, slots=slots, q=q, pages=pages,
        HEADS=rotary.num_heads, KV_HEADS=rotary.num_kv_heads, HALF=half, PAGE=pages.shape[3],
        HAS_BIAS=bias is not None,
    )  # fmt: skip


def rotate_project_plain(
    x: Tensor | Scaled, weight: Tensor, bias: Tensor | None, rotary: Rotary, positions: Tensor,
    slots: Tensor, q: Tensor, pages: Tensor,
) -> None:  # fmt: skip
    rotate_rows_plain(_product(x, weight), bias, rotary, positions, slots, q, pages)


def _product(x: Tensor | Scaled, weight: Tensor) -> Tensor:
    """[T, N] float32, with the roundings of the kernels."""
    if isinstance(x, Tensor):
        return x.float() @ weight.float().T
    mean = x.squares.sum(-1, keepdim=True) / weight.shape[1]
    return x.x.float() @ weight.float().T * torch.rsqrt(mean + x.eps)


def _launch(
    kernel: Any, x: Tensor | Scaled, weight: Tensor, outputs: int, tile: Tile, pdl: bool,
    **more: Any,
) -> None:  # fmt: skip
    scaled = None if isinstance(x, Tensor) else x
    source = x if isinstance(x, Tensor) else x.x
    rows, inputs = source.shape
    # A sum over the columns of a block is laid out over the block: one size for all row counts.
    sums = scaled is not None or kernel is _add_project
    block = ROWS if sums else min(MOST_ROWS, rows)
    halves = 2 if kernel in (_gate_project, _rotate_project) else 1
    stage_bytes = weight.element_size() * tile.k * (tile.n * halves + block)
    assert rows % block == 0, f"{rows} rows are no multiple of {block}"
    assert inputs % (tile.k * tile.split) == 0, f"{inputs} inputs, {tile}"
    blocks = 0 if scaled is None else scaled.squares.shape[1]
    kernel[(rows // block, triton.cdiv(outputs, tile.n), tile.split)](
        x=source,
        squares=source if scaled is None else scaled.squares,
        eps=0.0 if scaled is None else scaled.eps,
        weight=weight,
        outputs=outputs,
        inputs=inputs,
        part_inputs=inputs // tile.split,
        **more,
        BLOCKS=blocks,
        BLOCKS_PAD=triton.next_power_of_2(max(1, blocks)),
        BLOCK_M=block,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        AHEAD=tile.ahead,
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=max(2, min(tile.stages, SHARED_BYTES // stage_bytes)),
        **EXACT,
        **pdl_options(pdl),
    )


@triton.jit
def _ask(weight, row, inputs, start, AHEAD: tl.constexpr):
    """Have the first weights of these rows brought to the cache."""
    if AHEAD:
        line = tl.minimum(start + tl.arange(0, AHEAD // LINE) * LINE, inputs - 1)
        at = (weight + row[:, None] * inputs + line[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _row_scale(
    squares, eps, inputs, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK_M: tl.constexpr
):
    """[BLOCK_M, 1]: what the results of a row are multiplied with."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    if BLOCKS:
        block = tl.arange(0, BLOCKS_PAD)
        part = tl.load(
            squares + m[:, None] * BLOCKS + block[None, :],
            mask=(block < BLOCKS)[None, :],
            other=0.0,
        )
        return tl.rsqrt(tl.sum(part, 1) / inputs + eps)[:, None]
    else:
        return tl.full([BLOCK_M, 1], 1.0, tl.float32)


@triton.jit
def _times(x, weight, row, inputs, start, stop, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, rows] float32: the block's rows times those weight rows, from start to stop."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m[:, None] * inputs + k[None, :]
    w_at = weight + row[:, None] * inputs + k[None, :]
    acc = tl.zeros([BLOCK_M, row.shape[0]], tl.float32)
    for at in range(start, stop, BLOCK_K):
        rows = tl.load(x_at + at)
        weights = tl.load(w_at + at, eviction_policy="evict_first")
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit
def _times_two(x, weight, row, apart, inputs, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """`_times` with two sets of weight rows, the second `apart` rows behind the first."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m[:, None] * inputs + k[None, :]
    first_at = weight + row[:, None] * inputs + k[None, :]
    second_at = weight + (row + apart)[:, None] * inputs + k[None, :]
    first = tl.zeros([BLOCK_M, row.shape[0]], tl.float32)
    second = tl.zeros([BLOCK_M, row.shape[0]], tl.float32)
    for at in range(0, inputs, BLOCK_K):
        rows = tl.load(x_at + at)
        first_weights = tl.load(first_at + at, eviction_policy="evict_first")
        second_weights = tl.load(second_at + at, eviction_policy="evict_first")
        first = tl.dot(rows, tl.trans(first_weights), first, input_precision="ieee")
        second = tl.dot(rows, tl.trans(second_weights), second, input_precision="ieee")
    return first, second


@triton.jit
def _project(
    x, squares, eps, weight, outputs, inputs, part_inputs, out,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    part = tl.program_id(2)
    start = part * part_inputs
    if PDL:
        gdc_launch_dependents()
        _ask(weight, row, inputs, start, AHEAD)
        gdc_wait()
    acc = _times(x, weight, row, inputs, start, start + part_inputs, BLOCK_M, BLOCK_K)
    if BLOCKS:
        acc = acc * _row_scale(squares, eps, inputs, BLOCKS, BLOCKS_PAD, BLOCK_M)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m += part.to(tl.int64) * (tl.num_programs(0) * BLOCK_M)
    at = out + m[:, None] * outputs + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < outputs)[None, :])


@triton.jit
def _add_project(
    x, squares, eps, weight, outputs, inputs, part_inputs, hidden, norm, x_out, squares_out,
    BLOCKS_OUT: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    inside = n < outputs
    w = tl.load(norm + n, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        _ask(weight, row, inputs, 0, AHEAD)
        gdc_wait()
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    at = m[:, None] * outputs + n[None, :]
    old = tl.load(hidden + at, mask=inside[None, :], other=0.0)
    acc = _times(x, weight, row, inputs, 0, inputs, BLOCK_M, BLOCK_K)
    acc = tl.where(inside[None, :], acc + old, 0.0)
    tl.store(hidden + at, acc, mask=inside[None, :])
    scaled = (acc * w[None, :]).to(x_out.dtype.element_ty)
    tl.store(x_out + at, scaled, mask=inside[None, :])
    tl.store(squares_out + m * BLOCKS_OUT + tl.program_id(1), tl.sum(acc * acc, 1))


@triton.jit
def _gate_project(
    x, squares, eps, weight, outputs, inputs, part_inputs, out,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        _ask(weight, row, inputs, 0, AHEAD)
        _ask(weight, row + outputs, inputs, 0, AHEAD)
        gdc_wait()
    gate, up = _times_two(x, weight, row, outputs, inputs, BLOCK_M, BLOCK_K)
    if BLOCKS:
        scale = _row_scale(squares, eps, inputs, BLOCKS, BLOCKS_PAD, BLOCK_M)
        gate = gate * scale
        up = up * scale
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    at = out + m[:, None] * outputs + n[None, :]
    tl.store(at, (silu(gate) * up).to(out.dtype.element_ty), mask=(n < outputs)[None, :])


@triton.jit
def _rotate_project(
    x, squares, eps, weight, outputs, inputs, part_inputs, bias, cos, sin, positions, slots, q,
    pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program takes channels of the lower half of one head and those they are turned with."""
    head = tl.program_id(1) // (HALF // BLOCK_N)
    at = tl.program_id(1) % (HALF // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (head * (2 * HALF) + at).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        _ask(weight, row, inputs, 0, AHEAD)
        _ask(weight, row + HALF, inputs, 0, AHEAD)
        gdc_wait()
    low, high = _times_two(x, weight, row, HALF, inputs, BLOCK_M, BLOCK_K)
    if BLOCKS:
        scale = _row_scale(squares, eps, inputs, BLOCKS, BLOCKS_PAD, BLOCK_M)
        low = low * scale
        high = high * scale
    if HAS_BIAS:
        low += tl.load(bias + row)[None, :]
        high += tl.load(bias + row + HALF)[None, :]
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    slot = tl.load(slots + m)
    if head < HEADS + KV_HEADS:
        angle = tl.load(positions + m).to(tl.int64) * HALF + at[None, :]
        c = tl.load(cos + angle)
        s = tl.load(sin + angle)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    store_heads(
        low, high, head + m * 0, at[None, :], m, slot, q, pages, HEADS, KV_HEADS, HALF, PAGE
    )
