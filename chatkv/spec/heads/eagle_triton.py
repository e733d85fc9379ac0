"""The Triton kernels of an eagle head's layer: new rows into its memory, and the nodes of a depth.

Knows rows, nodes and a memory as buffers, and one sequence; no module and no graph. New rows go
through `fuse_rows` and `store_rows`, which leaves the root's queries too. A depth is `node_heads`
(but for the root), `attend_nodes`, `add_nodes`, `feed_nodes`, `add_nodes`, then `score_ids` and
`choose_nodes` of `grow_triton`.

Row p of a sequence is in slot p % R of a memory. `span` is [2] int32, the rows [first, stop) that
were stored before; `count` [1] int32 more follow, each with the id behind it. With none, the last
row that was stored is looked at again, since the root's queries are made from it.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from chatkv.models.fused_triton import silu
from chatkv.spec.heads.grow_triton import EPS, ROWS

CIRCLE = tl.constexpr(6.283185307179586)


@triton.jit
def weights_of(line, start, inputs, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """[PARTS, N, WIDE] of the weight rows that begin at line [N], zeros behind the last input.

    A product in parts is short: each warp has its own, and they are added in the end.
    """
    k = start + (tl.arange(0, PARTS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :])[:, None, :]
    return tl.load(line[None, :, None] + k, mask=k < inputs, other=0.0)


@triton.jit
def rows_of(x, line, live, start, inputs, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """[PARTS, ROWS, WIDE] of rows `line` [ROWS] of x [.., inputs]."""
    k = start + (tl.arange(0, PARTS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :])[:, None, :]
    at = x + (line.to(tl.int64) * inputs)[None, :, None] + k
    return tl.load(at, mask=(k < inputs) & live[None, :, None], other=0.0)


@triton.jit
def times(x, w):
    """[ROWS, N] float32."""
    return tl.sum(tl.dot(x, tl.permute(w, (0, 2, 1)), input_precision="ieee"), 0)


@triton.jit
def _two_products(
    x, line, live, norm, low_at, low_w, high_at, high_w, inputs, eps,
    PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows `line` of x, normed with weights `norm`, times two sets of weight rows; of each the
    first `weights_of` are here."""
    chunk: tl.constexpr = PARTS * WIDE
    one = tl.zeros([1], tl.int32)
    read = rows_of(x, line, live, 0, inputs, PARTS, WIDE).to(tl.float32)
    scales = rows_of(norm, one, one == 0, 0, inputs, PARTS, WIDE)
    squares = tl.sum(tl.sum(read * read, 2), 0)
    normed = (read * scales).to(low_w.dtype)
    low = times(normed, low_w)
    high = times(normed, high_w)
    for at in range(chunk, inputs, chunk):
        read = rows_of(x, line, live, at, inputs, PARTS, WIDE).to(tl.float32)
        scales = rows_of(norm, one, one == 0, at, inputs, PARTS, WIDE)
        squares += tl.sum(tl.sum(read * read, 2), 0)
        normed = (read * scales).to(low_w.dtype)
        low += times(normed, weights_of(low_at, at, inputs, PARTS, WIDE))
        high += times(normed, weights_of(high_at, at, inputs, PARTS, WIDE))
    scale = tl.rsqrt(squares / inputs + eps)[:, None]
    return low * scale, high * scale


@triton.jit(do_not_specialize=["rows"])
def fuse_rows(
    tapped, path, span, count, weight, states, rows, hidden, slots,
    TAPS: tl.constexpr, NORMED: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """states [R, H] float32 of new rows = weight [H, TAPS * H] times their taps.

    Args:
        tapped: [TAPS, T, H] float32.
        path: [N] int32, which of the T are new rows, in order. Grid over blocks of H and of N.
        NORMED: Each tap is normed first.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = weight + tl.minimum(n, hidden - 1).to(tl.int64) * (TAPS * hidden)
    first_w = weights_of(line, 0, hidden, PARTS, WIDE)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = m < tl.load(count)
    source = tl.load(path + m, mask=live, other=0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tap in tl.static_range(TAPS):
        from_row = tap * rows.to(tl.int64) + source
        x = rows_of(tapped, from_row, live, 0, hidden, PARTS, WIDE)
        squares = tl.sum(tl.sum(x * x, 2), 0)
        w = first_w if tap == 0 else weights_of(line + tap * hidden, 0, hidden, PARTS, WIDE)
        part = times(x.to(w.dtype), w)
        for at in range(PARTS * WIDE, hidden, PARTS * WIDE):
            x = rows_of(tapped, from_row, live, at, hidden, PARTS, WIDE)
            squares += tl.sum(tl.sum(x * x, 2), 0)
            part += times(x.to(w.dtype), weights_of(line + tap * hidden, at, hidden, PARTS, WIDE))
        if NORMED:
            part = part * tl.rsqrt(squares / hidden + EPS)[:, None]
        total += part
    slot = ((tl.load(span + 1) + m) % slots).to(tl.int64)
    at = states + slot[:, None] * hidden + n[None, :]
    tl.store(at, total, mask=live[:, None] & (n < hidden)[None, :])


@triton.jit
def _turned(low, high, place, turns, at):
    """Both halves rotated to their places [ROWS]; turns [D / 2] float64 are circles a place."""
    turn = place.to(tl.float64)[:, None] * tl.load(turns + at)[None, :]
    angle = (turn - tl.floor(turn + 0.5)).to(tl.float32) * CIRCLE
    c = tl.cos(angle)
    s = tl.sin(angle)
    return low * c - high * s, high * c + low * s


@triton.jit
def _put(out, line, low, high, at, mask, HALF: tl.constexpr):
    """Both halves of a head into lines [ROWS] of D."""
    to = out + line[:, None] * (2 * HALF) + at[None, :]
    tl.store(to, low.to(out.dtype.element_ty), mask=mask[:, None])
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=mask[:, None])


@triton.jit
def store_rows(
    states, path, behind, span, count, embedding, state_norm, token_norm, qkv, turns, keys, values,
    q, last, hidden, eps, scale, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Keys and values of new rows into their slots, and the queries of the last one.

    Args:
        states: [R, H] float32, as `fuse_rows` left them.
        behind: [T] int32, the id behind each of the T rows; path [N] as there.
        qkv: [(HEADS + 2 KV_HEADS) D, 2 H]. Grid over its heads in blocks of channels, and over N.
        keys, values: [R, KV_HEADS, D].
        q: [>= 1, HEADS, D], line 0 filled, times `scale`.
        last: [>= 1] int32: the slot of the last row.
    """
    head = tl.program_id(0) // (HALF // BLOCK_N)
    at = tl.program_id(0) % (HALF // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    low_at = qkv + (head * (2 * HALF) + at).to(tl.int64) * (2 * hidden)
    high_at = low_at + HALF * 2 * hidden
    low_w = weights_of(low_at, 0, hidden, PARTS, WIDE)
    high_w = weights_of(high_at, 0, hidden, PARTS, WIDE)
    state_low_w = weights_of(low_at + hidden, 0, hidden, PARTS, WIDE)
    state_high_w = weights_of(high_at + hidden, 0, hidden, PARTS, WIDE)
    new = tl.load(count)
    total = tl.maximum(new, 1)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = m < total
    place = tl.load(span + 1) + new - total + m
    slot = tl.where(live, place % slots, 0)
    source = tl.load(path + m, mask=live, other=0)
    token = tl.load(behind + source, mask=live, other=0).to(tl.int64)
    low, high = _two_products(
        embedding, token, live, token_norm, low_at, low_w, high_at, high_w, hidden, eps, PARTS, WIDE
    )
    state_low, state_high = _two_products(
        states, slot, live, state_norm, low_at + hidden, state_low_w, high_at + hidden,
        state_high_w, hidden, eps, PARTS, WIDE,
    )  # fmt: skip
    low += state_low
    high += state_high
    if head < HEADS + KV_HEADS:
        low, high = _turned(low, high, place, turns, at)
    is_last = m == total - 1
    if head < HEADS:
        _put(q, m * 0 + head, low * scale, high * scale, at, is_last, HALF)
    elif head < HEADS + KV_HEADS:
        _put(keys, slot * KV_HEADS + head - HEADS, low, high, at, live, HALF)
    else:
        _put(values, slot * KV_HEADS + head - HEADS - KV_HEADS, low, high, at, live, HALF)
    if tl.program_id(0) == 0:
        tl.store(last + m * 0, slot, mask=is_last)


@triton.jit(do_not_specialize=["nodes", "depth"])
def node_heads(
    states, parents, tokens, span, count, embedding, state_norm, token_norm, qkv, turns, keys,
    values, q, nodes, depth, hidden, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of the nodes of a depth below the root.

    Args:
        states: [>= nodes, H] float32, of the depth above; parents [nodes] int32 are its rows.
        tokens: [nodes] int32.
        keys, values: [nodes, KV_HEADS, D], filled.
        q: [nodes, HEADS, D], filled, times `scale`.
    """
    head = tl.program_id(0) // (HALF // BLOCK_N)
    at = tl.program_id(0) % (HALF // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    low_at = qkv + (head * (2 * HALF) + at).to(tl.int64) * (2 * hidden)
    high_at = low_at + HALF * 2 * hidden
    low_w = weights_of(low_at, 0, hidden, PARTS, WIDE)
    high_w = weights_of(high_at, 0, hidden, PARTS, WIDE)
    state_low_w = weights_of(low_at + hidden, 0, hidden, PARTS, WIDE)
    state_high_w = weights_of(high_at + hidden, 0, hidden, PARTS, WIDE)
    m = tl.arange(0, ROWS)
    live = m < nodes
    parent = tl.load(parents + m, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens + m, mask=live, other=0).to(tl.int64)
    place = tl.load(span + 1) + tl.load(count) - 1 + depth + m * 0
    low, high = _two_products(
        embedding, token, live, token_norm, low_at, low_w, high_at, high_w, hidden, eps, PARTS, WIDE
    )
    state_low, state_high = _two_products(
        states, parent, live, state_norm, low_at + hidden, state_low_w, high_at + hidden,
        state_high_w, hidden, eps, PARTS, WIDE,
    )  # fmt: skip
    low += state_low
    high += state_high
    if head < HEADS + KV_HEADS:
        low, high = _turned(low, high, place, turns, at)
    if head < HEADS:
        _put(q, m * HEADS + head, low * scale, high * scale, at, live, HALF)
    elif head < HEADS + KV_HEADS:
        _put(keys, m * KV_HEADS + head - HEADS, low, high, at, live, HALF)
    else:
        _put(values, m * KV_HEADS + head - HEADS - KV_HEADS, low, high, at, live, HALF)


@triton.jit
def _taken_in(scores, value, most, total, mixed):
    """Some more keys' scores and values, in what a query has mixed so far."""
    top = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp(most - top)
    share = tl.exp(scores - top[:, None])
    total = total * shrink + tl.sum(share, 1)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(share.to(value.dtype), value, mixed, input_precision="ieee")
    return top, total, mixed


@triton.jit(do_not_specialize=["nodes"])
def attend_nodes(
    q, keys, values, node_keys, node_values, parents, span, count, out, nodes, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """out [ROWS, HEADS, D]: what nodes see of the stored rows and of their own ancestors.

    Args:
        q: [nodes, HEADS, D]. Grid over KV_HEADS.
        keys, values: [R, KV_HEADS, D].
        node_keys, node_values: [DEPTHS, WIDTH, KV_HEADS, D], depth 1 first.
        parents: [DEPTHS, ROWS] int32, line d the rows of depth d - 1 that depth d stands below.
        QUERIES: Power of two from 16 and from nodes times the heads of a group on.
        DEPTH: Of the nodes; the root's own key is among the stored ones.
        OWN: Power of two from 16 and from DEPTH * WIDTH on.
    """
    head = tl.program_id(0)
    group: tl.constexpr = HEADS // KV_HEADS
    r = tl.arange(0, QUERIES)
    node = r // group
    live = node < nodes
    d = tl.arange(0, DIM_PAD)
    stop = tl.load(span + 1) + tl.load(count)
    first = tl.maximum(tl.load(span), stop - WINDOW)
    line = node * HEADS + head * group + r % group
    inside = live[:, None] & (d < DIM)[None, :]
    query = tl.load(q + line[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for at in range(0, WINDOW, BLOCK_S):
        place = first + at + tl.arange(0, BLOCK_S)
        seen = place < stop
        stored = ((place % slots) * KV_HEADS + head)[:, None] * DIM + d[None, :]
        there = seen[:, None] & (d < DIM)[None, :]
        key = tl.load(keys + stored, mask=there, other=0.0)
        value = tl.load(values + stored, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        # The last stored row is always seen, so the first block has one that counts.
        scores = tl.where(seen[None, :], scores, -float("inf"))
        most, total, mixed = _taken_in(scores, value, most, total, mixed)
    if DEPTH:
        j = tl.arange(0, OWN)
        own = (j * KV_HEADS + head)[:, None] * DIM + d[None, :]
        there = (j < DEPTH * WIDTH)[:, None] & (d < DIM)[None, :]
        key = tl.load(node_keys + own, mask=there, other=0.0)
        value = tl.load(node_values + own, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        above = tl.where(live, node, 0)
        seen = tl.zeros([QUERIES, OWN], tl.int32)
        for back in tl.static_range(DEPTH):
            level = DEPTH - back
            seen = tl.where(j[None, :] == ((level - 1) * WIDTH + above)[:, None], 1, seen)
            above = tl.load(parents + level * ROWS + above)
        scores = tl.where(seen > 0, scores, -float("inf"))
        most, total, mixed = _taken_in(scores, value, most, total, mixed)
    mixed = mixed / total[:, None]
    tl.store(out + line[:, None] * DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def add_nodes(
    states, parents, x, weight, norm, out, nodes, hidden, inputs, eps,
    NORMED: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [nodes, H] float32 = state of the parent + weight [H, I] times x [ROWS, I].

    Args:
        NORMED: The state is normed first, with weight `norm` [H].
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, hidden - 1).to(tl.int64)
    line = weight + row * inputs
    w = weights_of(line, 0, inputs, PARTS, WIDE)
    m = tl.arange(0, ROWS)
    live = m < nodes
    seen = live[:, None] & (n < hidden)[None, :]
    total = times(rows_of(x, m, live, 0, inputs, PARTS, WIDE), w)
    for at in range(PARTS * WIDE, inputs, PARTS * WIDE):
        w = weights_of(line, at, inputs, PARTS, WIDE)
        total += times(rows_of(x, m, live, at, inputs, PARTS, WIDE), w)
    parent = tl.load(parents + m, mask=live, other=0).to(tl.int64)
    state = tl.load(states + parent[:, None] * hidden + n[None, :], mask=seen, other=0.0)
    if NORMED:
        squares = tl.zeros([ROWS], tl.float32)
        for at in range(0, hidden, PARTS * WIDE):
            whole = rows_of(states, parent, live, at, hidden, PARTS, WIDE)
            squares += tl.sum(tl.sum(whole * whole, 2), 0)
        state = state * tl.rsqrt(squares / hidden + eps)[:, None] * tl.load(norm + row)[None, :]
    tl.store(out + m[:, None] * hidden + n[None, :], state + total, mask=seen)


@triton.jit(do_not_specialize=["nodes"])
def feed_nodes(
    states, norm, gate, up, out, nodes, hidden, inner, eps,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out [ROWS, I] = silu(gate z) * up z, z = rms(states [nodes, H]) * norm [H]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, inner - 1).to(tl.int64)
    gate_at = gate + row * hidden
    up_at = up + row * hidden
    gate_w = weights_of(gate_at, 0, hidden, PARTS, WIDE)
    up_w = weights_of(up_at, 0, hidden, PARTS, WIDE)
    m = tl.arange(0, ROWS)
    live = m < nodes
    g, u = _two_products(
        states, m, live, norm, gate_at, gate_w, up_at, up_w, hidden, eps, PARTS, WIDE
    )
    at = out + m[:, None] * inner + n[None, :]
    mixed = silu(g) * u
    tl.store(at, mixed.to(out.dtype.element_ty), mask=live[:, None] & (n < inner)[None, :])
