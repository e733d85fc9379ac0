"""Attention of a prompt chunk, by a library's kernels over gathered keys. Knows tensors and slots.

A chunk is C rows of one sequence behind `start` stored slots. Its shape, the place of a row in it
and `start` depend on the logical position alone, and so do the launches made here: a row has the
same bits whenever the chunk is computed again, whatever stands in the rows that are padding.

cuDNN is the fastest here, but builds a plan for every new shape. So it gets shapes from a short
list: whole blocks of history, and a chunk that begins at the edge of one. FlashAttention takes the
rest.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FIRST_ROWS, LAST_ROWS = 128, 2048
"""Rows of the first chunk of a run, and of all from `LAST_ROWS` ids on. Part of the bits."""
BLOCK = 2048
"""Slots of a block of history. Part of the bits."""
CUDNN_ROWS = 1024
"""Rows of a chunk from which cuDNN is asked. Part of the bits."""
NUMERICS = f"chunks-1-{FIRST_ROWS}-{LAST_ROWS}-{BLOCK}-{CUDNN_ROWS}"


def chunk_of(offset: int) -> tuple[int, int]:
    """(first, rows) of the chunk that holds the id `offset` ids into its run.

    Chunks double, so that a short prompt pays for a short chunk: a chunk is always run whole.
    """
    if offset < FIRST_ROWS:
        return 0, FIRST_ROWS
    rows = min(LAST_ROWS, 1 << (offset.bit_length() - 1))
    return offset // rows * rows, rows


def gather(pages: Tensor, table: Tensor, stop: int, slots: int) -> Tensor:
    """Keys and values of the first slots of a sequence, in order.

    Args:
        pages: [P, 2, HK, S, D] of one layer, contiguous.
        table: [>= ceil(stop / S)] int32 page ids.
        stop: Slots that hold something; what follows reads as zeros.
        slots: Slots in all.

    Returns:
        [2, HK, slots, D].
    """
    _, kinds, heads, size, dim = pages.shape
    out = torch.empty(kinds, heads, slots, dim, dtype=pages.dtype, device=pages.device)
    _gather[(triton.cdiv(slots, size), kinds * heads)](
        pages,
        table,
        out,
        stop,
        slots,
        LINES=kinds * heads,
        PAGE=size,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def gather_plain(pages: Tensor, table: Tensor, stop: int, slots: int) -> Tensor:
    size = pages.shape[3]
    out = pages.new_zeros(2, pages.shape[2], slots, pages.shape[4])
    slot = torch.arange(stop, device=pages.device)
    found = pages[table.long()[slot // size], :, :, slot % size]
    out[:, :, :stop] = found.permute(1, 2, 0, 3)
    return out


@triton.jit(do_not_specialize=["stop", "slots"])
def _gather(
    pages, table, out, stop, slots,
    LINES: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    line = tl.program_id(1)
    slot = entry * PAGE + tl.arange(0, PAGE)
    at = tl.arange(0, DIM_PAD)[None, :]
    page = tl.load(table + tl.minimum(entry, tl.cdiv(stop, PAGE) - 1)).to(tl.int64)
    source = pages + ((page * LINES + line) * PAGE + tl.arange(0, PAGE))[:, None] * DIM + at
    rows = tl.load(source, mask=(slot < stop)[:, None] & (at < DIM), other=0.0)
    target = out + (line * slots.to(tl.int64) + slot)[:, None] * DIM + at
    tl.store(target, rows, mask=(slot < slots)[:, None] & (at < DIM))


def attend_chunk(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Each row sees all slots up to its own.

    Args:
        q: [C, HQ, D], the rows of slots start to start + C.
        keys, values: [HK, start + C, D]. Rows that are padding hold anything finite.

    Returns:
        [C, HQ, D].
    """
    if q.device.type != "cuda":
        return attend_chunk_plain(q, keys, values, start, scale)
    rows = len(q)
    queries = q.transpose(0, 1)[None]
    edge = start // BLOCK * BLOCK if rows >= CUDNN_ROWS else 0
    own_keys, own_values = keys[None, :, edge:], values[None, :, edge:]
    if rows >= CUDNN_ROWS and edge == start:
        own, own_lse = _cudnn(queries, own_keys, own_values, True, scale)
    else:
        own, own_lse = _flash(queries, own_keys, own_values, scale)
    own = own[0].transpose(0, 1)
    if not edge:
        return own
    old, old_lse = _cudnn(queries, keys[None, :, :edge], values[None, :, :edge], False, scale)
    return join_rows(old[0].transpose(0, 1), old_lse, own, own_lse)


def attend_chunk_plain(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    group = q.shape[1] // len(keys)
    rows = torch.arange(len(q), device=q.device)[:, None] + start
    seen = torch.arange(keys.shape[1], device=q.device)[None, :] <= rows
    scores = torch.einsum("thd,hld->htl", q.float(), keys.float().repeat_interleave(group, 0))
    weights = (scores * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("htl,hld->thd", weights, values.float().repeat_interleave(group, 0))
    return out.to(q.dtype)


def _cudnn(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """[1, HQ, C, D] and its log-sum-exp [HQ, C]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, keys, values, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[1], q.shape[2])


def _flash(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal; the last row sees the last slot."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, keys, values, 0.0, True, False, scale=scale
    )
    return out, lse.reshape(q.shape[1], q.shape[2])


def join_rows(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from that over each.

    Args:
        a, b: [C, HQ, D].
        a_lse, b_lse: [HQ, C] float32, natural logarithm.

    Returns:
        [C, HQ, D], contiguous.
    """
    rows, heads, dim = a.shape
    out = torch.empty(rows, heads, dim, dtype=a.dtype, device=a.device)
    _join[(rows, heads)](
        a,
        b,
        a_lse,
        b_lse,
        out,
        rows,
        *a.stride()[:2],
        *b.stride()[:2],
        HEADS=heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def join_rows_plain(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    total = torch.logaddexp(a_lse, b_lse)
    first, second = ((lse - total).exp().T[..., None] for lse in (a_lse, b_lse))
    return (a.float() * first + b.float() * second).to(a.dtype)


@triton.jit
def _join(
    a, b, a_lse, b_lse, out, rows, stride_a, stride_a_head, stride_b, stride_b_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, DIM_PAD)
    inside = at < DIM
    first = tl.load(a_lse + head * rows + row)
    second = tl.load(b_lse + head * rows + row)
    top = tl.maximum(first, second)
    first = tl.exp2((first - top) * 1.4426950408889634)
    second = tl.exp2((second - top) * 1.4426950408889634)
    x = tl.load(a + row * stride_a + head * stride_a_head + at, mask=inside, other=0.0)
    y = tl.load(b + row * stride_b + head * stride_b_head + at, mask=inside, other=0.0)
    mixed = (x.to(tl.float32) * first + y.to(tl.float32) * second) / (first + second)
    target = out + (row * HEADS + head) * DIM + at
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)
