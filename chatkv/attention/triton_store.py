"""`store.write_rows` and `store.compact` on CUDA devices. Knows layouts and codes; not who owns a
page.

Same signatures and same bits as the plain versions in `store`. A page is copied by
`store.copy_page`, which is one launch of torch's own copy already.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CODE_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 7.0}
CODES = {torch.int8: 1, torch.float8_e4m3fn: 3, torch.uint8: 2}
HALF_MAX = tl.constexpr(65504.0)
TO_INTEGER = tl.constexpr(12582912.0)
"""Added and taken away again, rounds a small float32 to the nearest integer, ties to even."""
SMALLEST_EXPONENT = tl.constexpr(127 - 6)
"""Biased float32 exponent of the smallest normal float8_e4m3fn."""


def write_rows(k: Tensor, v: Tensor, pages: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    """Store new rows of one layer, quantised when the pages are.

    Args:
        k, v: [T, HK, D] in q's dtype, of the same strides, the last dimension contiguous.
        pages: [P, 2, HK, S, D] ([..., D / 2] uint8 for int4), modified.
        scales: [P, 2, HK, S, C] for quantised pages, modified; else None.
        slots: [T] int64 physical, distinct; -1 writes nothing.
    """
    rows, num_heads, head_dim = k.shape
    if v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    values = pages if scales is None else scales
    write_kernel[(rows, num_heads, 2)](
        k,
        v,
        pages,
        values,
        slots,
        *k.stride()[:2],
        *pages.stride()[:4],
        *values.stride()[:4],
        PAGE=pages.shape[3],
        DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        CODE=CODES.get(pages.dtype, 0),
        LIMIT=CODE_LIMITS.get(pages.dtype, 0.0),
        num_warps=1,
    )


@triton.jit
def scale_of(values, LIMIT: tl.constexpr, axis: tl.constexpr):
    """The stored scale: largest magnitude over the largest code, as float16."""
    largest = tl.max(tl.abs(values), axis)
    return tl.minimum(tl.div_rn(largest, tl.full(largest.shape, LIMIT, tl.float32)), HALF_MAX).to(
        tl.float16
    )


@triton.jit
def code_of(values, scale, LIMIT: tl.constexpr):
    """values / scale within the code's limits, not yet rounded; 0 where the scale is."""
    divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
    quotient = tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    return tl.minimum(tl.maximum(quotient, -LIMIT), LIMIT)


@triton.jit
def round_code(values, CODE: tl.constexpr):
    """To the nearest code, ties to even: an integer, or a value of float8_e4m3fn."""
    if CODE == 3:
        bits = values.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 255, SMALLEST_EXPONENT)
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        rounded = ((tl.div_rn(values, step) + TO_INTEGER) - TO_INTEGER) * step
        # Adding loses the sign of what rounds to zero.
        return tl.where(rounded == 0, values * 0.0, rounded)
    else:
        return (values + TO_INTEGER) - TO_INTEGER


@triton.jit
def write_kernel(
    k,
    v,
    pages,
    scales,
    slots,
    stride_row,
    stride_row_head,
    stride_page,
    stride_kind,
    stride_head,
    stride_slot,
    stride_scale_page,
    stride_scale_kind,
    stride_scale_head,
    stride_scale_slot,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CODE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid (T, HK, 2): one row, one head, key or value. CODE: 0 plain, 1 int8, 2 int4, 3 fp8."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kind = tl.program_id(2)
    slot = tl.load(slots + t)
    if slot < 0:
        return
    page = slot // PAGE
    offset = slot % PAGE
    source = (v if kind else k) + t * stride_row + head * stride_row_head
    out = (
        pages + page * stride_page + kind * stride_kind + head * stride_head + offset * stride_slot
    )
    scale_out = (
        scales
        + page * stride_scale_page
        + kind * stride_scale_kind
        + head * stride_scale_head
        + offset * stride_scale_slot
    )
    if CODE == 2:
        # One scale per 32 neighbouring channels; the nibbles of a byte are half a head apart.
        GROUPS: tl.constexpr = DIM_PAD // 64
        group = tl.arange(0, GROUPS)
        channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        inside = channel < DIM // 2
        low = tl.load(source + channel, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + DIM // 2 + channel, mask=inside, other=0.0).to(tl.float32)
        low_scale = scale_of(low, LIMIT, 1)
        high_scale = scale_of(high, LIMIT, 1)
        low_code = round_code(code_of(low, low_scale[:, None], LIMIT), CODE)
        high_code = round_code(code_of(high, high_scale[:, None], LIMIT), CODE)
        byte = (low_code + 8.0).to(tl.int32) | ((high_code + 8.0).to(tl.int32) << 4)
        tl.store(out + channel, byte.to(tl.uint8), mask=inside)
        is_group = group < DIM // 64
        dtype: tl.constexpr = scales.dtype.element_ty
        tl.store(scale_out + group, low_scale.to(dtype), mask=is_group)
        tl.store(scale_out + DIM // 64 + group, high_scale.to(dtype), mask=is_group)
    else:
        d = tl.arange(0, DIM_PAD)
        row = tl.load(source + d, mask=d < DIM, other=0.0)
        if CODE == 0:
            tl.store(out + d, row, mask=d < DIM)
        else:
            values = row.to(tl.float32)
            scale = scale_of(values, LIMIT, 0)
            code = round_code(code_of(values, scale, LIMIT), CODE)
            tl.store(out + d, code.to(pages.dtype.element_ty), mask=d < DIM)
            tl.store(scale_out, scale.to(scales.dtype.element_ty))


def compact(pages: Tensor, scales: Tensor | None, src: Tensor, dst: Tensor) -> None:
    """Move rows of all layers to other slots, bit for bit, in one launch (two with scales).

    Args:
        pages: [L, P, 2, HK, S, D], contiguous, modified.
        scales: [L, P, 2, HK, S, C] or None, contiguous, modified.
        src, dst: [R] int64 physical slots, each in rising logical order, no target above its
            source.
            A target of -1 moves nothing.
    """
    for tensor in (pages, scales):
        if tensor is None or not len(src):
            continue
        layers, count, kinds, num_heads, size, width = tensor.shape
        width *= tensor.element_size()
        unit = next(u for u in (torch.int32, torch.int16, torch.uint8) if width % u.itemsize == 0)
        columns = width // unit.itemsize
        compact_kernel[(layers, kinds * num_heads)](
            tensor.view(unit),
            src,
            dst,
            len(src),
            count * kinds * num_heads * size * columns,
            kinds * num_heads * size * columns,
            size * columns,
            PAGE=size,
            COLUMNS=columns,
            COLUMNS_PAD=triton.next_power_of_2(columns),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["rows"])
def compact_kernel(
    pages,
    src,
    dst,
    rows,
    stride_layer,
    stride_page,
    stride_head,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_PAD: tl.constexpr,
):
    """Grid (L, 2 * HK). One program walks the path, ascending; one for each row would race."""
    base = pages + tl.program_id(0).to(tl.int64) * stride_layer + tl.program_id(1) * stride_head
    column = tl.arange(0, COLUMNS_PAD)
    lane = tl.arange(0, 16)
    for start in range(0, rows, 16):
        inside = start + lane < rows
        source = tl.load(src + start + lane, mask=inside, other=0)
        target = tl.load(dst + start + lane, mask=inside, other=-1)
        moved = (target >= 0)[:, None] & (column < COLUMNS)[None, :]
        source = source // PAGE * stride_page + source % PAGE * COLUMNS
        target = target // PAGE * stride_page + target % PAGE * COLUMNS
        row = tl.load(base + source[:, None] + column[None, :], mask=moved)
        # All rows are read before one is written, here and in the turns before.
        tl.debug_barrier()
        tl.store(base + target[:, None] + column[None, :], row, mask=moved)
        tl.debug_barrier()
