"""The Triton kernel that works out once a step what every layer needs. Knows tables and trees, no
keys.

A row at logical index p (its slot, had it been decoded plainly) sees the slots below b(p) in tiles,
and from b(p) on its own keys, gathered in logical order. b(p) depends on p alone: that makes a tree
exact.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_own(p, DEPTH: tl.constexpr, UNIT: tl.constexpr):
    """b(p): at most p - DEPTH, so that no tree row is below it, and a multiple of UNIT."""
    return tl.maximum(p - DEPTH, 0) // UNIT * UNIT


@triton.jit
def set_bits(words):
    """The 64 bits of words [N] as int32 [N, 64]."""
    return ((words[:, None] >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1).to(tl.int32)


@triton.jit
def deepest(ancestors, first, rows, num_words):
    """Depth of the deepest row of a tree, its root at 0."""
    result = 0
    for start in range(0, rows, 16):
        row = start + tl.arange(0, 16)
        count = tl.zeros([16], tl.int32)
        for w in range(0, num_words):
            word = tl.load(
                ancestors + (first + row).to(tl.int64) * num_words + w, mask=row < rows, other=0
            )
            count += tl.sum(set_bits(word), 1)
        result = tl.maximum(result, tl.max(count, 0) - 1)
    return result


@triton.jit
def first_visible(page_pos, stored, oldest, PAGE: tl.constexpr):
    """First stored slot whose entry holds a position from `oldest` on; `stored` if none does."""
    result = stored
    entries = tl.cdiv(stored, PAGE)
    for start in range(0, entries, 128):
        entry = start + tl.arange(0, 128)
        inside = entry < entries
        begin = tl.load(page_pos + entry, mask=inside, other=-(2**30))
        visible = inside & (begin + PAGE > oldest)
        result = tl.minimum(result, tl.min(tl.where(visible, entry * PAGE, stored), 0))
    return result


@triton.jit
def first_by_leaf(
    kv_len, num_sequences, turn, filling, leaf_cost, any_cost,
    SEQUENCES: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """From how many tiles of a group on a sequence is better owned by leaves.

    Owned by groups, a long sequence runs on alone when the others are done: then a turn takes as
    long as it does alone, and the device idles. Leaves fill it, and cost partial results. Tries
    each sequence and all that are as long by leaf.
    """
    n = tl.arange(0, SEQUENCES)
    turns = tl.cdiv(tl.load(kv_len + n, mask=n < num_sequences, other=0), TILE * GROUPS)
    key = turns * SEQUENCES + n
    is_before = key[None, :] < key[:, None]
    before = tl.sum(is_before.to(tl.int32), 1)
    gap = turns - tl.max(tl.where(is_before, turns[None, :], 0), 1)
    reading = tl.sum(turns, 0) * filling
    # Rows: from which sequence on by leaf. Columns: the sequences owned by groups.
    is_group = turns[None, :] < turns[:, None]
    groups = tl.sum(is_group.to(tl.int32), 1)
    together = tl.maximum((groups[:, None] - before[None, :]) * filling, turn)
    cost = tl.sum(tl.where(is_group, gap[None, :] * together, 0.0), 1)
    cost = tl.maximum(cost, reading) + (SEQUENCES - groups) * leaf_cost + any_cost
    cost = tl.where(turns > 0, cost, float("inf"))
    none = tl.sum(gap * tl.maximum((SEQUENCES - before) * filling, turn), 0)
    best = tl.min(cost, 0)
    threshold = tl.max(turns, 0) + 1
    if best < tl.maximum(none, reading):
        threshold = tl.max(tl.where(cost == best, turns, 0), 0)
    return threshold


@triton.jit(do_not_specialize=["window", "num_entries", "num_words", "num_sequences"])
def plan_rows(
    page_table,
    q_start,
    kv_len,
    ancestors,
    valid,
    q_pos,
    page_pos,
    sequences,
    limits,
    own_slots,
    by_leaf,
    window,
    num_entries,
    num_words,
    num_sequences,
    turn,
    filling,
    leaf_cost,
    any_cost,
    SEQUENCES: tl.constexpr,
    IS_TREE: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Plan one row. Grid (N, most rows of a sequence).

    Args:
        turn: Microseconds of a tile in a program that runs with few others.
        filling: Of a tile of one group that all programs of a sequence read on a full device.
        leaf_cost, any_cost: Of owning a sequence by leaves, and that any is.
        SEQUENCES: A power of two that holds them, to choose owners; 0 for groups alone.

    Writes, int32:
        sequences [N, 8], the longest first: first row, rows, smallest and largest b(p), stored
            slots, first slot in a window, how many sequences are owned by leaves, n.
        limits [T]: b(p).
        by_leaf [T]: Of the row's sequence.
        own_slots [T, DEPTH + UNIT]: physical slots of the row's own keys in logical order, -1 if
            not seen.
    """
    n = tl.program_id(0)
    i = tl.program_id(1)
    first = tl.load(q_start + n)
    rows = tl.load(q_start + n + 1) - first
    stored = tl.load(kv_len + n) - rows
    table = page_table + n.to(tl.int64) * num_entries
    page_pos += n.to(tl.int64) * num_entries
    owned = 0
    if SEQUENCES > 0:
        threshold = first_by_leaf(
            kv_len, num_sequences, turn, filling, leaf_cost, any_cost, SEQUENCES, TILE, GROUPS
        )
        owned = (tl.cdiv(stored + rows, TILE * GROUPS) >= threshold).to(tl.int32)
    if i == 0:
        rank = 0
        num_owned = 0
        for start in range(0, num_sequences, 32):
            other = start + tl.arange(0, 32)
            length = tl.load(kv_len + other, mask=other < num_sequences, other=-1)
            longer = (length > stored + rows) | ((length == stored + rows) & (other < n))
            rank += tl.sum(longer.to(tl.int32), 0)
            if SEQUENCES > 0:
                num_owned += tl.sum((tl.cdiv(length, TILE * GROUPS) >= threshold).to(tl.int32), 0)
        depth_max = rows - 1
        if IS_TREE:
            depth_max = deepest(ancestors, first, rows, num_words)
        visible = 0
        if HAS_WINDOW and rows > 0:
            # The root is the oldest row: what it does not see nobody sees.
            visible = first_visible(page_pos, stored, tl.load(q_pos + first) - window + 1, PAGE)
        out = sequences + rank * 8
        tl.store(out, first)
        tl.store(out + 1, rows)
        tl.store(out + 2, first_own(stored, DEPTH, UNIT))
        tl.store(out + 3, first_own(stored + depth_max, DEPTH, UNIT))
        tl.store(out + 4, stored)
        tl.store(out + 5, visible)
        tl.store(out + 6, num_owned)
        tl.store(out + 7, n)
    if i >= rows:
        return
    t = first + i
    depth = i
    if IS_TREE:
        count = 0
        for w in range(0, num_words):
            word = tl.load(ancestors + t.to(tl.int64) * num_words + w + tl.zeros([1], tl.int32))
            count += tl.sum(tl.sum(set_bits(word), 1), 0)
        depth = count - 1
    p = stored + depth
    limit = first_own(p, DEPTH, UNIT)
    tl.store(limits + t, limit)
    tl.store(by_leaf + t, owned)
    oldest = 0
    if HAS_WINDOW:
        oldest = tl.load(q_pos + t) - window + 1

    SPAN: tl.constexpr = DEPTH + UNIT
    own = own_slots + t.to(tl.int64) * SPAN
    lane = tl.arange(0, SPAN)
    slot = limit + lane
    # Stored keys, and in a chain the new ones too, sit in the slot of their logical index.
    inside = slot < (stored if IS_TREE else p + 1)
    entry = slot // PAGE
    offset = slot % PAGE
    seen = inside
    is_new = slot >= stored
    if HAS_VALID:
        span = valid + (n.to(tl.int64) * num_entries + entry) * 2
        low = tl.load(span, mask=inside, other=0)
        high = tl.load(span + 1, mask=inside, other=0)
        seen = seen & (is_new | ((low <= offset) & (offset < high)))
    if HAS_WINDOW:
        begin = tl.load(page_pos + entry, mask=inside & ~is_new, other=0)
        new_pos = tl.load(q_pos + first + slot - stored, mask=inside & is_new, other=0)
        seen = seen & (tl.where(is_new, new_pos, begin + offset) >= oldest)
    page = tl.load(table + entry, mask=seen, other=0)
    # Lanes of ancestors are left to the loop below.
    written = inside | (lane > p - limit)
    tl.store(own + lane, tl.where(seen, page * PAGE + offset, -1), mask=written)
    if IS_TREE:
        bit = tl.arange(0, 64)
        before = 0
        for w in range(0, num_words):
            word = tl.load(ancestors + t.to(tl.int64) * num_words + w)
            is_set = ((word >> bit.to(tl.int64)) & 1).to(tl.int32)
            # The k-th ancestor from the root has logical index stored + k.
            to = stored + before + tl.cumsum(is_set, 0) - 1 - limit
            before += tl.sum(is_set, 0)
            named = (is_set == 1) & (to >= 0) & (to < SPAN)
            row = w * 64 + bit
            new_page = tl.load(table + (stored + row) // PAGE, mask=named, other=0)
            physical = new_page * PAGE + (stored + row) % PAGE
            if HAS_WINDOW:
                row_pos = tl.load(q_pos + first + row, mask=named, other=0)
                physical = tl.where(row_pos >= oldest, physical, -1)
            tl.store(own + to, physical, mask=named)
