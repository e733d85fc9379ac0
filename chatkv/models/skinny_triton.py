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
from torch import Tensor

from chatkv.models import skinny_kernels as kernels
from chatkv.models.fused_triton import Scaled, gate_rows_plain
from chatkv.models.heads_triton import Rotary, rotate_rows_plain
from chatkv.models.launch_options import EXACT, pdl_options
from chatkv.models.skinny_tiles import (
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


def project(
    x: Tensor | Scaled, weight: Tensor, out: Tensor, *, tile: Tile | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """out [T, N] = x [T, K] times weight [N, K], rounded to the dtype of out (float32: not)."""
    tile = tile or single_tile(*weight.shape)
    _launch(kernels.project, x, weight, len(weight), tile, pdl, out=out)


def project_plain(x: Tensor | Scaled, weight: Tensor, out: Tensor) -> None:
    out.copy_(_product(x, weight))


def project_parts(
    x: Tensor, weight: Tensor, parts: Tensor, *, tile: Tile | None = None, pdl: bool = False
) -> None:
    """parts [S, T, N] float32, which add up to x [T, K] times weight [N, K]."""
    tile = tile or split_tile(*weight.shape)
    assert tile.split == len(parts), f"{len(parts)} parts for a split in {tile.split}"
    _launch(kernels.project, x, weight, len(weight), tile, pdl, out=parts)


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
        kernels.add_project, x, weight, len(weight), tile, pdl,
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
    _launch(kernels.gate_project, x, weight, inner, tile, pdl, out=out)


def gate_project_plain(x: Tensor | Scaled, weight: Tensor, out: Tensor) -> None:
    gate_rows_plain(_product(x, weight), out)


def rotate_project(
    x: Tensor | Scaled, weight: Tensor, bias: Tensor | None, rotary: Rotary, positions: Tensor,
    slots: Tensor, q: Tensor, pages: Tensor, *, tile: Tile | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Queries, keys and values of rows: product, bias, rotation, and into q and the pages.

    As `heads_triton.rotate_rows` behind `project`, for heads that are not normed.
    """
    half = rotary.head_dim // 2
    tile = tile or pair_tile(rotary.all_heads * half, weight.shape[1])
    while half % tile.n:
        tile = replace(tile, n=tile.n // 2)
    _launch(
        kernels.rotate_project, x, weight, rotary.all_heads * half, tile, pdl,
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
    sums = scaled is not None or kernel is kernels.add_project
    block = ROWS if sums else min(MOST_ROWS, rows)
    halves = 2 if kernel in (kernels.gate_project, kernels.rotate_project) else 1
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
