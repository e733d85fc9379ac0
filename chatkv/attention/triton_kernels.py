"""The Triton kernel over stored tiles. Knows no launch rule.

A call is served by `triton_plan.plan_rows` once a step, then by `attend_past` and
`triton_merge.merge_rows` once a layer. Tile j of a row's past belongs to leaf j // GROUPS % LEAVES
of group j % GROUPS. A leaf is one online softmax over its tiles in ascending order. Every sum has
an order that the row alone decides: its bits depend neither on what runs beside it nor on block
sizes, warps and stages.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.attention.triton_tiles import (
    EMPTY_MAX,
    FP8_UNIT,
    ONES,
    codes_of,
    fold,
    leaf_end,
    load_page,
    load_tile,
)


@triton.jit(do_not_specialize=["window", "num_entries", "num_parts_rows"])
def attend_past(
    q, pages, scales, page_table, sequences, limits, valid, q_pos, page_pos,
    part_acc, part_max, part_sum, factor, window, num_entries, num_parts_rows, stride_q,
    stride_page, stride_kind, stride_head, stride_slot,
    stride_scale_page, stride_scale_kind, stride_scale_head, stride_scale_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    LEAVES: tl.constexpr, OWNER: tl.constexpr, CODE: tl.constexpr, GAIN: tl.constexpr,
    HAS_VALID: tl.constexpr, HAS_WINDOW: tl.constexpr, PDL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The slots below b(p) of a row block, for one sequence, kv head and leaf or group of tiles.

    Writes one partial softmax a row, float32: part_acc [parts, num_parts_rows, DIM] unnormalised,
    part_max and part_sum [parts, num_parts_rows].

    OWNER, with its grid:
        0: A program owns a leaf: (row blocks, N * HEADS, GROUPS * LEAVES).
        1: A group: (row blocks, N * HEADS, GROUPS).
        2: A leaf of the plan's first sequences, as many as it says, and a group of the others:
            (row blocks, N * HEADS, GROUPS * LEAVES).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    pair = tl.program_id(1)
    part = tl.program_id(2)
    by_leaf = OWNER == 0
    if OWNER == 2:
        by_leaf = pair // HEADS < tl.load(sequences + 6)
        if (part >= GROUPS) & (by_leaf == 0):
            return
    head = pair % HEADS
    sequence = sequences + pair // HEADS * 8
    first = tl.load(sequence)
    rows = tl.load(sequence + 1)
    smallest = tl.load(sequence + 2)
    last = tl.load(sequence + 3)
    n = tl.load(sequence + 7)
    if block * BLOCK_M >= rows * GROUP:
        return
    tiles = tl.cdiv(last, BLOCK_N)

    # Tile k of a group is of leaf k % LEAVES; a program takes the leaves it owns one after another.
    part_group = part % GROUPS
    group_tiles = tl.cdiv(tiles - part_group, GROUPS)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(tl.cdiv(tl.load(sequence + 5) // BLOCK_N - part_group, GROUPS), 0)
    # A program that owns a group begins with its leaf 0.
    leaf = part // GROUPS
    if by_leaf:
        turns = leaf_end(group_tiles, leaf, LEAVES) - leaf_end(first_tile, leaf, LEAVES)
    else:
        turns = group_tiles - first_tile
        if HAS_WINDOW:
            # An empty leaf takes one turn with nothing seen.
            turns = tl.maximum(turns, LEAVES)
    if part_group + GROUPS * leaf >= tiles:
        return

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = m < rows * GROUP
    t = first + m // GROUP
    limit = tl.load(limits + t, mask=is_row, other=0)
    d = tl.arange(0, DIM_PAD)
    row = t * (HEADS * GROUP) + head * GROUP + m % GROUP
    q_row = q + t.to(tl.int64)[:, None] * stride_q + ((head * GROUP + m % GROUP) * DIM)[:, None]
    IN_PAIRS: tl.constexpr = (CODE == 1) | (CODE == 3)
    dtype: tl.constexpr = tl.float16 if HALF else q.dtype.element_ty
    if IN_PAIRS:
        # Even and odd channels are products of their own, see `codes_of`.
        j = tl.arange(0, DIM_PAD // 2)
        is_pair = is_row[:, None] & (j < DIM // 2)[None, :]
        queries = tl.load(q_row + 2 * j[None, :], mask=is_pair, other=0.0).to(dtype)
        queries_odd = tl.load(q_row + 2 * j[None, :] + 1, mask=is_pair, other=0.0).to(dtype)
    else:
        queries = tl.load(q_row + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0)
        queries = queries.to(dtype)
    ones = tl.full([BLOCK_N, ONES], 1.0, dtype)
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
    WIDTH: tl.constexpr = DIM_PAD // 2 if IN_PAIRS else DIM_PAD
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc_odd = acc
    if OWNER != 0:
        group_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
        group_sum = tl.zeros([BLOCK_M], tl.float32)
        group_acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        group_odd = group_acc
    step = leaf_end(first_tile, leaf, LEAVES)
    next_slot = (part_group + GROUPS * (leaf + LEAVES * step)) * BLOCK_N
    # The page of a tile is read one turn early, so that reading its keys waits for nothing.
    next_page = load_page(table, next_slot, lane, num_entries, PAGE, BLOCK_N)
    is_first = False
    for _ in tl.range(0, turns):
        first_slot = next_slot
        page = next_page.to(tl.int64)
        if OWNER != 0:  # noqa: SIM102 (known when compiled, and the inner one is not)
            if is_first:
                if IN_PAIRS:
                    _odd_max, _odd_sum, group_odd = fold(
                        group_max, group_sum, group_odd, row_max, tl.max(row_sum, 1), acc_odd,
                        factor,
                    )  # fmt: skip
                group_max, group_sum, group_acc = fold(
                    group_max, group_sum, group_acc, row_max, tl.max(row_sum, 1), acc, factor
                )
                # Makes the weight of what has been folded 0 below.
                row_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
        step += 1
        if OWNER != 0:
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
        if IN_PAIRS:
            is_code = seen[:, None] & (j < DIM // 2)[None, :]
            pairs = tl.trans(tl.load(k_base + k_row[:, None] + j[None, :], mask=is_code, other=0))
            k_factor = tl.load(s_base + s_row, mask=seen, other=0.0).to(tl.float32)
            # Early, so that the products wait for nothing.
            v_factor = tl.load(s_base + stride_scale_kind + s_row, mask=seen, other=0.0)
            if CODE == 3:
                k_factor = k_factor * FP8_UNIT
            scores = tl.dot(queries, codes_of(pairs, 0, CODE, dtype, HALF), input_precision="ieee")
            scores = tl.dot(
                queries_odd, codes_of(pairs, 1, CODE, dtype, HALF), scores, input_precision="ieee"
            )
            scores = scores * k_factor[None, :]
        else:
            keys, k_factor = load_tile(
                k_base, s_base, k_row, s_row, seen, DIM, DIM_PAD, CODE, dtype
            )
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
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
        v_base = k_base + stride_kind
        row_sum = row_sum * weight[:, None]
        acc = acc * weight[:, None]
        p_low = p.to(dtype)
        row_sum = tl.dot(p_low, ones, row_sum, input_precision="ieee")
        if IN_PAIRS:
            pairs = tl.load(v_base + k_row[:, None] + j[None, :], mask=is_code, other=0)
            p_low = (p * (v_factor.to(tl.float32) * GAIN)[None, :]).to(dtype)
            acc = tl.dot(p_low, codes_of(pairs, 0, CODE, dtype, HALF), acc, input_precision="ieee")
            acc_odd = acc_odd * weight[:, None]
            acc_odd = tl.dot(
                p_low, codes_of(pairs, 1, CODE, dtype, HALF), acc_odd, input_precision="ieee"
            )
        else:
            values, v_factor = load_tile(
                v_base, s_base + stride_scale_kind, k_row, s_row, seen, DIM, DIM_PAD, CODE, dtype
            )
            acc = tl.dot(p_low, values, acc, input_precision="ieee")
        row_max = new_max
    if OWNER != 0:
        if IN_PAIRS:
            _odd_max, _odd_sum, acc_odd = fold(
                group_max, group_sum, group_odd, row_max, tl.max(row_sum, 1), acc_odd, factor
            )
        row_max, sums, acc = fold(
            group_max, group_sum, group_acc, row_max, tl.max(row_sum, 1), acc, factor
        )
    else:
        sums = tl.max(row_sum, 1)
    if IN_PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), (BLOCK_M, DIM_PAD))
        if CODE == 3:
            acc = acc * FP8_UNIT
    out_row = part.to(tl.int64) * num_parts_rows + row
    tl.store(part_max + out_row, row_max, mask=is_row)
    tl.store(part_sum + out_row, sums, mask=is_row)
    tl.store(
        part_acc + out_row[:, None] * DIM + d[None, :],
        acc,
        mask=is_row[:, None] & (d < DIM)[None, :],
    )
