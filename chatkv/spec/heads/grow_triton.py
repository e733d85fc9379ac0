"""The Triton kernels that grow a tree from a recurrent head: four launches a depth.

Knows the nodes of one depth as rows of buffers, and one sequence; no module and no graph. A depth
is `gate_nodes`, `down_nodes`, `score_ids` (which leaves the best ids of each of its blocks) and
`choose_nodes` (which merges them and chooses the nodes that get children, or the tree). The last
two serve every kind of head.

Nodes are numbered depth after depth, from 1; 0 is the root.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from chatkv.models.fused_triton import silu
from chatkv.sampling_triton_math import gumbel

EPS = tl.constexpr(1e-6)
"""Of the head's own norms."""
ROWS = tl.constexpr(16)
"""Rows of a product at least."""
LOW = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(1 << 63))
"""Below every key."""


@triton.jit
def key_of(score, place):
    """int64 in the order of float32 scores; the lower place first among equals."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return order * 4294967296 - place.to(tl.int64) + LOW


@triton.jit
def score_of(key):
    """The score of a key."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key):
    """The place of a key."""
    return (-(key & LOW) + LOW).to(tl.int32)


@triton.jit
def fuse_taps(
    taps, weight, states, hidden,
    TAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """states [0] = weight [H, TAPS * H] times the normed taps [TAPS, H]. Grid over blocks of H."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDE)
    inside = (n < hidden)[:, None] & (k < hidden)[None, :]
    line = weight + n[:, None].to(tl.int64) * (TAPS * hidden) + k[None, :]
    total = tl.zeros([BLOCK_N], tl.float32)
    for tap in tl.static_range(TAPS):
        x = tl.load(taps + tap * hidden + k, mask=k < hidden, other=0.0)
        w = tl.load(line + tap * hidden, mask=inside, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + EPS)
        rounded = (x * scale).to(weight.dtype.element_ty).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * rounded[None, :], 1)
    tl.store(states + n, total, mask=n < hidden)


@triton.jit(do_not_specialize=["nodes"])
def gate_nodes(
    states, parents, tokens, embedding, gate, up, out, nodes, hidden, inner,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [ROWS, I] = silu(gate z) * up z, z = [rms(state of the parent); rms(embedding)].

    Args:
        states: [>= nodes, H] float32, of the depth above.
        parents: [nodes] int32, rows of `states`.
        tokens: [nodes] int32.
        gate, up: [I, 2 H].
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, inner - 1).to(tl.int64)
    m = tl.arange(0, ROWS)
    live = m < nodes
    parent = tl.load(parents + m, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens + m, mask=live, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    state_at = states + parent[:, None] * hidden + k[None, :]
    word_at = embedding + token[:, None] * hidden + k[None, :]
    gate_at = gate + row[:, None] * (2 * hidden) + k[None, :]
    up_at = up + row[:, None] * (2 * hidden) + k[None, :]
    g = tl.zeros([ROWS, BLOCK_N], tl.float32)
    u = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        x = tl.load(state_at + at, mask=live[:, None], other=0.0)
        squares += x * x
        x = x.to(gate.dtype.element_ty)
        g = tl.dot(x, tl.trans(tl.load(gate_at + at)), g, input_precision="ieee")
        u = tl.dot(x, tl.trans(tl.load(up_at + at)), u, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(squares, 1) / hidden + EPS)[:, None]
    word_g = tl.zeros([ROWS, BLOCK_N], tl.float32)
    word_u = tl.zeros([ROWS, BLOCK_N], tl.float32)
    word_squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        e = tl.load(word_at + at, mask=live[:, None], other=0.0)
        word_squares += e.to(tl.float32) * e.to(tl.float32)
        e = e.to(gate.dtype.element_ty)
        word_g = tl.dot(e, tl.trans(tl.load(gate_at + hidden + at)), word_g, input_precision="ieee")
        word_u = tl.dot(e, tl.trans(tl.load(up_at + hidden + at)), word_u, input_precision="ieee")
    word_scale = tl.rsqrt(tl.sum(word_squares, 1) / hidden + EPS)[:, None]
    mixed = silu(g * scale + word_g * word_scale) * (u * scale + word_u * word_scale)
    at = out + m[:, None] * inner + n[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=live[:, None] & (n < inner)[None, :])


@triton.jit(do_not_specialize=["nodes"])
def down_nodes(
    states, parents, x, down, out, nodes, hidden, inner,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [nodes, H] float32 = state of the parent + down [H, I] times x [ROWS, I]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, hidden - 1).to(tl.int64)
    m = tl.arange(0, ROWS)
    seen = (m < nodes)[:, None] & (n < hidden)[None, :]
    parent = tl.load(parents + m, mask=m < nodes, other=0).to(tl.int64)
    total = tl.load(states + parent[:, None] * hidden + n[None, :], mask=seen, other=0.0)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m[:, None] * inner + k[None, :]
    down_at = down + row[:, None] * inner + k[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for at in range(0, inner, BLOCK_K):
        acc = tl.dot(
            tl.load(x_at + at), tl.trans(tl.load(down_at + at)), acc, input_precision="ieee"
        )
    tl.store(out + m[:, None] * hidden + n[None, :], total + acc, mask=seen)


@triton.jit(do_not_specialize=["nodes", "depth"])
def score_ids(
    states, gamma, rows, ids, seed, position, inverse_t, scores, keys, parts, nodes, hidden, count,
    depth, eps,
    NODES: tl.constexpr, CHILDREN: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best of a block of draft ids behind each node, by logit over T plus the target's noise.

    Args:
        states: [nodes, H] float32.
        rows: [K, H], the target's head at ids [K] int32.
        seed: [1] int64, -1 for no noise; position [1] int32 of the token behind the root.
        scores: [NODES, K] float32, room.
        keys: [NODES, BLOCKS, CHILDREN] int64: score and place of the best ids, best first.
        parts: [NODES, 2, BLOCKS] float32: largest score, sum of exp(score - largest).
        NODES: Power of two from `nodes` on.
    """
    block = tl.program_id(0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, count - 1).to(tl.int64)
    token = tl.load(ids + row)
    key = tl.load(seed)
    heat = tl.load(inverse_t).to(tl.float32)
    place = (tl.load(position) + depth).to(tl.uint32)
    key0 = (key & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    noise = tl.where(key < 0, 0.0, gumbel(token, place, key0, key1))
    m = tl.arange(0, ROWS)
    live = m < nodes
    k = tl.arange(0, BLOCK_K)
    state_at = states + m[:, None] * hidden + k[None, :]
    row_at = rows + row[:, None] * hidden + k[None, :]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for at in range(0, hidden, BLOCK_K):
        x = tl.load(state_at + at, mask=live[:, None], other=0.0)
        w = tl.load(gamma + at + k)
        squares += x * x
        x = (x * w[None, :]).to(rows.dtype.element_ty)
        acc = tl.dot(x, tl.trans(tl.load(row_at + at)), acc, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(squares, 1) / hidden + eps) * heat
    found = acc * scale[:, None] + noise[None, :]
    tl.store(
        scores + m[:, None] * count + n[None, :], found, mask=live[:, None] & (n < count)[None, :]
    )
    # Sixteen rows were multiplied, a few are nodes: those alone are looked at from here on.
    tl.debug_barrier()
    node = tl.arange(0, NODES)
    seen = (node < nodes)[:, None] & (n < count)[None, :]
    own = tl.load(scores + node[:, None] * count + n[None, :], mask=seen, other=-float("inf"))
    top = tl.max(own, 1)
    tl.store(parts + 2 * node * BLOCKS + block, top)
    largest = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(own - largest[:, None]), 1)
    tl.store(parts + (2 * node + 1) * BLOCKS + block, total)
    left = tl.where(seen, key_of(own, n[None, :]), NOTHING)
    for child in tl.static_range(CHILDREN):
        best = tl.max(left, 1)
        tl.store(keys + (node * BLOCKS + block) * CHILDREN + child, best)
        left = tl.where(left == best[:, None], NOTHING, left)


@triton.jit(do_not_specialize=["nodes", "first", "next_nodes"])
def choose_nodes(
    keys, parts, ids, paths, places, next_paths, next_places, next_parents, next_tokens,
    node_tokens, node_logs, node_above, row_of, root, position, out, row_tokens, row_positions,
    row_words, nodes, first, next_nodes, deeper,
    NODES: tl.constexpr, CHILDREN: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    ALL: tl.constexpr, TREE: tl.constexpr, DEPTHS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The best children of each node of a depth, and which of them get children. One program.

    Behind the last depth the tree is chosen: the `TREE - 1` best nodes of all and the root.

    Args:
        keys, parts: As `score_ids` left them.
        paths, next_paths: [WIDTH] float32 log chance of each node of this depth and of the next.
        places, next_places: [WIDTH] int32 number of each node.
        next_parents, next_tokens: [WIDTH] int32 row of the parent in this depth, and token.
        node_tokens, node_above: [ALL + 1] int32 by number; node_logs [ALL + 1] float32.
        row_of: [ALL + 1] int32, room: a node's row in the tree.
        out: [3, TREE] int32: tokens, parents, bits of the float32 chances.
        row_tokens, row_positions, row_words: Rows of a step, as `AttentionCall` wants them.
        first: Number of this depth's first child.
        deeper: Taken from a log for each depth above a node when the tree is chosen.
    """
    node = tl.arange(0, NODES)
    live = node < nodes
    column = tl.arange(0, BLOCKS * CHILDREN)
    left = tl.load(keys + node[:, None] * (BLOCKS * CHILDREN) + column[None, :])
    block = tl.arange(0, BLOCKS)
    top = tl.load(parts + 2 * node[:, None] * BLOCKS + block[None, :])
    sums = tl.load(parts + (2 * node[:, None] + 1) * BLOCKS + block[None, :])
    largest = tl.max(top, 1)
    largest = tl.where(live, largest, 0.0)
    shares = tl.where(live[:, None], sums * tl.exp(top - largest[:, None]), 1.0)
    total = largest + tl.log(tl.sum(shares, 1))
    path = tl.load(paths + node, mask=live, other=0.0)
    place = tl.load(places + node, mask=live, other=0)

    child = tl.arange(0, CHILDREN)
    found = tl.full([NODES, CHILDREN], NOTHING, tl.int64)
    for turn in tl.static_range(CHILDREN):
        best = tl.max(left, 1)
        found = tl.where((child == turn)[None, :], best[:, None], found)
        left = tl.where(left == best[:, None], NOTHING, left)
    real = live[:, None] & (found != NOTHING)
    log = path[:, None] + tl.minimum(score_of(found) - total[:, None], 0.0)
    token = tl.load(ids + place_of(found), mask=real, other=0)
    flat = node[:, None] * CHILDREN + child[None, :]
    number = first + flat
    log = tl.where(real, log, -float("inf"))
    tl.store(node_tokens + number, token, mask=live[:, None])
    tl.store(node_logs + number, log, mask=live[:, None])
    tl.store(node_above + number, place[:, None] + flat * 0, mask=live[:, None])

    if not LAST:
        order = tl.where(real, key_of(log, flat), NOTHING)
        for row in range(next_nodes):
            most = tl.max(tl.max(order, 1), 0)
            at = place_of(most)
            tl.store(next_paths + row, score_of(most))
            tl.store(next_places + row, first + at)
            tl.store(next_parents + row, at // CHILDREN)
            tl.store(next_tokens + row, tl.sum(tl.sum(tl.where(flat == at, token, 0), 1), 0))
            order = tl.where(order == most, NOTHING, order)
    else:
        tl.debug_barrier()
        any_node = tl.arange(0, ALL)
        known = any_node < first + nodes * CHILDREN
        known = known & (any_node > 0)
        logs = tl.load(node_logs + any_node, mask=known, other=-float("inf"))
        # A node's depth is that of its parent and one more; the first depth has CHILDREN nodes.
        level = tl.where(
            any_node <= CHILDREN, 0, 1 + (any_node - 1 - CHILDREN) // (WIDTH * CHILDREN)
        )
        rank = logs - deeper * level.to(tl.float32)
        order = tl.where(known & (logs > -float("inf")), key_of(rank, any_node), NOTHING)
        kept = tl.zeros([ALL], tl.int32)
        for _ in range(TREE - 1):
            most = tl.max(order, 0)
            chosen = (order == most) & (order != NOTHING)
            kept = tl.where(chosen, 1, kept)
            order = tl.where(chosen, NOTHING, order)
        row = tl.where(kept > 0, tl.cumsum(kept, 0), 0)
        tl.store(row_of + any_node, row)
        tl.debug_barrier()
        taken = kept > 0
        above = tl.load(node_above + any_node, mask=taken, other=0)
        parent = tl.load(row_of + above)
        word = (tl.full([ALL], 1, tl.int64) << row.to(tl.int64)) | 1
        up = above
        level = tl.zeros([ALL], tl.int32) + 1
        for _step in tl.static_range(DEPTHS - 1):
            word = word | (tl.full([ALL], 1, tl.int64) << tl.load(row_of + up).to(tl.int64))
            level += (up > 0).to(tl.int32)
            up = tl.load(node_above + up, mask=up > 0, other=0)
        own = tl.load(node_tokens + any_node, mask=taken, other=0)
        tl.store(out + row, own, mask=taken)
        tl.store(out + TREE + row, parent, mask=taken)
        tl.store(out + 2 * TREE + row, tl.exp(logs).to(tl.int32, bitcast=True), mask=taken)
        base = tl.load(position) - 1
        tl.store(row_tokens + row, own, mask=taken)
        tl.store(row_positions + row, base + level, mask=taken)
        tl.store(row_words + row, word, mask=taken)
        start = tl.load(root).to(tl.int32)
        tl.store(out, start)
        tl.store(out + TREE, 0)
        tl.store(out + 2 * TREE, 0x3F800000)
        tl.store(row_tokens, start)
        tl.store(row_positions, base)
        tl.store(row_words, tl.full([], 1, tl.int64))
