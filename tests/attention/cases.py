"""Attention calls over poisoned pools: everything that no row may read is NaN, or huge."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chatkv.attention import reference
from chatkv.attention.backends import Backend
from chatkv.attention.call import AttentionCall
from chatkv.attention.store import quantise

# Rounding of the output's own dtype, and of sums in float32; lse is float32 for every dtype.
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 2e-6},
}
LSE_TOLERANCE = {"rtol": 1e-6, "atol": 2e-6}
HUGE = 3e38


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def star(rows: int) -> list[int]:
    return [-1] + [0] * (rows - 1)


def comb(rows: int) -> list[int]:
    """A spine with one tooth at each of its rows: 0, then (spine, tooth), (spine, tooth), ..."""
    return [-1] + [max(0, row - 2 + row % 2 - 1) if row > 2 else 0 for row in range(1, rows)]


def random_tree(rows: int, seed: int, max_depth: int = 15) -> list[int]:
    """Parents of a tree of so many rows, bushy and deep."""
    rng = random.Random(seed)
    parents, depths = [-1], [0]
    for row in range(1, rows):
        near = [i for i in range(row) if depths[i] < max_depth]
        parent = rng.choice(near[-rng.choice([1, 4, rows]) :])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Case:
    """One attention call with its pool."""

    call: AttentionCall
    q: Tensor
    pages: Tensor
    parents: list[list[int]]
    scales: Tensor | None = None

    def quantised(self, dtype: torch.dtype) -> Case:
        """The same call over codes of the same values; what no row may read has scale NaN."""
        unread = ~torch.isfinite(self.pages.float()) | (self.pages.float().abs() > HUGE / 2)
        codes, scales = quantise(self.pages.float().masked_fill(unread, 0), dtype)
        scales[unread.any(-1)] = torch.nan
        return replace(self, pages=codes, scales=scales)

    def serve(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """out and lse of the live rows."""
        out, lse = backend.attend(self.call, self.q, self.pages, scales=self.scales)
        return out[: self.call.num_rows], lse[: self.call.num_rows]

    def check(self, backend: Backend) -> None:
        """Serve the call and compare with the reference in float64."""
        before, calls = self.pages.clone(), backend.calls
        out, lse = self.serve(backend)
        rows = self.call.num_rows
        pages = self.pages.double() if self.scales is None else self.pages
        expected = reference.attend(self.call, self.q.double(), pages, self.scales)
        assert backend.calls == calls + 1
        assert bits_equal(self.pages, before)
        assert out.dtype == self.q.dtype
        torch.testing.assert_close(
            out.double(), expected[0][:rows], **TOLERANCE[self.q.dtype], msg=lambda m: f"out: {m}"
        )
        torch.testing.assert_close(
            lse.double(), expected[1][:rows], **LSE_TOLERANCE, msg=lambda m: f"lse: {m}"
        )

    def path(self, n: int, row: int) -> list[int]:
        """Rows of sequence n from the root down to `row`."""
        path = [row]
        while self.parents[n][path[0]] >= 0:
            path.insert(0, self.parents[n][path[0]])
        return path

    def plain(self, n: int, row: int, seed: int) -> Case:
        """Plain decoding of one row: its path stored in order in another pool, and one new row."""
        call, size = self.call, self.pages.shape[3]
        first = call.q_start_host[n]
        stored = call.kv_len_host[n] - len(self.parents[n])
        path = self.path(n, row)
        slots = torch.tensor([*range(stored), *(stored + i for i in path)])
        entries = -(-len(slots) // size)
        ids = random.Random(seed).sample(range(entries + 3), entries)
        new = torch.arange(len(slots))

        def moved(pages: Tensor) -> Tensor:
            unread = torch.nan if pages.is_floating_point() else 99
            copy = torch.full((entries + 3, *pages.shape[1:]), unread, dtype=pages.dtype)
            copy[torch.tensor(ids)[new // size], :, :, new % size] = pages[
                call.page_table[n][slots // size].long(), :, :, slots % size
            ]
            return copy

        plain = AttentionCall.of(torch.tensor([ids], dtype=torch.int32), [1], [len(slots)])
        if call.valid is not None:
            valid = call.valid[n : n + 1, :entries].clone()
            valid[0, stored // size :, 1] = size
            valid[0, stored // size + 1 :, 0] = 0
            plain = replace(plain, valid=valid)
        if call.window is not None and call.q_pos is not None and call.page_pos is not None:
            plain = replace(
                plain,
                window=call.window,
                page_pos=call.page_pos[n : n + 1, :entries].contiguous(),
                q_pos=call.q_pos[first + row : first + row + 1].contiguous(),
            )
        q = self.q[first + row : first + row + 1]
        scales = None if self.scales is None else moved(self.scales)
        return Case(replace(plain, scale=call.scale), q, moved(self.pages), [[-1]], scales)

    def differing_nodes(self, backend: Backend, alone: Backend | None = None) -> int:
        """Nodes whose out or lse is not, bit for bit, that of plain decoding of their path."""
        out, lse = self.serve(backend)
        assert torch.isfinite(lse).all()
        assert torch.isfinite(out).all()
        differing = 0
        for n, tree in enumerate(self.parents):
            for row in range(len(tree)):
                plain_out, plain_lse = self.plain(n, row, seed=row).serve(alone or backend)
                at = self.call.q_start_host[n] + row
                same = bits_equal(out[at : at + 1], plain_out)
                differing += not (same and bits_equal(lse[at : at + 1], plain_lse))
        return differing


def make_case(
    parents: list[list[int]],
    stored: list[int],
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    poison: float = torch.nan,
    holes: bool = False,
    window: int | None = None,
    seed: int = 0,
    spread: float = 1.0,
) -> Case:
    """Sequences with these trees of new rows behind so many stored slots.

    Page ids are scattered, unused table entries name no page, q has two rows of padding. With
    `holes` entries lose slots at either end, some lose all, and new rows' slots are marked as lost,
    which must not matter. With `window` positions start below 0 and fall 5 behind the slots after
    the first entry.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    rows = [len(tree) for tree in parents]
    lengths = [s + r for s, r in zip(stored, rows, strict=True)]
    counts = [-(-length // page_size) for length in lengths]
    entries, total = max(counts) + 2, sum(rows)
    ids = list(range(sum(counts) + 3))
    rng.shuffle(ids)
    pages = torch.full((len(ids), 2, num_kv_heads, page_size, head_dim), poison).to(dtype)
    table = torch.full((len(rows), entries), 10**6, dtype=torch.int32)
    valid = torch.zeros(len(rows), entries, 2, dtype=torch.int32)
    place = torch.arange(entries, dtype=torch.int32) * page_size - 3
    place[1:] -= 5
    q_pos: list[int] = []
    for n, length in enumerate(lengths):
        tail, offset = divmod(stored[n], page_size)
        for entry in range(counts[n]):
            lo, hi = 0, page_size
            if holes:
                lo, hi = rng.choice([(0, page_size), (3, page_size), (0, 5), (4, 9), (7, 7)])
            if holes and entry >= tail:
                lo, hi = (min(lo, offset), offset) if entry == tail else (7, 7)
            page = table[n, entry] = ids.pop()
            valid[n, entry, 0], valid[n, entry, 1] = lo, hi
            at = torch.arange(page_size)
            slot = at + entry * page_size
            kept = (slot < length) & ((slot >= stored[n]) | ((at >= lo) & (at < hi)))
            values = torch.randn(2, num_kv_heads, page_size, head_dim, generator=generator)
            pages[page][:, :, kept] = (values * spread)[:, :, kept].to(dtype)
        depths: list[int] = []
        for parent in parents[n]:
            depths.append(0 if parent < 0 else depths[parent] + 1)
            slot = stored[n] + depths[-1]
            q_pos.append(int(place[slot // page_size]) + slot % page_size)
    q = torch.full((total + 2, num_heads, head_dim), poison).to(dtype)
    q[:total] = (torch.randn(total, num_heads, head_dim, generator=generator) * spread).to(dtype)
    words = torch.zeros(total, -(-max(rows) // 64), dtype=torch.int64)
    for n, tree in enumerate(parents):
        own, at = reference.ancestor_words(tree), sum(rows[:n])
        words[at : at + len(tree), : own.shape[1]] = own[: len(tree)]
    is_chain = all(tree == chain(len(tree)) for tree in parents)
    call = AttentionCall.of(table, rows, lengths, ancestors=None if is_chain else words)
    if holes:
        call = replace(call, valid=valid)
    if window is not None:
        positions = torch.tensor(q_pos, dtype=torch.int32)
        places = place.expand(len(rows), -1).contiguous()
        call = replace(call, window=window, q_pos=positions, page_pos=places)
    return Case(call, q, pages, parents)
