"""The items of `triton_wide`, and the ring of tiles that they pass through. Knows no products."""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Renamed after Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

ROWS = gl.constexpr(64)
"""Of one group of warps that multiply."""


@gluon.jit
def leaf_end(tiles, leaf, LEAVES: gl.constexpr):
    """How many of the first `tiles` tiles of a group are the leaf's."""
    return gl.maximum((tiles - leaf + LEAVES - 1) // LEAVES, 0)


@gluon.jit
def count_items(
    sequences, blocks, pairs,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, LEAVES: gl.constexpr, OWNER: gl.constexpr,
):  # fmt: skip
    """Items of all programs: a row block, under a pair of sequence and kv head, over a part."""
    if OWNER == 0:
        items = blocks * pairs * (GROUPS * LEAVES)
    elif OWNER == 1:
        items = blocks * pairs * GROUPS
    else:
        by_leaf = gl.load(sequences + 6)
        items = blocks * (pairs * GROUPS + by_leaf * (HEADS * GROUPS * (LEAVES - 1)))
    return items


@gluon.jit
def item_of(
    sequences, item, blocks, pairs, HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, LEAVES: gl.constexpr, OWNER: gl.constexpr,
):  # fmt: skip
    """Where an item is; the order is that of `triton_kernels.item_of`.

    Returns its row block, head, part, group, tiles of the group, leaves from and to (none if there
    is nothing to do), and its sequence: first row, rows, smallest and largest b(p), n.
    """
    block = item % blocks
    index = item // blocks
    if OWNER == 2:
        by_leaf = gl.load(sequences + 6)
        is_first = index < pairs * GROUPS
        width = gl.where(is_first, pairs, HEADS * by_leaf)
        index = gl.where(is_first, index, index - pairs * GROUPS)
        pair = index % width
        part = index // width + gl.where(is_first, 0, GROUPS)
    else:
        pair = index % pairs
        part = index // pairs
    sequence = sequences + pair // HEADS * 8
    first = gl.load(sequence)
    rows = gl.load(sequence + 1)
    smallest = gl.load(sequence + 2)
    last = gl.load(sequence + 3)
    n = gl.load(sequence + 7)
    tiles = (last + BLOCK_N - 1) // BLOCK_N
    group = part % GROUPS
    group_tiles = (tiles - group + GROUPS - 1) // GROUPS
    first_leaf = part // GROUPS
    if OWNER == 0:
        stop_leaf = first_leaf + 1
    elif OWNER == 1:
        stop_leaf = first_leaf + LEAVES
    else:
        stop_leaf = gl.where(pair < HEADS * by_leaf, first_leaf + 1, LEAVES)
    is_none = (block * (2 * ROWS) >= rows * GROUP) | (group + GROUPS * first_leaf >= tiles)
    stop_leaf = gl.where(is_none, first_leaf, stop_leaf)
    head = pair % HEADS
    return (
        block, head, part, group, group_tiles, first_leaf, stop_leaf,
        first, rows, smallest, last, n,
    )  # fmt: skip


@gluon.jit
def load_tiles(
    pages, page_table, num_entries, sequences, blocks, pairs, k_ring, v_ring, k_full, v_full, free,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, LEAVES: gl.constexpr, OWNER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all items into the ring, as places become free."""
    BYTES: gl.constexpr = BLOCK_N * DIM * 2
    items = count_items(sequences, blocks, pairs, HEADS, GROUPS, LEAVES, OWNER)
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, head, _, group, group_tiles, first_leaf, stop_leaf, _, _, _, _, n = item_of(
            sequences, item, blocks, pairs, HEADS, GROUP, BLOCK_N, GROUPS, LEAVES, OWNER
        )
        table = page_table + n.to(gl.int64) * num_entries
        for leaf in range(first_leaf, stop_leaf):
            for step in range(0, leaf_end(group_tiles, leaf, LEAVES)):
                slot = (group + GROUPS * (leaf + LEAVES * step)) * BLOCK_N
                page = gl.load(table + slot // PAGE)
                row = (page * (2 * HEADS) + head) * PAGE + slot % PAGE
                place = count % STAGES
                mbarrier.wait(free.index(place), ((count // STAGES) & 1) ^ 1)
                k_bar = k_full.index(place)
                mbarrier.expect(k_bar, BYTES)
                load_box(pages, [row, 0], k_bar, k_ring.index(place))
                v_bar = v_full.index(place)
                mbarrier.expect(v_bar, BYTES)
                load_box(pages, [row + HEADS * PAGE, 0], v_bar, v_ring.index(place))
                count += 1


@gluon.jit
def clear_unused(values, slot, last, BLOCK_N: gl.constexpr):
    """Zero the lanes of a tile from slot `last` on, which no row may use: 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    found = values.load(LAYOUT)
    lane = slot + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    values.store(gl.where(lane[:, None] < last, found, 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def release(free, count, STAGES: gl.constexpr):
    """Give the place of the tile at `count` back, once all warps of the group are done with it."""
    barrier()
    mbarrier.arrive(free.index(count % STAGES))
