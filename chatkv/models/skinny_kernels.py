"""The Triton kernels of `skinny_triton.py`. Knows blocks of rows and weight rows; no launch rule.

One program multiplies a block of rows with a few weight rows, its part of the inner dimension in
ascending order.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.models.fused_triton import silu
from chatkv.models.heads_triton import store_heads
from chatkv.models.skinny_tiles import LINE_WEIGHTS

LINE = tl.constexpr(LINE_WEIGHTS)


@triton.jit
def ask(weight, row, inputs, start, AHEAD: tl.constexpr):
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
def project(
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
        ask(weight, row, inputs, start, AHEAD)
        gdc_wait()
    acc = _times(x, weight, row, inputs, start, start + part_inputs, BLOCK_M, BLOCK_K)
    if BLOCKS:
        acc = acc * _row_scale(squares, eps, inputs, BLOCKS, BLOCKS_PAD, BLOCK_M)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m += part.to(tl.int64) * (tl.num_programs(0) * BLOCK_M)
    at = out + m[:, None] * outputs + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < outputs)[None, :])


@triton.jit
def add_project(
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
        ask(weight, row, inputs, 0, AHEAD)
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
def gate_project(
    x, squares, eps, weight, outputs, inputs, part_inputs, out,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        ask(weight, row, inputs, 0, AHEAD)
        ask(weight, row + outputs, inputs, 0, AHEAD)
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
def rotate_project(
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
        ask(weight, row, inputs, 0, AHEAD)
        ask(weight, row + HALF, inputs, 0, AHEAD)
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
