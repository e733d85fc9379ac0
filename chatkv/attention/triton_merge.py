"""The Triton kernel of a row's own keys, which also joins its partial softmaxes. Knows no tiles.

The result of a row is the fold of its own keys, then group 0, 1, ..., each the fold of its leaves
0, 1, ...
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.attention.triton_tiles import EMPTY_MAX, ONES, fold, load_tile

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def store_own(
    q,
    pages,
    scales,
    own_slots,
    part_acc,
    part_max,
    part_sum,
    factor,
    num_rows,
    own_at,
    node,
    head,
    stride_q,
    stride_page,
    stride_kind,
    stride_head,
    stride_slot,
    stride_scale_page,
    stride_scale_kind,
    stride_scale_head,
    stride_scale_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
    CODE: tl.constexpr,
    GAIN: tl.constexpr,
    HALF: tl.constexpr,
):
    """Store the partial softmax of the own keys of NODES rows, under one kv head, as last part."""
    dtype: tl.constexpr = tl.float16 if HALF else q.dtype.element_ty
    lane = tl.arange(0, NODES * SPAN)
    lane_node = node + lane // SPAN
    slot = tl.load(own_slots + node.to(tl.int64) * SPAN + lane, mask=lane_node < num_rows, other=-1)
    seen = slot >= 0
    page = (slot // PAGE).to(tl.int64)
    offset = slot % PAGE
    k_row = page * stride_page + head * stride_head + offset * stride_slot
    s_row = page * stride_scale_page + head * stride_scale_head + offset * stride_scale_slot
    keys, k_factor = load_tile(pages, scales, k_row, s_row, seen, DIM, DIM_PAD, CODE, dtype)
    values, v_factor = load_tile(
        pages + stride_kind,
        scales + stride_scale_kind,
        k_row,
        s_row,
        seen,
        DIM,
        DIM_PAD,
        CODE,
        dtype,
    )
    m = tl.arange(0, BLOCK_M)
    t = node + m // GROUP
    is_row = (m < NODES * GROUP) & (t < num_rows)
    d = tl.arange(0, DIM_PAD)
    q_head = head * GROUP + m % GROUP
    is_data = is_row[:, None] & (d < DIM)[None, :]
    q_row = q + t.to(tl.int64)[:, None] * stride_q + (q_head * DIM)[:, None]
    queries = tl.load(q_row + d[None, :], mask=is_data, other=0.0).to(dtype)

    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if (CODE == 1) | (CODE == 3):
        scores = scores * k_factor[None, :]
    is_seen = seen[None, :]
    if NODES > 1:
        # Lanes of other nodes are masked, and masked lanes add nothing: the bits of one node alone.
        is_seen = is_seen & (lane_node[None, :] == t[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))
    row_max = tl.maximum(tl.max(scores, 1), EMPTY_MAX)
    minus_max = -(row_max * factor)
    p = tl.exp2(tl.fma(scores, factor, minus_max[:, None]))
    p_low = p.to(dtype)
    ones = tl.full([NODES * SPAN, ONES], 1.0, dtype)
    row_sum = tl.max(tl.dot(p_low, ones, input_precision="ieee"), 1)
    if (CODE == 1) | (CODE == 3):
        p_low = (p * (v_factor * GAIN)[None, :]).to(dtype)
    acc = tl.dot(p_low, values, input_precision="ieee")
    at = own_at + t * (HEADS * GROUP) + q_head
    tl.store(part_max + at, row_max, mask=is_row)
    tl.store(part_sum + at, row_sum, mask=is_row)
    tl.store(part_acc + at[:, None] * DIM + d[None, :], acc, mask=is_data)


@triton.jit
def load_part(part_acc, part_max, part_sum, at, is_part, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A partial softmax of rows `at` [rows] int64; an empty one where it does not exist."""
    d = tl.arange(0, DIM_PAD)
    row_max = tl.load(part_max + at, mask=is_part, other=EMPTY_MAX)
    row_sum = tl.load(part_sum + at, mask=is_part, other=0.0)
    acc = tl.load(
        part_acc + at[:, None] * DIM + d[None, :],
        mask=is_part[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    return row_max, row_sum, acc


@triton.jit
def load_group(
    part_acc, part_max, part_sum, row, group, stride, tiles, is_row, is_leaf, factor,
    GROUPS: tl.constexpr, LEAVES: tl.constexpr, OWNER: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """A group, as stored or folded from its leaves."""
    row_max, row_sum, acc = load_part(
        part_acc, part_max, part_sum, stride * group + row, is_row & (group < tiles), DIM, DIM_PAD
    )
    if OWNER != 1:
        # The first leaf is folded into nothing, as in a program that owns the group.
        empty = tl.full(row_max.shape, EMPTY_MAX, tl.float32)
        none = tl.zeros(row_max.shape, tl.float32)
        row_max, row_sum, acc = fold(
            empty, none, tl.zeros(acc.shape, tl.float32), row_max, row_sum, acc, factor
        )
        for leaf in tl.static_range(1, LEAVES):
            part = group + GROUPS * leaf
            leaf_max, leaf_sum, leaf_acc = load_part(
                part_acc,
                part_max,
                part_sum,
                stride * part + row,
                is_leaf & (part < tiles),
                DIM,
                DIM_PAD,
            )
            row_max, row_sum, acc = fold(
                row_max, row_sum, acc, leaf_max, leaf_sum, leaf_acc, factor
            )
    return row_max, row_sum, acc


@triton.jit
def fold_groups(
    row_max, row_sum, acc, part_acc, part_max, part_sum, row, stride, tiles, is_row, is_leaf,
    factor,
    GROUPS: tl.constexpr, LEAVES: tl.constexpr, OWNER: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """The partial softmax joined by all groups in order."""
    for group in tl.static_range(GROUPS):
        group_max, group_sum, group_acc = load_group(
            part_acc, part_max, part_sum, row, group, stride, tiles, is_row, is_leaf, factor,
            GROUPS, LEAVES, OWNER, DIM, DIM_PAD,
        )  # fmt: skip
        row_max, row_sum, acc = fold(row_max, row_sum, acc, group_max, group_sum, group_acc, factor)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["num_sequences", "num_parts_rows"])
def merge_rows(
    q, pages, scales, q_start, limits, own_slots, rows_by_leaf, part_acc, part_max, part_sum,
    out, lse, factor, num_sequences, num_parts_rows, stride_q,
    stride_page, stride_kind, stride_head, stride_slot,
    stride_scale_page, stride_scale_kind, stride_scale_head, stride_scale_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, NODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr, LEAVES: tl.constexpr,
    OWNER: tl.constexpr, CODE: tl.constexpr, GAIN: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The own keys of NODES rows under one kv head, then their parts from `attend_past`, in order.

    Grid (ceil(T / NODES), HEADS). Writes out [T, HQ, DIM] and lse [T, HQ], but no row from
    q_start[N] on.
    """
    node = tl.program_id(0) * NODES
    head = tl.program_id(1)
    num_rows = tl.load(q_start + num_sequences)
    if node >= num_rows:
        return
    stride = num_parts_rows.to(tl.int64)
    own_at = stride * (GROUPS if OWNER == 1 else GROUPS * LEAVES)
    m = tl.arange(0, ROWS)
    t = node + m // GROUP
    is_row = (m < NODES * GROUP) & (t < num_rows)
    tiles = tl.cdiv(tl.load(limits + t, mask=is_row, other=0), BLOCK_N)
    is_leaf = is_row
    if OWNER == 2:
        is_leaf = is_row & (tl.load(rows_by_leaf + t, mask=is_row, other=0) == 1)
    store_own(
        q, pages, scales, own_slots, part_acc, part_max, part_sum, factor, num_rows,
        own_at, node, head, stride_q,
        stride_page, stride_kind, stride_head, stride_slot,
        stride_scale_page, stride_scale_kind, stride_scale_head, stride_scale_slot,
        HEADS, GROUP, DIM, DIM_PAD, PAGE, NODES, BLOCK_M, SPAN, CODE, GAIN, HALF,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Through memory, so that the layout of a small MMA does not reach the loads below.
    tl.debug_barrier()
    row = t * (HEADS * GROUP) + head * GROUP + m % GROUP
    row_max, row_sum, acc = load_part(
        part_acc, part_max, part_sum, own_at + row, is_row, DIM, DIM_PAD
    )
    by_leaf = OWNER == 0
    if OWNER == 2:
        by_leaf = tl.max(is_leaf.to(tl.int32), 0) == 1
    if by_leaf:
        row_max, row_sum, acc = fold_groups(
            row_max, row_sum, acc, part_acc, part_max, part_sum, row, stride, tiles, is_row,
            is_leaf, factor, GROUPS, LEAVES, 0, DIM, DIM_PAD,
        )  # fmt: skip
    else:
        row_max, row_sum, acc = fold_groups(
            row_max, row_sum, acc, part_acc, part_max, part_sum, row, stride, tiles, is_row,
            is_leaf, factor, GROUPS, LEAVES, 1, DIM, DIM_PAD,
        )  # fmt: skip
    row_sum = tl.where(is_row, row_sum, 1.0)
    acc = acc / (row_sum * GAIN)[:, None]
    d = tl.arange(0, DIM_PAD)
    tl.store(
        out + row.to(tl.int64)[:, None] * DIM + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & (d < DIM)[None, :],
    )
    # Base 2 inside, natural logarithm at the interface.
    natural = tl.fma(row_max, factor, tl.log2(row_sum)) * LN_2
    tl.store(lse + row, natural, mask=is_row)
