"""`attend_past` for many rows on Hopper: one warp loads tiles, others multiply. Knows no plan.

The partition is that of `triton_kernels`, and so are the bits: the same products of the same 16
keys, and between them the same elementwise steps. One warp copies tiles of keys and values into a
ring in shared memory; two groups of four warps walk it, each with 64 rows of its own. A group
works on the softmax of a tile while the values of the one before are multiplied.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.attention.triton_ring import (
    ROWS,
    barrier,
    clear_unused,
    count_items,
    item_of,
    leaf_end,
    load_tiles,
    release,
)

EMPTY_MAX = gl.constexpr(-1e30)
"""As in `triton_kernels`, like ONES."""
ONES = gl.constexpr(8)
REGISTERS = gl.constexpr(240)
"""Of a multiplying thread; a loading one takes 24."""


@gluon.jit
def start_scores(q_tile, k_ring, k_full, count, none, STAGES: gl.constexpr):
    """Begin to multiply the keys of the tile at `count`."""
    place = count % STAGES
    mbarrier.wait(k_full.index(place), (count // STAGES) & 1)
    keys = k_ring.index(place).permute((1, 0))
    return warpgroup_mma(q_tile, keys, none, use_acc=False, is_async=True)


@gluon.jit
def softmax(
    scores, row_max, factor, slot, limit, smallest, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr
):
    """Probabilities of a tile, the new maximum, and the weight of what was summed before."""
    if slot + BLOCK_N > smallest:
        lane = slot + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(lane[None, :] < limit[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    weight = gl.exp2((row_max - new_max) * factor)
    minus_max = -(new_max * factor)
    p = gl.exp2(gl.fma(scores, factor, minus_max[:, None]))
    return p, new_max, weight


@gluon.jit
def start_values(
    p_low, acc, row_sum, v_ring, v_full, ones, count, slot, last,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SUM: gl.constexpr, IS_END: gl.constexpr,
):  # fmt: skip
    """Begin to add the tile at `count`, as last of its leaf if IS_END."""
    place = count % STAGES
    mbarrier.wait(v_full.index(place), (count // STAGES) & 1)
    if IS_END:  # noqa: SIM102 (known when compiled, and the inner one is not)
        # The last tile of a sequence, the only one with unused lanes, is the last of its leaf.
        if slot + BLOCK_N > last:
            clear_unused(v_ring.index(place), slot, last, BLOCK_N)
    acc = warpgroup_mma(p_low, v_ring.index(place), acc, is_async=True)
    p_sum = gl.convert_layout(p_low, gl.DotOperandLayout(0, SUM, 2))
    return acc, warpgroup_mma(p_sum, ones, row_sum, is_async=True)


@gluon.jit
def multiply(
    q, q_tiles, k_ring, v_ring, ones, k_full, v_full, free, sequences, limits,
    part_acc, part_max, part_sum, factor, num_parts_rows, stride_q, blocks, pairs,
    WHICH: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    GROUPS: gl.constexpr, LEAVES: gl.constexpr, OWNER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The partial softmax of 64 rows of each item, as one of two groups of warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    none = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    q_shared = q_tiles.index(WHICH)
    items = count_items(sequences, blocks, pairs, HEADS, GROUPS, LEAVES, OWNER)
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        (
            block, head, part, group, group_tiles, first_leaf, stop_leaf,
            first, rows, smallest, last, _,
        ) = item_of(
            sequences, item, blocks, pairs, HEADS, GROUP, BLOCK_N, GROUPS, LEAVES, OWNER
        )  # fmt: skip
        first_m = (block * 2 + WHICH) * ROWS
        if (first_m >= rows * GROUP) | (first_leaf >= stop_leaf):
            # All rows are the other group's: let the tiles pass.
            for leaf in range(first_leaf, stop_leaf):
                for _step in range(0, leaf_end(group_tiles, leaf, LEAVES)):
                    mbarrier.wait(v_full.index(count % STAGES), (count // STAGES) & 1)
                    mbarrier.arrive(free.index(count % STAGES))
                    count += 1
        else:
            copy_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
            copy_d = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
            q_row = (first + copy_m // GROUP).to(gl.int64) * stride_q
            q_row += (head * GROUP + copy_m % GROUP) * DIM
            is_copied = (copy_m < rows * GROUP)[:, None]
            q_shared.store(gl.load(q + q_row[:, None] + copy_d[None, :], mask=is_copied, other=0.0))
            barrier()
            q_tile = q_shared.load(gl.DotOperandLayout(0, SCORES, 2))
            score_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            limit = gl.load(limits + first + score_m // GROUP, mask=score_m < rows * GROUP, other=0)
            group_max = gl.full([ROWS], EMPTY_MAX, gl.float32, ROW)
            group_sum = gl.full([ROWS], 0.0, gl.float32, ROW)
            group_acc = gl.full([ROWS, DIM], 0.0, gl.float32, OUT)
            for leaf in range(first_leaf, stop_leaf):
                turns = leaf_end(group_tiles, leaf, LEAVES)
                if turns > 0:
                    slot = (group + GROUPS * leaf) * BLOCK_N
                    row_max = gl.full([ROWS], EMPTY_MAX, gl.float32, gl.SliceLayout(1, SCORES))
                    row_sum = gl.full([ROWS, ONES], 0.0, gl.float32, SUM)
                    acc = gl.full([ROWS, DIM], 0.0, gl.float32, OUT)
                    scores = start_scores(q_tile, k_ring, k_full, count, none, STAGES)
                    scores = warpgroup_mma_wait(0, deps=[scores])
                    p, row_max, weight = softmax(
                        scores, row_max, factor, slot, limit, smallest, BLOCK_N, SCORES
                    )
                    p_low = gl.convert_layout(p.to(ones.dtype), gl.DotOperandLayout(0, OUT, 2))
                    # Nothing may be in flight from one round to the next: the compiler would then
                    # wait after each product.
                    for _round in range(1, turns):
                        following = start_scores(q_tile, k_ring, k_full, count + 1, none, STAGES)
                        acc, row_sum = start_values(
                            p_low, acc, row_sum, v_ring, v_full, ones, count, slot, last,
                            BLOCK_N, STAGES, SUM, False,
                        )  # fmt: skip
                        slot += GROUPS * LEAVES * BLOCK_N
                        scores = warpgroup_mma_wait(2, deps=[following])
                        p, row_max, weight = softmax(
                            scores, row_max, factor, slot, limit, smallest, BLOCK_N, SCORES
                        )
                        # p_low must stay where it is until it has been multiplied.
                        acc, row_sum, p_low = warpgroup_mma_wait(0, deps=[acc, row_sum, p_low])
                        release(free, count, STAGES)
                        acc = acc * gl.convert_layout(weight, ROW)[:, None]
                        sum_weight = gl.convert_layout(weight, gl.SliceLayout(1, SUM))
                        row_sum = row_sum * sum_weight[:, None]
                        p_low = gl.convert_layout(p.to(ones.dtype), gl.DotOperandLayout(0, OUT, 2))
                        count += 1
                    acc, row_sum = start_values(
                        p_low, acc, row_sum, v_ring, v_full, ones, count, slot, last,
                        BLOCK_N, STAGES, SUM, True,
                    )  # fmt: skip
                    acc, row_sum, p_low = warpgroup_mma_wait(0, deps=[acc, row_sum, p_low])
                    release(free, count, STAGES)
                    count += 1
                    leaf_sum = gl.convert_layout(gl.max(row_sum, 1), ROW)
                    leaf_max = gl.convert_layout(row_max, ROW)
                    if OWNER == 0:
                        group_max = leaf_max
                        group_sum = leaf_sum
                        group_acc = acc
                    else:
                        joint = gl.maximum(group_max, leaf_max)
                        weight_a = gl.exp2((group_max - joint) * factor)
                        weight_b = gl.exp2((leaf_max - joint) * factor)
                        group_sum = gl.fma(group_sum, weight_a, leaf_sum * weight_b)
                        group_acc = gl.fma(group_acc, weight_a[:, None], acc * weight_b[:, None])
                        group_max = joint
            m = first_m + gl.arange(0, ROWS, ROW)
            is_row = m < rows * GROUP
            d = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
            row = (first + m // GROUP) * (HEADS * GROUP) + head * GROUP + m % GROUP
            out_row = part.to(gl.int64) * num_parts_rows + row
            gl.store(part_max + out_row, group_max, mask=is_row)
            gl.store(part_sum + out_row, group_sum, mask=is_row)
            gl.store(
                part_acc + out_row[:, None] * DIM + d[None, :],
                group_acc,
                mask=is_row[:, None],
            )


@gluon.jit(do_not_specialize=["num_entries", "num_parts_rows", "blocks", "pairs"])
def attend_wide(
    q, pages, page_table, sequences, limits, part_acc, part_max, part_sum,
    factor, num_entries, num_parts_rows, stride_q, blocks, pairs,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, LEAVES: gl.constexpr, OWNER: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.attend_past`, without holes, windows and scales, 128 rows at a time.

    Grid (programs that run at once), which share the items.

    Args:
        pages: Descriptor of the pool as [P * 2 * HEADS * PAGE, DIM], in boxes of BLOCK_N rows; a
            page holds whole tiles.
        blocks: Row blocks of a sequence.
        pairs: N * HEADS.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], pages.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], pages.layout)
    q_tiles = gl.allocate_shared_memory(
        dtype, [2, ROWS, DIM], gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    )
    ones = gl.allocate_shared_memory(
        dtype,
        [BLOCK_N, ONES],
        gl.NVMMASharedLayout.get_default_for([BLOCK_N, ONES], dtype),
        gl.full([BLOCK_N, ONES], 1.0, dtype, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])),
    )
    fence_async_shared()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (multiply, (
                q, q_tiles, k_ring, v_ring, ones, k_full, v_full, free, sequences,
                limits, part_acc, part_max, part_sum, factor, num_parts_rows, stride_q,
                blocks, pairs,
                0, HEADS, GROUP, DIM, BLOCK_N, GROUPS, LEAVES, OWNER, STAGES,
            )),
            (multiply, (
                q, q_tiles, k_ring, v_ring, ones, k_full, v_full, free, sequences,
                limits, part_acc, part_max, part_sum, factor, num_parts_rows, stride_q,
                blocks, pairs,
                1, HEADS, GROUP, DIM, BLOCK_N, GROUPS, LEAVES, OWNER, STAGES,
            )),
            (load_tiles, (
                pages, page_table, num_entries, sequences, blocks, pairs,
                k_ring, v_ring, k_full, v_full, free,
                HEADS, GROUP, DIM, PAGE, BLOCK_N, GROUPS, LEAVES, OWNER, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
