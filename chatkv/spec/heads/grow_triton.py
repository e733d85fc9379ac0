"""The Triton kernels that grow a tree: what every kind of head shares, and a recurrent head's own.

Knows the nodes of one depth as rows of buffers, and one sequence; no module and no graph. A depth
of a recurrent head is `gate_nodes`, `add_nodes`, `score_ids` (which leaves the best ids of each of
its blocks) and `choose_nodes` (which merges them and chooses the nodes that get children, or the
tree). The last three serve every kind of head.

So few rows take no time to multiply: what counts is how many instructions a kernel has, for each is
fetched once. A product gives a row to each warp, with no tensor core and no shared memory.

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
LEAST = tl.constexpr(-(1 << 31))
"""Below every key."""
ROWS = tl.constexpr(16)
"""Rows of a buffer of nodes, and of a product on tensor cores at least."""


@triton.jit
def order_of(x):
    """int32 in the order of float32 numbers."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_of(x, place, PLACES: tl.constexpr):
    """int32 in the order of float32 numbers; nearly equal ones by their place, the lower first.

    Args:
        PLACES: Power of two; no two numbers have the same place below it.
    """
    return (order_of(x) & -PLACES) | (PLACES - 1 - place)


@triton.jit
def two_products(
    x, low, high, N: tl.constexpr, INPUTS: tl.constexpr, CHUNK: tl.constexpr, TURN: tl.constexpr
):
    """N rows times two weight rows, and the sums of their squares: [N] float32 each.

    Args:
        x: [N, 1] pointers to rows of INPUTS numbers; low, high pointers to weight rows.
        TURN: Inputs that are read at once.
    """
    # Each warp reads the weights itself: to hand them around would take barriers.
    k = tl.arange(0, CHUNK)[None, :] + tl.zeros([N, 1], tl.int32)
    first = tl.zeros([N, CHUNK], tl.float32)
    second = tl.zeros([N, CHUNK], tl.float32)
    squares = tl.zeros([N, CHUNK], tl.float32)
    for at in range(0, INPUTS, TURN):
        for chunk in tl.static_range(TURN // CHUNK):
            here = at + chunk * CHUNK + k
            a = tl.load(low + here).to(tl.float32)
            b = tl.load(high + here).to(tl.float32)
            v = tl.load(x + here).to(tl.float32)
            first += v * a
            second += v * b
            squares += v * v
    return tl.sum(first, 1), tl.sum(second, 1), tl.sum(squares, 1)


@triton.jit
def draw_noise(block, seed, position, ids, noise, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """noise [DEPTHS, K] float32 of draft ids [K] int32 at the places of a tree's depths.

    Args:
        seed: [1] int64, -1 for no noise; position [1] int32 of the token behind the root.
        block: Which of the DEPTHS * BLOCKS.
    """
    depth = block // BLOCKS
    at = block % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(seed)
    drawn = tl.zeros([BLOCK], tl.float32)
    if key >= 0:
        token = tl.load(ids + at, mask=at < count, other=0)
        place = (tl.load(position) + depth).to(tl.uint32)
        key0 = (key & 0xFFFFFFFF).to(tl.uint32)
        key1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
        drawn = gumbel(token, place, key0, key1)
    tl.store(noise + depth * count + at, drawn, mask=at < count)


@triton.jit
def fuse_taps(
    taps, weight, states, seed, position, ids, noise, count,
    HIDDEN: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, TURN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """states [0] = weight [H, TAPS * H] times the normed taps [TAPS, H].

    Grid over pairs of H, and over blocks of the noise to come: `draw_noise`.
    """
    block = tl.program_id(0) - HIDDEN // 2
    if block >= 0:
        draw_noise(block, seed, position, ids, noise, count, BLOCK, BLOCKS)
    else:
        n = tl.program_id(0) * 2
        line = weight + n * (TAPS * HIDDEN)
        one = tl.arange(0, 1)
        low = tl.zeros([1], tl.float32)
        high = tl.zeros([1], tl.float32)
        for tap in tl.static_range(TAPS):
            at = tap * HIDDEN
            a, b, squares = two_products(
                taps + at + one[:, None], line + at, line + (TAPS * HIDDEN + at), 1, HIDDEN,
                CHUNK, TURN,
            )  # fmt: skip
            scale = tl.rsqrt(squares / HIDDEN + EPS)
            low += a * scale
            high += b * scale
        tl.store(states + n + one, low)
        tl.store(states + n + 1 + one, high)


@triton.jit(do_not_specialize=["nodes"])
def gate_nodes(
    states, parents, tokens, embedding, gate, up, out, nodes,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """out [ROWS, I] float32 = silu(gate z) * up z, z = [rms(state of parent); rms(embedding)].

    Args:
        states: [ROWS, H] float32, of the depth above.
        parents: [ROWS] int32, rows of `states`.
        tokens: [ROWS] int32.
        gate, up: [I, 2 H]. Grid over their rows.
        NODES: Power of two from `nodes` on, and warps.
    """
    m = tl.arange(0, NODES)
    parent = tl.load(parents + m)
    token = tl.load(tokens + tl.minimum(m, nodes - 1)).to(tl.int64)
    state = states + (parent * HIDDEN)[:, None]
    word = embedding + (token * HIDDEN)[:, None]
    n = tl.program_id(0)
    low = gate + n * (2 * HIDDEN)
    high = up + n * (2 * HIDDEN)
    g, u, squares = two_products(state, low, high, NODES, HIDDEN, CHUNK, TURN)
    scale = tl.rsqrt(squares / HIDDEN + EPS)
    word_g, word_u, squares = two_products(
        word, low + HIDDEN, high + HIDDEN, NODES, HIDDEN, CHUNK, TURN
    )
    word_scale = tl.rsqrt(squares / HIDDEN + EPS)
    mixed = silu(g * scale + word_g * word_scale) * (u * scale + word_u * word_scale)
    tl.store(out + m * INNER + n, mixed, mask=m < nodes)


@triton.jit(do_not_specialize=["nodes"])
def add_nodes(
    states, parents, x, weight, norm, gamma, out, guess, nodes, eps,
    HIDDEN: tl.constexpr, INPUTS: tl.constexpr, NORMED: tl.constexpr, GUESSES: tl.constexpr,
    NODES: tl.constexpr, CHUNK: tl.constexpr, TURN: tl.constexpr, STATE_CHUNK: tl.constexpr,
):  # fmt: skip
    """out [ROWS, H] float32 = state of the parent + weight [H, I] times x [ROWS, I] float32.

    Args:
        NORMED: The state is normed first, with weight `norm` [H].
        GUESSES: guess [ROWS, H] = out * gamma [H], to be multiplied with draft rows.
        NODES: Power of two from `nodes` on, and warps. Grid over pairs of H.
    """
    n = tl.program_id(0) * 2
    m = tl.arange(0, NODES)
    live = m < nodes
    line = states + tl.load(parents + m) * HIDDEN
    low = tl.load(line + n)
    high = tl.load(line + n + 1)
    more, most, _ = two_products(
        x + (m * INPUTS)[:, None], weight + n * INPUTS, weight + (n + 1) * INPUTS, NODES, INPUTS,
        CHUNK, TURN,
    )  # fmt: skip
    if NORMED:
        squares = tl.zeros([NODES, STATE_CHUNK], tl.float32)
        k = tl.arange(0, STATE_CHUNK)[None, :]
        for at in range(0, HIDDEN, STATE_CHUNK):
            v = tl.load(line[:, None] + at + k)
            squares += v * v
        scale = tl.rsqrt(tl.sum(squares, 1) / HIDDEN + eps)
        low *= scale * tl.load(norm + n)
        high *= scale * tl.load(norm + n + 1)
    low += more
    high += most
    at = m * HIDDEN + n
    tl.store(out + at, low, mask=live)
    tl.store(out + at + 1, high, mask=live)
    if GUESSES:
        tl.store(guess + at, (low * tl.load(gamma + n)).to(guess.dtype.element_ty), mask=live)
        high *= tl.load(gamma + n + 1)
        tl.store(guess + at + 1, high.to(guess.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["nodes", "depth"])
def score_ids(
    states, guess, rows, noise, inverse_t, scores, best, places, parts, nodes, count, depth, hidden,
    eps,
    HIDDEN: tl.constexpr, NODES: tl.constexpr, NODES_PAD: tl.constexpr, CHILDREN: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best of a block of draft ids behind each node, by logit over T plus the target's noise.

    Args:
        states: [ROWS, H] float32; guess [ROWS, H], the same times gamma.
        rows: [K, H], the target's head at the draft ids.
        noise: [DEPTHS, K] float32.
        scores: [NODES, K] float32, room.
        best: [NODES, BLOCKS, CHILDREN] float32, best first, -inf where there is none; places
            likewise int32.
        parts: [NODES, 2, BLOCKS] float32: largest score, sum of exp(score - largest).
        NODES: Power of two from `nodes` on, and warps.
        NODES_PAD: The same, from 8 on.
        hidden: HIDDEN again, so that the loop stays one.
    """
    block = tl.program_id(0)
    node = tl.arange(0, NODES)
    place = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (place < count) & (node[:, None] < nodes)
    drawn = tl.load(noise + depth * count + place, mask=inside, other=0.0)
    squares = tl.zeros([NODES, CHUNK], tl.float32)
    for chunk in tl.static_range(HIDDEN // CHUNK):
        k = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        v = tl.load(states + node[:, None] * HIDDEN + k)
        squares += v * v
    scale = tl.rsqrt(tl.sum(squares, 1) / HIDDEN + eps) * tl.load(inverse_t).to(tl.float32)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    padded = tl.arange(0, NODES_PAD)
    k = tl.arange(0, BLOCK_K)
    at = guess + padded[:, None] * hidden + k[None, :]
    row_at = rows + tl.minimum(n, count - 1)[:, None].to(tl.int64) * hidden + k[None, :]
    acc = tl.zeros([BLOCK_N, NODES_PAD], tl.float32)
    for turn in range(0, hidden, BLOCK_K):
        acc = tl.dot(
            tl.load(row_at + turn), tl.trans(tl.load(at + turn)), acc, input_precision="ieee"
        )
    there = (padded[None, :] < nodes) & (n < count)[:, None]
    tl.store(scores + padded[None, :] * count + n[:, None], acc, mask=there)
    # Each node's scores in a warp of its own from here on.
    tl.debug_barrier()
    own = tl.load(scores + node[:, None] * count + place, mask=inside, other=0.0)
    own = tl.where(inside, own * scale[:, None] + drawn, -float("inf"))
    top = tl.max(own, 1)
    part = parts + 2 * node * BLOCKS + block
    tl.store(part, top)
    largest = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(own - largest[:, None]), 1)
    tl.store(part + BLOCKS, total)
    key = key_of(own, tl.arange(0, BLOCK_N)[None, :], BLOCK_N)
    rank = tl.full([NODES, BLOCK_N], CHILDREN, tl.int32)
    for child in range(CHILDREN):
        hit = key == tl.max(key, 1)[:, None]
        rank = tl.where(hit, child, rank)
        key = tl.where(hit, LEAST, key)
    to = (node[:, None] * BLOCKS + block) * CHILDREN + rank
    tl.store(best + to, own, mask=rank < CHILDREN)
    tl.store(places + to, place + node[:, None] * 0, mask=rank < CHILDREN)


@triton.jit(do_not_specialize=["nodes", "first", "next_nodes"])
def choose_nodes(
    best, found, parts, ids, paths, numbers, next_paths, next_numbers, next_parents, next_tokens,
    next_places, node_places, node_logs, node_above, root, position, out, row_tokens,
    row_positions, row_words, nodes, first, next_nodes, deeper,
    NODES: tl.constexpr, CHILDREN: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    ALL: tl.constexpr, TREE: tl.constexpr, DEPTHS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The best children of each node of a depth, and which of them get children. One program.

    Behind the last depth the tree is chosen: the `TREE - 1` best nodes of all and the root.

    Args:
        best, found, parts: Scores, places and parts, as `score_ids` left them.
        paths, next_paths: [ROWS] float32 log chance of each node of this depth and of the next.
        numbers, next_numbers: [ROWS] int32 number of each node.
        next_parents, next_tokens: [ROWS] int32 row of the parent in this depth, and token;
            next_places its place among the draft ids.
        node_places, node_above: [ALL] int32 by number; node_logs [ALL] float32.
        out: [3, TREE] int32: tokens, parents, bits of the float32 chances.
        row_tokens, row_positions, row_words: Rows of a step, as `AttentionCall` wants them.
        first: Number of this depth's first child.
        deeper: Taken from a log for each depth above a node when the tree is chosen.
        NODES: Power of two from `nodes` on, and warps.
    """
    some: tl.constexpr = CHILDREN * CHILDREN
    flats: tl.constexpr = NODES * CHILDREN
    node = tl.arange(0, NODES)
    live = node < nodes
    block = tl.arange(0, BLOCKS)[None, :]
    part = parts + 2 * node[:, None] * BLOCKS + block
    top = tl.load(part, mask=live[:, None], other=-float("inf"))
    sums = tl.load(part + BLOCKS, mask=live[:, None], other=0.0)
    path = tl.load(paths + node)
    flat = tl.arange(0, flats)
    child = flat < nodes * CHILDREN
    above = tl.load(numbers + flat // CHILDREN)
    tl.store(node_above + first + flat, above, mask=child)
    # The best ids are in the blocks whose first ones are the best.
    column = tl.arange(0, some)[None, :]
    key = tl.where(live[:, None], key_of(top, block, BLOCKS), LEAST)
    lists = tl.full([NODES, some], LEAST, tl.int32)
    for turn in range(CHILDREN):
        most = tl.max(key, 1)[:, None]
        lists = tl.where(column // CHILDREN == turn, most, lists)
        key = tl.where(key == most, LEAST, key)
    at = (node[:, None] * BLOCKS + (BLOCKS - 1 - (lists & (BLOCKS - 1)))) * CHILDREN
    at += column % CHILDREN
    there = lists != LEAST
    score = tl.load(best + at, mask=there, other=-float("inf"))
    place = tl.load(found + at, mask=there, other=0)
    largest = tl.where(live, tl.max(top, 1), 0.0)
    shares = tl.sum(sums * tl.exp(top - largest[:, None]), 1)
    total = largest + tl.log(tl.where(live, shares, 1.0))
    log = path[:, None] + tl.minimum(score - total[:, None], 0.0)
    key = tl.where(there, key_of(score, column, some), LEAST)
    rank = tl.full([NODES, some], CHILDREN, tl.int32)
    for turn in range(CHILDREN):
        hit = key == tl.max(key, 1)[:, None]
        rank = tl.where(hit, turn, rank)
        key = tl.where(hit, LEAST, key)
    to = first + node[:, None] * CHILDREN + rank
    tl.store(node_logs + to, log, mask=(rank < CHILDREN) & live[:, None])
    tl.store(node_places + to, place, mask=(rank < CHILDREN) & live[:, None])
    tl.debug_barrier()

    if not LAST:
        log = tl.load(node_logs + first + flat, mask=child, other=-float("inf"))
        place = tl.load(node_places + first + flat, mask=child, other=0)
        token = tl.load(ids + place)
        key = tl.where(child, key_of(log, flat, flats), LEAST)
        rank = tl.full([flats], WIDTH, tl.int32)
        for turn in range(WIDTH):
            hit = key == tl.max(key, 0)
            rank = tl.where(hit, turn, rank)
            key = tl.where(hit, LEAST, key)
        chosen = (rank < next_nodes) & child
        tl.store(next_paths + rank, log, mask=chosen)
        tl.store(next_numbers + rank, first + flat, mask=chosen)
        tl.store(next_parents + rank, flat // CHILDREN, mask=chosen)
        tl.store(next_tokens + rank, token, mask=chosen)
        tl.store(next_places + rank, place, mask=chosen)
    else:
        any_node = tl.arange(0, ALL)
        known = (any_node < first + nodes * CHILDREN) & (any_node > 0)
        logs = tl.load(node_logs + any_node, mask=known, other=-float("inf"))
        above = tl.load(node_above + any_node, mask=known, other=0)
        own = tl.load(ids + tl.load(node_places + any_node, mask=known, other=0))
        # A node's depth is that of its parent and one more; the first depth has CHILDREN nodes.
        level = tl.where(
            any_node <= CHILDREN, 0, 1 + (any_node - 1 - CHILDREN) // (WIDTH * CHILDREN)
        )
        key = key_of(logs - deeper * level.to(tl.float32), any_node, ALL)
        # Counting how many are better takes no turns that wait for one another.
        better = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
        taken = (better < TREE - 1) & (logs > -float("inf"))
        row = tl.where(taken, tl.cumsum(taken.to(tl.int32), 0), 0)
        parent = tl.gather(row, above, 0)
        one = tl.full([ALL], 1, tl.int64)
        word = (one << row.to(tl.int64)) | 1
        up = above
        depth = tl.full([ALL], 1, tl.int32)
        for _step in tl.static_range(DEPTHS - 1):
            word = word | (one << tl.gather(row, up, 0).to(tl.int64))
            depth += (up > 0).to(tl.int32)
            up = tl.gather(above, up, 0)
        base = tl.load(position) - 1
        tl.store(out + row, own, mask=taken)
        tl.store(out + TREE + row, parent, mask=taken)
        tl.store(out + 2 * TREE + row, tl.exp(logs).to(tl.int32, bitcast=True), mask=taken)
        tl.store(row_tokens + row, own, mask=taken)
        tl.store(row_positions + row, base + depth, mask=taken)
        tl.store(row_words + row, word, mask=taken)
        start = tl.load(root).to(tl.int32)
        tl.store(out, start)
        tl.store(out + TREE, 0)
        tl.store(out + 2 * TREE, 0x3F800000)
        tl.store(row_tokens, start)
        tl.store(row_positions, base)
        tl.store(row_words, tl.full([], 1, tl.int64))
