"""The Triton kernels of an eagle head's layer: new rows into its memory, and the nodes of a depth.

Knows rows, nodes and a memory as buffers, and one sequence; no module and no graph. New rows go
through `fuse_rows` and `store_rows`, which leaves the root's queries too. A depth is `node_heads`
(but for the root), `attend_nodes`, `mix_nodes`, `feed_nodes`, then `down_nodes`, `score_ids` and
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.models.fused_triton import silu
from chatkv.models.skinny_kernels import ask
from chatkv.spec.heads.grow_triton import EPS, ROWS

CIRCLE = tl.constexpr(6.283185307179586)


@triton.jit(do_not_specialize=["rows"])
def fuse_rows(
    tapped, path, span, count, weight, states, rows, hidden, slots,
    TAPS: tl.constexpr, NORMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """states [R, H] float32 of new rows = weight [H, TAPS * H] times their taps.

    Args:
        tapped: [TAPS, T, H] float32.
        path: [N] int32, which of the T are new rows, in order. Grid over blocks of H and of N.
        NORMED: Each tap is normed first.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, hidden - 1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        ask(weight, row, TAPS * hidden, 0, AHEAD)
        gdc_wait()
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = m < tl.load(count)
    source = tl.load(path + m, mask=live, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tap in tl.static_range(TAPS):
        x_at = tapped + (tap * rows.to(tl.int64) + source)[:, None] * hidden + k[None, :]
        w_at = weight + row[:, None] * (TAPS * hidden) + tap * hidden + k[None, :]
        part = tl.zeros([ROWS, BLOCK_N], tl.float32)
        squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for at in range(0, hidden, BLOCK_K):
            x = tl.load(x_at + at, mask=live[:, None], other=0.0)
            squares += x * x
            x = x.to(weight.dtype.element_ty)
            part = tl.dot(x, tl.trans(tl.load(w_at + at)), part, input_precision="ieee")
        if NORMED:
            part = part * tl.rsqrt(tl.sum(squares, 1) / hidden + EPS)[:, None]
        total += part
    slot = ((tl.load(span + 1) + m) % slots).to(tl.int64)
    at = states + slot[:, None] * hidden + n[None, :]
    tl.store(at, total, mask=live[:, None] & (n < hidden)[None, :])


@triton.jit
def _heads(
    states, state, embedding, token, live, state_norm, token_norm, qkv, row, hidden, eps,
    HALF: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[ROWS, N] each: rows `row` and `row + HALF` of qkv times [rms(E[token]); rms(state)]."""
    k = tl.arange(0, BLOCK_K)
    state_at = states + state[:, None] * hidden + k[None, :]
    word_at = embedding + token[:, None] * hidden + k[None, :]
    low_at = qkv + row[:, None] * (2 * hidden) + k[None, :]
    high_at = low_at + HALF * 2 * hidden
    low = tl.zeros([ROWS, row.shape[0]], tl.float32)
    high = tl.zeros([ROWS, row.shape[0]], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        x = tl.load(word_at + at, mask=live[:, None], other=0.0).to(tl.float32)
        squares += x * x
        x = (x * tl.load(token_norm + at + k)[None, :]).to(qkv.dtype.element_ty)
        low = tl.dot(x, tl.trans(tl.load(low_at + at)), low, input_precision="ieee")
        high = tl.dot(x, tl.trans(tl.load(high_at + at)), high, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(squares, 1) / hidden + eps)[:, None]
    state_low = tl.zeros([ROWS, row.shape[0]], tl.float32)
    state_high = tl.zeros([ROWS, row.shape[0]], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        x = tl.load(state_at + at, mask=live[:, None], other=0.0)
        squares += x * x
        x = (x * tl.load(state_norm + at + k)[None, :]).to(qkv.dtype.element_ty)
        w = tl.load(low_at + hidden + at)
        state_low = tl.dot(x, tl.trans(w), state_low, input_precision="ieee")
        w = tl.load(high_at + hidden + at)
        state_high = tl.dot(x, tl.trans(w), state_high, input_precision="ieee")
    state_scale = tl.rsqrt(tl.sum(squares, 1) / hidden + eps)[:, None]
    return low * scale + state_low * state_scale, high * scale + state_high * state_scale


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
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
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
    row = (head * (2 * HALF) + at).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        ask(qkv, row, 2 * hidden, 0, AHEAD)
        ask(qkv, row + HALF, 2 * hidden, 0, AHEAD)
        gdc_wait()
    new = tl.load(count)
    total = tl.maximum(new, 1)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = m < total
    place = tl.load(span + 1) + new - total + m
    slot = tl.where(live, place % slots, 0)
    source = tl.load(path + m, mask=live, other=0)
    token = tl.load(behind + source, mask=live, other=0).to(tl.int64)
    low, high = _heads(
        states, slot.to(tl.int64), embedding, token, live, state_norm, token_norm, qkv, row, hidden,
        eps, HALF, BLOCK_K,
    )  # fmt: skip
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
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
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
    row = (head * (2 * HALF) + at).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        ask(qkv, row, 2 * hidden, 0, AHEAD)
        ask(qkv, row + HALF, 2 * hidden, 0, AHEAD)
        gdc_wait()
    m = tl.arange(0, ROWS)
    live = m < nodes
    parent = tl.load(parents + m, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens + m, mask=live, other=0).to(tl.int64)
    place = tl.load(span + 1) + tl.load(count) - 1 + depth + m * 0
    low, high = _heads(
        states, parent, embedding, token, live, state_norm, token_norm, qkv, row, hidden, eps, HALF,
        BLOCK_K,
    )  # fmt: skip
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
    WIDTH: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
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
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
def mix_nodes(
    states, parents, x, o, norm, out, nodes, hidden, inputs, eps,
    NORMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [nodes, H] float32 = state of the parent + o [H, I] times x [ROWS, I].

    Args:
        NORMED: The state is normed first, with weight `norm` [H].
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, hidden - 1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        ask(o, row, inputs, 0, AHEAD)
        gdc_wait()
    m = tl.arange(0, ROWS)
    live = m < nodes
    seen = live[:, None] & (n < hidden)[None, :]
    parent = tl.load(parents + m, mask=live, other=0).to(tl.int64)
    total = tl.load(states + parent[:, None] * hidden + n[None, :], mask=seen, other=0.0)
    k = tl.arange(0, BLOCK_K)
    if NORMED:
        squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for at in range(0, hidden, BLOCK_K):
            state = tl.load(
                states + parent[:, None] * hidden + at + k[None, :], mask=live[:, None], other=0.0
            )
            squares += state * state
        total = total * tl.rsqrt(tl.sum(squares, 1) / hidden + eps)[:, None]
        total = total * tl.load(norm + row)[None, :]
    x_at = x + m[:, None] * inputs + k[None, :]
    o_at = o + row[:, None] * inputs + k[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for at in range(0, inputs, BLOCK_K):
        rows = tl.load(x_at + at, mask=live[:, None], other=0.0)
        acc = tl.dot(rows, tl.trans(tl.load(o_at + at)), acc, input_precision="ieee")
    tl.store(out + m[:, None] * hidden + n[None, :], total + acc, mask=seen)


@triton.jit(do_not_specialize=["nodes"])
def feed_nodes(
    states, norm, gate, up, out, nodes, hidden, inner, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [ROWS, I] = silu(gate z) * up z, z = rms(states [nodes, H]) * norm [H]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, inner - 1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        ask(gate, row, hidden, 0, AHEAD)
        ask(up, row, hidden, 0, AHEAD)
        gdc_wait()
    m = tl.arange(0, ROWS)
    live = m < nodes
    k = tl.arange(0, BLOCK_K)
    state_at = states + m[:, None] * hidden + k[None, :]
    gate_at = gate + row[:, None] * hidden + k[None, :]
    up_at = up + row[:, None] * hidden + k[None, :]
    g = tl.zeros([ROWS, BLOCK_N], tl.float32)
    u = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        x = tl.load(state_at + at, mask=live[:, None], other=0.0)
        squares += x * x
        x = (x * tl.load(norm + at + k)[None, :]).to(gate.dtype.element_ty)
        g = tl.dot(x, tl.trans(tl.load(gate_at + at)), g, input_precision="ieee")
        u = tl.dot(x, tl.trans(tl.load(up_at + at)), u, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(squares, 1) / hidden + eps)[:, None]
    at = out + m[:, None] * inner + n[None, :]
    mixed = silu(g * scale) * (u * scale)
    tl.store(at, mixed.to(out.dtype.element_ty), mask=live[:, None] & (n < inner)[None, :])
