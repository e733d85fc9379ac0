"""The Triton kernels of an eagle head's layer: new rows into its memory, and the nodes of a depth.

Knows rows, nodes and a memory as buffers, and one sequence; no module and no graph. New rows go
through `fuse_rows` and `store_rows`, which leaves the root's queries too. A depth is `node_heads`
(but for the root), `attend_nodes`, then `add_nodes` of `grow_triton`, `feed_nodes`, `add_nodes`,
`score_ids` and `choose_nodes`.

Row p of a sequence is in slot p % R of a memory. `span` is [2] int32, the rows [first, stop) that
were stored before; `count` [1] int32 more follow, each with the id behind it. With none, the last
row that was stored is looked at again, since the root's queries are made from it.

A row's own warp computes it, so its bits are its own. Norms have no weights of their own here:
`fused_eagle.fold_norms`.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from chatkv.models.fused_triton import silu
from chatkv.spec.heads.grow_triton import EPS, ROWS, draw_noise, two_products

CIRCLE = tl.constexpr(6.283185307179586)


@triton.jit
def _turn_places(block, span, turns, turned, places, HALF: tl.constexpr):
    """turned [places, 2, D / 2] float32: cosines and sines of the places from the last stored row
    on; turns [D / 2] float64 are circles a place. A program for each block of 256."""
    i = block * 256 + tl.arange(0, 256)
    place = tl.load(span + 1) - 1 + i // HALF
    turn = place.to(tl.float64) * tl.load(turns + i % HALF)
    angle = (turn - tl.floor(turn + 0.5)).to(tl.float32) * CIRCLE
    at = turned + i // HALF * (2 * HALF) + i % HALF
    tl.store(at, tl.cos(angle), mask=i < places * HALF)
    tl.store(at + HALF, tl.sin(angle), mask=i < places * HALF)


@triton.jit(do_not_specialize=["rows", "places", "turn_blocks"])
def fuse_rows(
    tapped, path, span, count, weight, states, rows, slots, turns, turned, places, turn_blocks,
    seed, position, ids, noise, num_ids,
    HIDDEN: tl.constexpr, TAPS: tl.constexpr, NORMED: tl.constexpr, LINES: tl.constexpr,
    CHUNK: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """states [R, H] float32 of new rows = weight [H, TAPS * H] times their taps.

    Programs behind those leave what the tree to come needs besides: `_turn_places`, `draw_noise`.

    Args:
        tapped: [TAPS, T, H] float32.
        path: [N] int32, which of the T are new rows, in order. Grid over pairs of H and over N.
        NORMED: Each tap is normed first.
        LINES: Rows at once, and warps.
    """
    block = tl.program_id(0) - HIDDEN // 2
    if block >= turn_blocks:
        draw_noise(block - turn_blocks, seed, position, ids, noise, num_ids, BLOCK, BLOCKS)
    elif block >= 0:
        _turn_places(block, span, turns, turned, places, HALF)
    else:
        n = tl.program_id(0) * 2
        line = weight + n * (TAPS * HIDDEN)
        start = tl.load(span + 1)
        new = tl.load(count)
        first = tl.program_id(1) * ROWS
        for begin in range(first, tl.minimum(new, first + ROWS), LINES):
            m = begin + tl.arange(0, LINES)
            live = m < new
            source = tl.load(path + m, mask=live, other=0)
            low = tl.zeros([LINES], tl.float32)
            high = tl.zeros([LINES], tl.float32)
            for tap in tl.static_range(TAPS):
                at = tap * HIDDEN
                from_row = ((tap * rows + source) * HIDDEN)[:, None]
                a, b, squares = two_products(
                    tapped + from_row, line + at, line + (TAPS * HIDDEN + at), LINES, HIDDEN, CHUNK,
                    TURN,
                )  # fmt: skip
                if NORMED:
                    scale = tl.rsqrt(squares / HIDDEN + EPS)
                    a *= scale
                    b *= scale
                low += a
                high += b
            at = states + (start + m) % slots * HIDDEN + n
            tl.store(at, low, mask=live)
            tl.store(at + 1, high, mask=live)


@triton.jit
def _rotated(low, high, at, HALF: tl.constexpr):
    """Both halves turned; `at` are pointers to their cosines, HALF in front of their sines."""
    c = tl.load(at)
    s = tl.load(at + HALF)
    return low * c - high * s, high * c + low * s


@triton.jit
def _put(out, line, low, high, mask, HALF: tl.constexpr):
    """Both halves of a channel into lines of heads."""
    tl.store(out + line, low.to(out.dtype.element_ty), mask=mask)
    tl.store(out + line + HALF, high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(
    states, path, behind, span, count, embedding, qkv, turned, keys, values, q, last, eps, scale,
    slots,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    LINES: tl.constexpr, CHUNK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Keys and values of new rows into their slots, and the queries of the last one.

    Args:
        states: [R, H] float32, as `fuse_rows` left them.
        behind: [T] int32, the id behind each of the T rows; path [N] as there.
        qkv: [(HEADS + 2 KV_HEADS) D, 2 H]. Grid over its pairs of channels, and over N.
        turned: As `fuse_rows` left it.
        keys, values: [R, KV_HEADS, D].
        q: [>= 1, HEADS, D], line 0 filled, times `scale`.
        last: [>= 1] int32: the slot of the last row.
    """
    head = tl.program_id(0) // HALF
    at = tl.program_id(0) % HALF
    low_at = qkv + (head * (2 * HALF) + at) * (2 * HIDDEN)
    high_at = low_at + HALF * 2 * HIDDEN
    new = tl.load(count)
    total = tl.maximum(new, 1)
    start = tl.load(span + 1) + new - total
    first = tl.program_id(1) * ROWS
    stop = tl.minimum(total, first + ROWS)
    if head < HEADS:  # only the last row asks
        first = tl.maximum(first, (total - 1) // LINES * LINES)
    for begin in range(first, stop, LINES):
        m = begin + tl.arange(0, LINES)
        live = m < total
        slot = tl.where(live, (start + m) % slots, 0)
        source = tl.load(path + m, mask=live, other=0)
        token = tl.load(behind + source, mask=live, other=0).to(tl.int64)
        low, high, squares = two_products(
            embedding + (token * HIDDEN)[:, None], low_at, high_at, LINES, HIDDEN, CHUNK, TURN
        )
        norm = tl.rsqrt(squares / HIDDEN + eps)
        state_low, state_high, squares = two_products(
            states + (slot * HIDDEN)[:, None], low_at + HIDDEN, high_at + HIDDEN, LINES, HIDDEN,
            CHUNK, TURN,
        )  # fmt: skip
        state_norm = tl.rsqrt(squares / HIDDEN + eps)
        low = low * norm + state_low * state_norm
        high = high * norm + state_high * state_norm
        is_last = m == total - 1
        if head < HEADS + KV_HEADS:
            place = start + m - tl.load(span + 1) + 1
            low, high = _rotated(low, high, turned + place * (2 * HALF) + at, HALF)
        if head < HEADS:
            to = head * (2 * HALF) + at + m * 0
            _put(q, to, low * scale, high * scale, is_last, HALF)
        elif head < HEADS + KV_HEADS:
            to = (slot * KV_HEADS + head - HEADS) * (2 * HALF) + at
            _put(keys, to, low, high, live, HALF)
        else:
            to = (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + at
            _put(values, to, low, high, live, HALF)
        if tl.program_id(0) == 0:
            tl.store(last + m * 0, slot, mask=is_last)


@triton.jit(do_not_specialize=["nodes", "depth"])
def node_heads(
    states, parents, places, count, table, qkv, turned, keys, values, q, nodes, depth,
    eps, scale,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    NODES: tl.constexpr, CHUNK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of the nodes of a depth below the root.

    Args:
        states: [ROWS, H] float32, of the depth above; parents [ROWS] int32 are its rows.
        places: [ROWS] int32, of the nodes' tokens among the draft ids.
        table: [K, (HEADS + 2 KV_HEADS) D]: the token half of these products, by draft id.
        qkv: [(HEADS + 2 KV_HEADS) D, 2 H]. Grid over its pairs of channels.
        turned: As `fuse_rows` left it.
        keys, values: [nodes, KV_HEADS, D], filled.
        q: [nodes, HEADS, D], filled, times `scale`.
        NODES: Power of two from `nodes` on, and warps.
    """
    head = tl.program_id(0) // HALF
    at = tl.program_id(0) % HALF
    row = head * (2 * HALF) + at
    low_at = qkv + row * (2 * HIDDEN) + HIDDEN
    m = tl.arange(0, NODES)
    live = m < nodes
    parent = tl.load(parents + m)
    word = table + tl.load(places + m).to(tl.int64) * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + row
    turned_at = turned + (tl.load(count) + depth) * (2 * HALF) + at + m * 0
    token_low = tl.load(word).to(tl.float32)
    token_high = tl.load(word + HALF).to(tl.float32)
    low, high, squares = two_products(
        states + (parent * HIDDEN)[:, None], low_at, low_at + HALF * 2 * HIDDEN, NODES, HIDDEN,
        CHUNK, TURN,
    )  # fmt: skip
    norm = tl.rsqrt(squares / HIDDEN + eps)
    low = token_low + low * norm
    high = token_high + high * norm
    if head < HEADS + KV_HEADS:
        low, high = _rotated(low, high, turned_at, HALF)
    if head < HEADS:
        _put(q, (m * HEADS + head) * (2 * HALF) + at, low * scale, high * scale, live, HALF)
    elif head < HEADS + KV_HEADS:
        _put(keys, (m * KV_HEADS + head - HEADS) * (2 * HALF) + at, low, high, live, HALF)
    else:
        to = (m * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + at
        _put(values, to, low, high, live, HALF)


@triton.jit
def _mix(most, total, mixed, score, value):
    """One more key's score and value [D], in what was mixed so far."""
    top = tl.maximum(most, score)
    share = tl.exp(score - top)
    shrink = tl.exp(most - top)
    return top, total * shrink + share, mixed * shrink + value * share


@triton.jit(do_not_specialize=["depth"])
def attend_nodes(
    q, keys, values, node_keys, node_values, parents, span, count, out, mixes, sums, arrived, slots,
    depth,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [ROWS, HEADS, D] float32: what nodes see of the stored rows and of their own ancestors.

    Args:
        q: [nodes, HEADS, D]. Grid over HEADS, nodes, and PARTS of the window, with one more for
            ancestors.
        keys, values: [R, KV_HEADS, D].
        node_keys, node_values: [DEPTHS, WIDTH, KV_HEADS, D], depth 1 first.
        parents: [DEPTHS, ROWS] int32, line d the rows of depth d - 1 that depth d stands below.
        mixes: [2 PARTS, ROWS, HEADS, D] float32, room; sums [2 PARTS, 2, ROWS, HEADS] likewise.
        arrived: [ROWS, HEADS] int32, zeros before and after: the last part adds all of them.
        KEYS: Looked at together.
        depth: Of the nodes; the root's own key is among the stored ones.
    """
    head = tl.program_id(0) // (HEADS // KV_HEADS)
    unit = tl.program_id(1) * HEADS + tl.program_id(0)
    part = tl.program_id(2)
    d = tl.arange(0, DIM_PAD)
    real = d < DIM
    query = tl.load(q + unit * DIM + d, mask=real, other=0.0).to(tl.float32)
    most = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([DIM_PAD], tl.float32)
    if part < PARTS:
        stop = tl.load(span + 1) + tl.load(count)
        first = tl.maximum(tl.load(span), stop - WINDOW)
        begin = first % slots
        for at in range(0, WINDOW, PARTS * KEYS):
            # Slots that hold no row hold numbers all the same; their scores are hidden.
            i = at + part * KEYS + tl.arange(0, KEYS)
            slot = begin + tl.minimum(i, slots - 1)
            slot = tl.where(slot >= slots, slot - slots, slot)
            stored = ((slot * KV_HEADS + head) * DIM)[:, None] + d[None, :]
            key = tl.load(keys + stored, mask=real[None, :], other=0.0)
            value = tl.load(values + stored, mask=real[None, :], other=0.0)
            score = tl.sum(key.to(tl.float32) * query[None, :], 1)
            score = tl.where(i < stop - first, score, -float("inf"))
            top = tl.maximum(most, tl.max(score, 0))
            base = tl.where(top == -float("inf"), 0.0, top)  # a part may see none
            share = tl.exp(score - base)
            shrink = tl.exp(most - base)
            total = total * shrink + tl.sum(share, 0)
            mixed = mixed * shrink + tl.sum(value.to(tl.float32) * share[:, None], 0)
            most = top
    else:
        above = tl.program_id(1)
        for back in range(depth):
            level = depth - back
            own = (((level - 1) * WIDTH + above) * KV_HEADS + head) * DIM + d
            key = tl.load(node_keys + own, mask=real, other=0.0).to(tl.float32)
            value = tl.load(node_values + own, mask=real, other=0.0).to(tl.float32)
            above = tl.load(parents + level * ROWS + above)
            most, total, mixed = _mix(most, total, mixed, tl.sum(query * key, 0), value)
    units: tl.constexpr = ROWS * HEADS
    all_parts = tl.num_programs(2)
    tl.store(mixes + (part * units + unit) * DIM + d, mixed, mask=real)
    tl.store(sums + 2 * part * units + unit, most)
    tl.store(sums + (2 * part + 1) * units + unit, total)
    tl.debug_barrier()
    if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == all_parts - 1:
        each = tl.arange(0, 2 * PARTS)
        there = each < all_parts
        part_sums = sums + 2 * each * units + unit
        tops = tl.load(part_sums, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(part_sums + units, mask=there, other=0.0, cache_modifier=".cg")
        lines = mixes + ((each * units + unit) * DIM)[:, None] + d[None, :]
        parts = tl.load(lines, mask=there[:, None] & real[None, :], other=0.0, cache_modifier=".cg")
        factor = tl.exp(tops - tl.max(tops, 0))
        together = tl.sum(parts * factor[:, None], 0) / tl.sum(totals * factor, 0)
        tl.store(out + unit * DIM + d, together, mask=real)
        tl.store(arrived + unit, 0)


@triton.jit(do_not_specialize=["nodes"])
def feed_nodes(
    states, gate, up, out, nodes, eps,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
    TURN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """out [ROWS, I] float32 = silu(gate z) * up z, z = rms(states [ROWS, H]).

    Args:
        gate, up: [I, H]. Grid over blocks of PAIRS of their rows.
        NODES: Power of two from `nodes` on, and warps.
    """
    m = tl.arange(0, NODES)
    first = tl.program_id(0) * PAIRS
    mixed = ()
    for pair in tl.static_range(PAIRS):
        n = first + pair
        g, u, squares = two_products(
            states + (m * HIDDEN)[:, None], gate + n * HIDDEN, up + n * HIDDEN, NODES, HIDDEN,
            CHUNK, TURN,
        )  # fmt: skip
        scale = tl.rsqrt(squares / HIDDEN + eps)
        mixed = mixed + (silu(g * scale) * (u * scale),)  # noqa: RUF005
    for pair in tl.static_range(PAIRS):  # written last, so that the rows are read once
        tl.store(out + m * INNER + first + pair, mixed[pair], mask=m < nodes)
