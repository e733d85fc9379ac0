"""Does the Triton backend keep its promise on this device? Knows calls and bits, no kernel.

Random trees against the reference and against plain decoding: when the backend is loaded, in tests
and in the benchmark, since a device, driver or compiler can break it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from chatkv.attention.call import INT4_GROUP, AttentionCall
from chatkv.attention.reference import ancestor_words, attend
from chatkv.attention.triton_launch import MANY_ROWS

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
"""Relative error of out, and absolute error of LSE, by dtype of q: probabilities are summed so."""
QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.uint8)


class Attends(Protocol):
    """A backend, as far as a check needs one."""

    def attend(
        self, call: AttentionCall, q: Tensor, pages: Tensor, *, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one attention layer and its pages."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    page_dtype: torch.dtype | None = None
    """None is `dtype`; else a quantised one."""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Case:
    """One call with its tensors, and the trees it was made from."""

    shape: Shape
    call: AttentionCall
    q: Tensor
    pages: Tensor
    scales: Tensor | None
    parents: tuple[tuple[int, ...], ...]


def random_tree(rows: int, depth: int, rng: random.Random) -> tuple[int, ...]:
    """Parents of a random tree of at most `depth` rows from root to leaf."""
    parents, depths = [-1], [1]
    while len(parents) < rows:
        parent = rng.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tuple(parents)


def make_case(
    shape: Shape,
    parents: Sequence[Sequence[int]],
    history: Sequence[int],
    *,
    seed: int = 0,
    poison: float = torch.nan,
    as_chain: bool = False,
    holes: bool = False,
    window: int | None = None,
    padding: int = 1,
) -> Case:
    """Random rows on scattered pages; whatever no row may see holds `poison`.

    Args:
        parents: Tree of each sequence, maybe empty.
        history: Stored slots of each sequence.
        as_chain: Leave the ancestor words out: each tree is a chain.
        holes: Drop some entries, and cut others at either end.
        padding: Rows of q that no sequence owns.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    size = shape.page_size
    rows = [len(tree) for tree in parents]
    lengths = [stored + new for stored, new in zip(history, rows, strict=True)]
    used = [-(-length // size) for length in lengths]
    entries = max(used) + 2
    pages, scales = _random_pages(shape, sum(used) + 3, generator)
    ids = list(range(len(pages)))
    rng.shuffle(ids)
    table = torch.full((len(rows), entries), 2**31 - 1, dtype=torch.int32)
    valid = torch.tensor([0, size], dtype=torch.int32).repeat(len(rows), entries, 1)
    keep = torch.zeros(len(pages), size, dtype=torch.bool)
    page_pos = torch.arange(entries, dtype=torch.int32).repeat(len(rows), 1) * size
    q_pos = []
    for n, (tree, stored) in enumerate(zip(parents, history, strict=True)):
        for entry in range(used[n]):
            page = table[n, entry] = ids.pop()
            low, high = 0, size
            if holes and (entry + 1) * size <= stored:
                low, high = sorted(rng.choices(range(size + 1), k=2))
                if rng.random() < 0.5:
                    low, high = rng.choice([(0, size), (3, 3)])
            valid[n, entry, 0], valid[n, entry, 1] = low, high
            if entry * size <= stored < (entry + 1) * size:
                high = size
            keep[page, low : min(high, lengths[n] - entry * size)] = True
        shift = rng.randrange(2 * size) if holes else 0
        page_pos[n] -= shift
        depths = []
        for parent in tree:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        q_pos += [stored - shift + depth for depth in depths]
    _poison(pages, scales, keep, poison)
    ancestors = None
    if not as_chain:
        width = max(1, -(-max(rows) // 64))
        ancestors = torch.zeros(sum(rows), width, dtype=torch.int64)
        first = 0
        for tree in parents:
            words = ancestor_words(tree)
            ancestors[first : first + len(tree), : words.shape[1]] = words
            first += len(tree)
    q = torch.randn(sum(rows) + padding, shape.num_heads, shape.head_dim, generator=generator)
    q[sum(rows) :] = poison
    device = shape.device
    call = AttentionCall.of(table, rows, lengths)
    call = replace(
        call,
        page_table=table.to(device),
        q_start=call.q_start.to(device),
        kv_len=call.kv_len.to(device),
        ancestors=None if ancestors is None else ancestors.to(device),
        valid=valid.to(device) if holes else None,
        q_pos=torch.tensor(q_pos, dtype=torch.int32, device=device) if window else None,
        page_pos=page_pos.to(device) if window else None,
        window=window,
    )
    q = q.to(shape.dtype).to(device)
    scales = None if scales is None else scales.to(device)
    trees = tuple(tuple(tree) for tree in parents)
    return Case(shape, call, q, pages.to(device), scales, trees)


def _random_pages(
    shape: Shape, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    sizes = (count, 2, shape.num_kv_heads, shape.page_size)
    dtype = shape.page_dtype or shape.dtype
    if dtype not in QUANTISED:
        return torch.randn(*sizes, shape.head_dim, generator=generator).to(dtype), None
    per_slot = shape.head_dim // INT4_GROUP if dtype == torch.uint8 else 1
    scales = torch.rand(*sizes, per_slot, generator=generator) + 0.5
    if dtype == torch.uint8:
        codes = torch.randint(0, 256, (*sizes, shape.head_dim // 2), generator=generator)
        return codes.to(dtype), (scales / 4).half()
    codes = torch.randn(*sizes, shape.head_dim, generator=generator)
    if dtype == torch.int8:
        codes = (codes * 40).round().clamp(-127, 127)
        return codes.to(dtype), (scales / 40).half()
    return (codes * 100).clamp(-448, 448).to(dtype), (scales / 100).half()


def _poison(pages: Tensor, scales: Tensor | None, keep: Tensor, poison: float) -> None:
    """Spoil the slots [P, S] that are not kept."""
    target = pages if scales is None else scales
    if not math.isnan(poison) and target.dtype != torch.float32:
        poison = min(poison, torch.finfo(target.dtype).max)
    spoilt = torch.full_like(target, poison)
    target.copy_(torch.where(keep[:, None, None, :, None], target, spoilt))


def plain_case(case: Case, nodes: Sequence[int] | None = None) -> Case:
    """Plain decoding of those nodes: each a sequence of one row whose pool holds its path in order.

    Args:
        nodes: Rows of the case, all by default.
    """
    call, size = case.call, case.shape.page_size
    table = call.page_table.cpu()
    pages = [case.pages]
    scales = [] if case.scales is None else [case.scales]
    tables, lengths, owners, total = [], [], [], len(case.pages)
    wanted = set(range(call.num_rows) if nodes is None else nodes)
    kept = []
    for n, tree in enumerate(case.parents):
        first, stop = call.q_start_host[n : n + 2]
        stored = call.kv_len_host[n] - (stop - first)
        for row in range(len(tree)):
            if first + row not in wanted:
                continue
            path, node = [], row
            while node >= 0:
                path.append(node)
                node = tree[node]
            path.reverse()
            # What shares an entry with the new rows moves to pages of its own.
            whole = stored // size
            sources = [*range(whole * size, stored), *(stored + node for node in path)]
            source = torch.tensor(sources, device=case.pages.device)
            page = call.page_table[n].long()[source // size]
            target = torch.arange(len(sources), device=source.device)
            count = -(-len(sources) // size)
            for origin, out in ((case.pages, pages), (case.scales, scales)):
                if origin is None:
                    continue
                # Bytes, since not every page dtype can be indexed.
                raw = origin.view(torch.uint8)
                fresh = raw[:1].expand(count, *raw.shape[1:]).clone()
                fresh.fill_(0xFF)
                fresh[target // size, :, :, target % size] = raw[page, :, :, source % size]
                out.append(fresh.view(origin.dtype))
            line = table[n].clone()
            line[whole:] = 2**31 - 1
            line[whole : whole + count] = torch.arange(total, total + count, dtype=torch.int32)
            total += count
            tables.append(line)
            lengths.append(stored + len(path))
            owners.append(n)
            kept.append(first + row)
    device = case.pages.device
    owner = torch.tensor(owners, device=device)
    rows = torch.tensor(kept, device=device)
    plain = AttentionCall.of(torch.stack(tables), [1] * len(tables), lengths)
    plain = replace(
        plain,
        page_table=plain.page_table.to(device),
        q_start=plain.q_start.to(device),
        kv_len=plain.kv_len.to(device),
        valid=None if call.valid is None else call.valid[owner].contiguous(),
        q_pos=None if call.q_pos is None else call.q_pos[rows],
        page_pos=None if call.page_pos is None else call.page_pos[owner].contiguous(),
        window=call.window,
    )
    joined = torch.cat([part.view(torch.uint8) for part in pages]).view(case.pages.dtype)
    trees = tuple((-1,) for _ in tables)
    return Case(
        case.shape, plain, case.q[rows], joined, torch.cat(scales) if scales else None, trees
    )


def errors(backend: Attends, case: Case) -> tuple[float, float]:
    """Relative error of out and largest error of LSE, against the reference."""
    rows = case.call.num_rows
    out, lse = backend.attend(case.call, case.q, case.pages, scales=case.scales)
    want, want_lse = attend(case.call, case.q.double(), *_doubled(case))
    out, want = out[:rows].double(), want[:rows]
    return float((out - want).norm() / want.norm()), float((lse - want_lse)[:rows].abs().max())


def _doubled(case: Case) -> tuple[Tensor, Tensor | None]:
    return (case.pages.double() if case.scales is None else case.pages), case.scales


def differing_rows(
    tree: Attends, plain: Attends, case: Case, nodes: Sequence[int] | None = None
) -> int:
    """Nodes whose out or LSE is not bit for bit that of plain decoding of their path, or is NaN."""
    one_by_one = plain_case(case, nodes)
    out, lse = tree.attend(case.call, case.q, case.pages, scales=case.scales)
    rows = torch.tensor(nodes or range(case.call.num_rows), device=out.device)
    want, want_lse = plain.attend(
        one_by_one.call, one_by_one.q, one_by_one.pages, scales=one_by_one.scales
    )
    same = (out[rows] == want).flatten(1).all(1) & (lse[rows] == want_lse).all(1)
    return int((~same).sum())


def problem(backend: Attends, shape: Shape, window: int | None = None) -> str | None:
    """Why the backend must not be used for this shape, or None. Compiles for seconds."""
    rng = random.Random(7)
    # As many rows as a step of the default drafter, and more than one block of them.
    many_rows = MANY_ROWS * shape.num_kv_heads // shape.num_heads + 1
    for rows, histories in ((16, (0, 37, 1000, 4096)), (many_rows, (70, 1000))):
        trees = [random_tree(rows, 16, rng) for _ in histories]
        case = make_case(shape, trees, histories, seed=7, window=window)
        out_error, lse_error = errors(backend, case)
        limit = TOLERANCES[shape.dtype]
        # Written so that NaN fails.
        if not (out_error <= limit and lse_error <= limit):
            return f"wrong by {out_error:.1e} (lse {lse_error:.1e}), more than {limit:.0e}"
        differing = differing_rows(backend, backend, case)
        if differing:
            return f"{differing} of {case.call.num_rows} tree rows differ from plain decoding"
    return None
