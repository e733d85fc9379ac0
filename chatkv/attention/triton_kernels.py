"""The Triton kernel over stored tiles, and what it shares with the others. Knows no launch rule.

A call is served by `triton_plan.plan_rows` once a step, then by `attend_past` and
`triton_merge.merge_rows` once a layer. Tile j of a row's past belongs to leaf j // GROUPS % LEAVES
of group j % GROUPS. A leaf is one online softmax over its tiles in ascending order. Every sum has
an order that the row alone decides: its bits depend neither on what runs beside it nor on block
sizes, warps and stages.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EMPTY_MAX = tl.constexpr(-1e30)
"""Maximum of no keys: finite, so that weights of empty parts are 0 and never NaN."""
ONES = tl.constexpr(8)
"""Columns of the matrix of ones that sums probabilities: the fewest that an MMA takes."""


@triton.jit
def fold(max_a, sum_a, acc_a, max_b, sum_b, acc_b, factor):
    """Join two partial softmaxes of the same rows, a before b. An empty b changes nothing."""
    joint = tl.maximum(max_a, max_b)
    weight_a = tl.exp2((max_a - joint) * factor)
    weight_b = tl.exp2((max_b - joint) * factor)
    total = tl.fma(sum_a, weight_a, sum_b * weight_b)
    acc = tl.fma(acc_a, weight_a[:, None], acc_b * weight_b[:, None])
    return joint, total, acc


@triton.jit
def leaf_end(tiles, leaf, LEAVES: tl.constexpr):
    """How many of the first `tiles` tiles of a group are the leaf's."""
    return tl.maximum(tl.cdiv(tiles - leaf, LEAVES), 0)


@triton.jit
def load_page(table, slot, lane, num_entries, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of the tile at `slot`, or of each of its lanes; anything if it begins past the last."""
    if PAGE % BLOCK_N != 0:
        slot += lane
    return tl.load(table + tl.minimum(slot // PAGE, num_entries - 1))


@triton.jit
def load_tile(
    pages,
    scales,
    row,
    scale_row,
    seen,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CODE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Keys or values [lanes, DIM_PAD] in `dtype`, and the factors [lanes] that they still lack.

    row, scale_row: [lanes] int64 element offsets. Lanes that are not `seen` are read as zeros.
    CODE: 0 plain, 1 int8 or fp8 (the factors are their scales), 2 int4.
    """
    if CODE == 2:
        half = tl.arange(0, DIM_PAD // 2)
        codes = tl.load(pages + row[:, None] + half[None, :], mask=seen[:, None], other=0)
        group = half // 32
        low_scale = tl.load(
            scales + scale_row[:, None] + group[None, :], mask=seen[:, None], other=0.0
        )
        high_scale = tl.load(
            scales + scale_row[:, None] + (DIM_PAD // 64) + group[None, :],
            mask=seen[:, None],
            other=0.0,
        )
        low = ((codes & 15).to(tl.float32) - 8.0) * low_scale.to(tl.float32)
        high = ((codes >> 4).to(tl.float32) - 8.0) * high_scale.to(tl.float32)
        tile = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (row.shape[0], DIM_PAD))
        factors = tl.full([row.shape[0]], 1.0, tl.float32)
        return tile.to(dtype), factors
    d = tl.arange(0, DIM_PAD)
    pointer = pages + row[:, None] + d[None, :]
    if DIM == DIM_PAD:
        tile = tl.load(pointer, mask=seen[:, None], other=0.0)
    else:
        tile = tl.load(pointer, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
    if CODE == 1:
        factors = tl.load(scales + scale_row, mask=seen, other=0.0).to(tl.float32)
    else:
        factors = tl.full([row.shape[0]], 1.0, tl.float32)
    return tile.to(dtype), factors


@triton.jit(do_not_specialize=["window", "num_entries", "num_parts_rows"])
def attend_past(
    q,
    pages,
    scales,
    page_table,
    sequences,
    limits,
    valid,
    q_pos,
    page_pos,
    part_acc,
    part_max,
    part_sum,
    factor,
    window,
    num_entries,
    num_parts_rows,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    LEAVES: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,
    CODE: tl.constexpr,
    GAIN: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The slots below b(p) of a row block, for one sequence, kv head and leaf or group of tiles.

    Grid (row blocks, N * HEADS, GROUPS or GROUPS * LEAVES). Writes one partial softmax a row,
    float32: part_acc [parts, num_parts_rows, DIM] unnormalised, part_max and part_sum [parts,
    num_parts_rows]; nothing for a part without tiles.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    n = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    part = tl.program_id(2)
    sequence = sequences + n * 8
    first = tl.load(sequence)
    rows = tl.load(sequence + 1)
    smallest = tl.load(sequence + 2)
    last = tl.load(sequence + 3)
    if block * BLOCK_M >= rows * GROUP:
        return
    tiles = tl.cdiv(last, BLOCK_N)

    # Tile k of a group is of leaf k % LEAVES; a program takes the leaves it owns one after another.
    part_group = part % GROUPS
    group_tiles = tl.cdiv(tiles - part_group, GROUPS)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(tl.cdiv(tl.load(sequence + 5) // BLOCK_N - part_group, GROUPS), 0)
    if WHOLE_GROUP:
        leaf = 0
        turns = group_tiles - first_tile
        if HAS_WINDOW:
            # An empty leaf takes one turn with nothing seen.
            turns = tl.maximum(turns, LEAVES)
    else:
        leaf = part // GROUPS
        turns = leaf_end(group_tiles, leaf, LEAVES) - leaf_end(first_tile, leaf, LEAVES)
    if part_group + GROUPS * leaf >= tiles:
        return

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = m < rows * GROUP
    t = first + m // GROUP
    limit = tl.load(limits + t, mask=is_row, other=0)
    d = tl.arange(0, DIM_PAD)
    row = t * (HEADS * GROUP) + head * GROUP + m % GROUP
    q_row = q + t.to(tl.int64)[:, None] * stride_q + ((head * GROUP + m % GROUP) * DIM)[:, None]
    queries = tl.load(q_row + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0)
    ones = tl.full([BLOCK_N, ONES], 1.0, q.dtype.element_ty)
    if HAS_VALID or HAS_WINDOW:
        stored = tl.load(sequence + 4)
    if HAS_WINDOW:
        oldest = tl.load(q_pos + t, mask=is_row, other=2**30) - window + 1
        first_pos = tl.min(oldest, 0)

    lane = tl.arange(0, BLOCK_N)
    table = page_table + n.to(tl.int64) * num_entries
    pages += head * stride_head
    scales += head * stride_scale_head
    row_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
    row_sum = tl.zeros([BLOCK_M, ONES], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    if WHOLE_GROUP:
        group_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
        group_sum = tl.zeros([BLOCK_M], tl.float32)
        group_acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    step = leaf_end(first_tile, leaf, LEAVES)
    next_slot = (part_group + GROUPS * (leaf + LEAVES * step)) * BLOCK_N
    # The page of a tile is read one turn early, so that reading its keys waits for nothing.
    next_page = load_page(table, next_slot, lane, num_entries, PAGE, BLOCK_N)
    is_first = False
    for _ in tl.range(0, turns):
        first_slot = next_slot
        page = next_page.to(tl.int64)
        if WHOLE_GROUP:  # noqa: SIM102 (known when compiled, and the inner one is not)
            if is_first:
                group_max, group_sum, group_acc = fold(
                    group_max, group_sum, group_acc, row_max, tl.max(row_sum, 1), acc, factor
                )
                # Makes the weight of what has been folded 0 below.
                row_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
        step += 1
        if WHOLE_GROUP:
            is_first = step >= leaf_end(group_tiles, leaf, LEAVES)
            leaf = tl.where(is_first, leaf + 1, leaf)
            step = tl.where(is_first, leaf_end(first_tile, leaf, LEAVES), step)
        next_slot = (part_group + GROUPS * (leaf + LEAVES * step)) * BLOCK_N
        next_page = load_page(table, next_slot, lane, num_entries, PAGE, BLOCK_N)
        slot = first_slot + lane
        seen = slot < last
        if PAGE % BLOCK_N == 0:
            offset = first_slot % PAGE
            k_base = pages + (page * stride_page + offset * stride_slot)
            k_row = lane * stride_slot
            s_base = scales + (page * stride_scale_page + offset * stride_scale_slot)
            s_row = lane * stride_scale_slot
        else:
            k_base = pages
            k_row = page * stride_page + (slot % PAGE) * stride_slot
            s_base = scales
            s_row = page * stride_scale_page + (slot % PAGE) * stride_scale_slot
        if HAS_VALID or HAS_WINDOW:
            # A long chain reaches into its own new rows: valid, at the position of their row.
            is_new = slot >= stored
            entry = n.to(tl.int64) * num_entries + slot // PAGE
        if HAS_VALID:
            low = tl.load(valid + entry * 2, mask=seen, other=0)
            high = tl.load(valid + entry * 2 + 1, mask=seen, other=0)
            seen = seen & (is_new | ((low <= slot % PAGE) & (slot % PAGE < high)))
        if HAS_WINDOW:
            page_start = tl.load(page_pos + entry, mask=seen & ~is_new, other=0)
            new_pos = tl.load(q_pos + first + slot - stored, mask=seen & is_new, other=0)
            position = tl.where(is_new, new_pos, page_start + slot % PAGE)
            seen = seen & (position >= first_pos)
        keys, k_factor = load_tile(
            k_base, s_base, k_row, s_row, seen, DIM, DIM_PAD, CODE, q.dtype.element_ty
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if CODE == 1:
            scores = scores * k_factor[None, :]
        if HAS_VALID or HAS_WINDOW:
            is_seen = (slot[None, :] < limit[:, None]) & seen[None, :]
            if HAS_WINDOW:
                is_seen = is_seen & (position[None, :] >= oldest[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        else:
            if first_slot + BLOCK_N > smallest:
                scores = tl.where(slot[None, :] < limit[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weight = tl.exp2((row_max - new_max) * factor)
        minus_max = -(new_max * factor)
        p = tl.exp2(tl.fma(scores, factor, minus_max[:, None]))
        values, v_factor = load_tile(
            k_base + stride_kind,
            s_base + stride_scale_kind,
            k_row,
            s_row,
            seen,
            DIM,
            DIM_PAD,
            CODE,
            q.dtype.element_ty,
        )
        row_sum = row_sum * weight[:, None]
        acc = acc * weight[:, None]
        p_low = p.to(q.dtype.element_ty)
        row_sum = tl.dot(p_low, ones, row_sum, input_precision="ieee")
        if CODE == 1:
            p_low = (p * (v_factor * GAIN)[None, :]).to(q.dtype.element_ty)
        acc = tl.dot(p_low, values, acc, input_precision="ieee")
        row_max = new_max
    if WHOLE_GROUP:
        row_max, sums, acc = fold(
            group_max, group_sum, group_acc, row_max, tl.max(row_sum, 1), acc, factor
        )
    else:
        sums = tl.max(row_sum, 1)
    out_row = part.to(tl.int64) * num_parts_rows + row
    tl.store(part_max + out_row, row_max, mask=is_row)
    tl.store(part_sum + out_row, sums, mask=is_row)
    tl.store(
        part_acc + out_row[:, None] * DIM + d[None, :],
        acc,
        mask=is_row[:, None] & (d < DIM)[None, :],
    )
