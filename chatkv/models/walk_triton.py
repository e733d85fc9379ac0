"""The walk down the trees on the device, behind the picks: which rows stay, and where they go.

Knows rows, picks and slots of a step; no sampler and no sequence. The host makes the same walk when
the picks are there (`spec.verify`): this one only spares it the way back.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.models.launch_options import pdl_options
from chatkv.models.tree_rows import Carried
from chatkv.sampling_triton import PickRoom

LONGEST_PATH = 16
"""Rows of a path at most, root included."""


@dataclass(frozen=True, slots=True)
class WalkRoom:
    """What the walk reads besides the picks, and what it leaves."""

    tokens: Tensor
    """[T] int32 of the rows; positions likewise."""
    positions: Tensor
    ancestors: Tensor
    """[T, 1] int64."""
    slots: Tensor
    """[T] int64."""
    q_start: Tensor
    """[N + 1] int32."""
    split: Tensor
    """[1] int32: from this row of a sequence on rows are of a second tree below the same root."""
    walks: Tensor
    """[N] int32: 0 for a sequence whose picks are made elsewhere."""
    path: Tensor
    """[N, 16] int32, rows of the path, counted from the sequence's first."""
    counts: Tensor
    """[N] int32, rows of each path; 0 where nobody walked."""

    @classmethod
    def of(cls, inputs: dict[str, Tensor], walks: Tensor) -> WalkRoom:
        """Around a step's own inputs."""
        ints: dict[str, Any] = {"dtype": torch.int32, "device": walks.device}
        names = ("tokens", "positions", "ancestors", "slots", "q_start", "split")
        return cls(
            **{name: inputs[name] for name in names},
            walks=walks,
            path=torch.zeros(len(walks), LONGEST_PATH, **ints),
            counts=torch.zeros(len(walks), **ints),
        )


def walk_rows(
    picks: PickRoom, room: WalkRoom, tapped: Tensor, carried: Carried | None, *, pdl: bool = False
) -> None:
    """Follow the picks from each sequence's first row; down two trees, and the longer path counts.

    Args:
        tapped: [taps, T, H] residuals of the rows.
        carried: Filled from the last row of the path; for one sequence only.
    """
    count, other = room.counts, picks.floats  # pointers that are not used must lead somewhere
    left = (other, count, count, room.slots, other)
    if carried is not None:
        left = (carried.taps, carried.root, carried.position, carried.seed, carried.inverse_t)
    _walk[(len(room.counts),)](
        picks.out, picks.integers, picks.floats, room.tokens, room.positions, room.ancestors,
        room.q_start, room.split, room.walks, room.path, room.counts,
        tapped if carried else other, *left, tapped.shape[1], tapped.shape[2],
        LONGEST=LONGEST_PATH, TAPS=len(tapped) if carried else 0,
        WIDE=triton.next_power_of_2(tapped.shape[2]), PDL=pdl, num_warps=1,
        **pdl_options(pdl),
    )  # fmt: skip


@triton.jit
def _descend(
    picks, words, path, row, token, word, bit, own,
    LONGEST: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """(last row, rows) of the path down the rows `own`, from row 0."""
    at = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    going = count == 0
    while going:
        if KEEP:
            tl.store(path + count, at)
        count += 1
        pick = tl.load(picks + at)
        # A row's bits are those of its parent and its own.
        below = own & (row > 0) & (token == pick) & (word == (tl.load(words + at) | bit))
        child = tl.max(tl.where(below, row, 0), 0)
        going = (child > at) & (count < LONGEST)
        at = tl.where(going, child, at)
    return at, count


@triton.jit
def _walk(
    picks, integers, floats, tokens, positions, words, q_start, split, walks, path, counts, tapped,
    taps, root, position, seed, inverse_t, rows, width,
    LONGEST: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    start = tl.load(q_start + n)
    stop = tl.load(q_start + n + 1)
    if (stop <= start) | (tl.load(walks + n) == 0):
        tl.store(counts + n, 0)
        return
    row = tl.arange(0, 64)
    own = row < stop - start
    token = tl.load(tokens + start + row, mask=own, other=-1)
    word = tl.load(words + start + row, mask=own, other=0)
    bit = tl.full([64], 1, tl.int64) << row.to(tl.int64)
    cut = tl.load(split)
    picked, above, line = picks + start, words + start, path + n * LONGEST
    first = own & (row < cut)
    at, count = _descend(picked, above, line, row, token, word, bit, first, LONGEST, True)
    if cut < stop - start:
        second = own & (row >= cut)
        last, length = _descend(picked, above, line, row, token, word, bit, second, LONGEST, False)
        if length > count:
            at, count = _descend(picked, above, line, row, token, word, bit, second, LONGEST, True)
    tl.store(counts + n, count)
    if TAPS:  # of a single sequence
        last = start + at
        heat = tl.load(floats + last * 3 + 1).to(tl.float32)
        tl.store(root, tl.load(picks + last))
        tl.store(position, tl.load(positions + last) + 2)
        tl.store(seed, tl.where(heat > 0, tl.load(integers + last * 2), -1))
        tl.store(inverse_t, tl.where(heat > 0, heat, 1.0))
        k = tl.arange(0, WIDE)
        for tap in tl.static_range(TAPS):
            line = tl.load(tapped + (tap * rows + last) * width + k, mask=k < width, other=0.0)
            tl.store(taps + tap * width + k, line, mask=k < width)


def move_rows(pages: Tensor, scales: Tensor | None, room: WalkRoom, *, pdl: bool = False) -> None:
    """Move the rows of each path to the first slots of its sequence, in order, bit for bit.

    Args:
        pages: [L, P, 2, HK, S, D], contiguous, modified.
        scales: [L, P, 2, HK, S, C] or None, contiguous, modified.
    """
    for tensor in (pages, scales):
        if tensor is None:
            continue
        layers, count, kinds, num_heads, size, width = tensor.shape
        width *= tensor.element_size()
        unit = next(u for u in (torch.int32, torch.int16, torch.uint8) if width % u.itemsize == 0)
        columns = width // unit.itemsize
        _move[(layers, kinds * num_heads, len(room.counts))](
            tensor.view(unit), room.slots, room.q_start, room.path, room.counts,
            count * kinds * num_heads * size * columns, kinds * num_heads * size * columns,
            size * columns, LONGEST=LONGEST_PATH, PAGE=size, COLUMNS=columns,
            COLUMNS_PAD=triton.next_power_of_2(columns), PDL=pdl, num_warps=4, **pdl_options(pdl),
        )  # fmt: skip


@triton.jit
def _move(
    pages, slots, q_start, path, counts, stride_layer, stride_page, stride_head,
    LONGEST: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(2)
    count = tl.load(counts + n)
    place = tl.arange(0, LONGEST)
    row = tl.load(path + n * LONGEST + place, mask=place < count, other=0)
    moved = (place < count) & (row != place)
    if tl.max(moved.to(tl.int32), 0) > 0:
        base = pages + tl.program_id(0).to(tl.int64) * stride_layer
        base += tl.program_id(1) * stride_head
        start = tl.load(q_start + n)
        source = tl.load(slots + start + row, mask=moved, other=0)
        target = tl.load(slots + start + place, mask=moved, other=0)
        source = source // PAGE * stride_page + source % PAGE * COLUMNS
        target = target // PAGE * stride_page + target % PAGE * COLUMNS
        column = tl.arange(0, COLUMNS_PAD)
        inside = moved[:, None] & (column < COLUMNS)[None, :]
        values = tl.load(base + source[:, None] + column[None, :], mask=inside)
        # All rows are read before one is written.
        tl.debug_barrier()
        tl.store(base + target[:, None] + column[None, :], values, mask=inside)


def shift_rows(inputs: dict[str, Tensor], counts: Tensor) -> None:
    """Slots and length of a step whose rows go behind those that a walk keeps.

    Args:
        inputs: `reach` [T + 16] int64 slots in order, and `kv_len` [1] int32, both as if none were
            kept; `slots` [T] int64 is filled, `kv_len` is set.
        counts: [1] int32, the rows that are kept.
    """
    slots = inputs["slots"]
    _shift[(1,)](
        inputs["reach"], slots, inputs["kv_len"], counts, len(slots),
        ROWS=triton.next_power_of_2(len(slots)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _shift(reach, slots, kv_len, counts, rows, ROWS: tl.constexpr):
    kept = tl.load(counts)
    row = tl.arange(0, ROWS)
    tl.store(slots + row, tl.load(reach + kept + row, mask=row < rows), mask=row < rows)
    tl.store(kv_len, tl.load(kv_len) + kept)
