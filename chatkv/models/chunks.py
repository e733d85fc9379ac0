"""Prompt chunks: where their edges lie, and the attention of their rows over pages.

A chunk is C rows of one sequence behind `start` stored slots. Its shape and the place of a row in
it depend on the logical position alone, and so do the launches made for it: a row has the same bits
whenever the chunk is computed again, whatever stands in the rows that are padding. Lengths are read
on the device, so that one captured graph serves every `start`.
"""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatkv.attention.triton_store import CODES
from chatkv.attention.triton_tiles import load_tile
from chatkv.models.launch_options import EXACT, pdl_options

NUMERICS = "chunks-2"
"""Names the bits: of the rules below, of the kernel, and of the products of `Layers.chunk`."""
ROWS_A_PROGRAM = 64
KEYS_A_TURN = 64
EMPTY_MAX = tl.constexpr(-1e30)
"""Maximum of no keys: finite, so that a row of padding is no NaN."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Rows of the chunks of a run of given ids: `first`, then as many as before it, up to `last`.

    A short prompt pays for a short chunk: a chunk is always run whole.
    """

    first: int
    last: int

    @classmethod
    def of(cls, hidden_size: int) -> Chunking:
        """The rule of a model: where rows cost little, few chunks count more than little padding.

        `NUMERICS` names this rule.
        """
        return cls(512, 4096) if hidden_size <= 1024 else cls(256, 2048)

    def chunk_of(self, offset: int) -> tuple[int, int]:
        """(first, rows) of the chunk that holds the id `offset` ids into its run."""
        if offset < self.first:
            return 0, self.first
        rows = min(self.last, 1 << (offset.bit_length() - 1))
        return offset // rows * rows, rows


def attend_chunk(
    q: Tensor, pages: Tensor, table: Tensor, span: Tensor, out: Tensor,
    scales: Tensor | None = None, *, holes: tuple[Tensor, Tensor] | None = None, window: int = 0,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Attention of the rows of one chunk: each sees all slots up to its own that exist.

    Args:
        q: [C, HQ, D], the rows of slots start to start + C.
        pages: [P, 2, HK, S, D] of one layer ([..., D / 2] for int4), contiguous, the new rows
            stored.
        table: [M] int32 page ids of the sequence.
        span: [3] int32 on the device: start, the first new slot, the end of the new slots. Other
            rows are padding; slots behind the end are not read. With holes [4]: position less slot
            of the new rows.
        out: [C, HQ, D], filled but for blocks of nothing but padding. May be q.
        scales: [P, 2, HK, S, C] of quantised pages, contiguous; else None.
        holes: `valid` [M, 2] and `page_pos` [M] int32, as an attention call has them of one
            sequence; None where every slot exists and is its position.
        window: A row sees keys whose position is above its own less this; 0 for all.
    """
    rows, heads, dim = q.shape
    kv_heads, page = pages.shape[2:4]
    kernel, stored, codes = _attend, (pages,), {}
    if scales is not None:
        kernel, stored = _attend_codes, (pages, scales)
        codes = {
            "COLUMNS": pages.shape[4],
            "PER_SLOT": scales.shape[4],
            "CODE": CODES[pages.dtype],
            "HALF": pages.dtype == torch.uint8 and q.dtype == torch.bfloat16,
        }
    kernel[(heads, triton.cdiv(rows, ROWS_A_PROGRAM))](
        q,
        *stored,
        table,
        span,
        *(holes or (span, span)),
        out,
        rows,
        dim**-0.5 * math.log2(math.e),
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        PAGE=page,
        BLOCK_M=ROWS_A_PROGRAM,
        BLOCK_N=min(KEYS_A_TURN, page),
        PDL=pdl,
        HOLES=holes is not None,
        WINDOW=window,
        **codes,
        num_warps=4 if dim <= 128 else 8,
        num_stages=3 if dim <= 128 else 2,
        **EXACT,
        **pdl_options(pdl),
    )


def attend_chunk_plain(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """The same from keys and values [HK, start + C, D]."""
    group = q.shape[1] // len(keys)
    rows = torch.arange(len(q), device=q.device)[:, None] + start
    seen = torch.arange(keys.shape[1], device=q.device)[None, :] <= rows
    scores = torch.einsum("thd,hld->htl", q.float(), keys.float().repeat_interleave(group, 0))
    weights = (scores * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("htl,hld->thd", weights, values.float().repeat_interleave(group, 0))
    return out.to(q.dtype)


@triton.jit
def _fold(scores, values, row_max, row_sum, acc, factor):
    """An online softmax with the keys of one more turn."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    minus_max = -(new_max * factor)
    # Not fused with the product above: exactly 1 where the maximum stays, so that a turn in which a
    # row sees nothing changes nothing.
    weight = tl.exp2((row_max - new_max) * factor)
    p = tl.exp2(tl.fma(scores, factor, minus_max[:, None]))
    row_sum = tl.fma(row_sum, weight, tl.sum(p, 1))
    acc = tl.dot(p.to(values.dtype), values, acc * weight[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _exists(slot, lane, valid, PAGE: tl.constexpr):
    """[BLOCK_N] which slots of a turn exist."""
    lo = tl.load(valid + slot // PAGE * 2)
    hi = tl.load(valid + slot // PAGE * 2 + 1)
    return (slot % PAGE + lane >= lo) & (slot % PAGE + lane < hi)


@triton.jit
def _near_new(slot, lane, span, WINDOW: tl.constexpr):
    """[BLOCK_N] which slots of a turn some new row may see, where slots are positions. Others may
    be of pages that were let go of."""
    return slot + lane > tl.load(span + 1) - WINDOW


@triton.jit
def _in_window(slot, lane, row_slots, span, page_pos, PAGE: tl.constexpr, HOLES: tl.constexpr,
               WINDOW: tl.constexpr):  # fmt: skip
    """[BLOCK_M, BLOCK_N] which keys of a turn are near enough to a row."""
    key = slot + lane
    row = row_slots
    if HOLES:
        key = tl.load(page_pos + slot // PAGE) + slot % PAGE + lane
        row += tl.load(span + 3)
    return key[None, :] > row[:, None] - WINDOW


@triton.jit(do_not_specialize=["rows"])
def _attend(
    q, pages, table, span, valid, page_pos, out, rows, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    HOLES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A program takes a block of rows of one query head, the longest first.

    Turns of BLOCK_N slots lie at fixed places and follow one another. Where a turn is masked for a
    row it changes nothing, so a row's bits depend on its slot and what it sees.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.load(span)
    stop = tl.load(span + 2)
    begin = start + block * BLOCK_M
    if (begin >= stop) | (begin + BLOCK_M <= tl.load(span + 1)):
        return
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, BLOCK_N)
    is_data = (m < rows)[:, None] & (d < DIM)[None, :]
    at = (m.to(tl.int64)[:, None] * HEADS + head) * DIM + d[None, :]
    queries = tl.load(q + at, mask=is_data, other=0.0)
    KINDS: tl.constexpr = HEADS // GROUP * PAGE * DIM
    pages += head // GROUP * (PAGE * DIM)
    inner = lane[:, None] * DIM + d[None, :]

    row_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    whole = begin // BLOCK_N * BLOCK_N
    first = 0
    if WINDOW > 0 and not HOLES:
        first = tl.maximum(begin - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for slot in tl.range(first, whole, BLOCK_N):
        page = tl.load(table + slot // PAGE).to(tl.int64)
        tile = pages + page * (2 * KINDS) + slot % PAGE * DIM + inner
        if HOLES:
            exists = _exists(slot, lane, valid, PAGE)
            keys = tl.load(tile, mask=exists[:, None] & (d < DIM)[None, :], other=0.0)
            values = tl.load(tile + KINDS, mask=exists[:, None] & (d < DIM)[None, :], other=0.0)
        elif WINDOW > 0:
            kept = _near_new(slot, lane, span, WINDOW)[:, None] & (d < DIM)[None, :]
            keys = tl.load(tile, mask=kept, other=0.0)
            values = tl.load(tile + KINDS, mask=kept, other=0.0)
        elif DIM == DIM_PAD:
            keys = tl.load(tile)
            values = tl.load(tile + KINDS)
        else:
            keys = tl.load(tile, mask=(d < DIM)[None, :], other=0.0)
            values = tl.load(tile + KINDS, mask=(d < DIM)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if HOLES:
            scores = tl.where(exists[None, :], scores, float("-inf"))
        if WINDOW > 0:
            near = _in_window(slot, lane, start + m, span, page_pos, PAGE, HOLES, WINDOW)
            scores = tl.where(near, scores, float("-inf"))
        row_max, row_sum, acc = _fold(scores, values, row_max, row_sum, acc, factor)
    for slot in tl.range(whole, tl.minimum(begin + BLOCK_M, stop), BLOCK_N):
        page = tl.load(table + slot // PAGE).to(tl.int64)
        tile = pages + page * (2 * KINDS) + slot % PAGE * DIM + inner
        # What nobody wrote may be NaN, also where no row looks.
        stored = slot + lane < stop
        if WINDOW > 0:
            if HOLES:
                stored = stored & _exists(slot, lane, valid, PAGE)
            else:
                stored = stored & _near_new(slot, lane, span, WINDOW)
        is_stored = stored[:, None] & (d < DIM)[None, :]
        keys = tl.load(tile, mask=is_stored, other=0.0)
        values = tl.load(tile + KINDS, mask=is_stored, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = tl.where((slot + lane)[None, :] <= (start + m)[:, None], scores, float("-inf"))
        if WINDOW > 0:
            near = _in_window(slot, lane, start + m, span, page_pos, PAGE, HOLES, WINDOW)
            scores = tl.where(near, scores, float("-inf"))
        row_max, row_sum, acc = _fold(scores, values, row_max, row_sum, acc, factor)
    if WINDOW > 0:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # padding may see nothing
    result = acc / row_sum[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_data)


@triton.jit(do_not_specialize=["rows"])
def _attend_codes(
    q, pages, scales, table, span, valid, page_pos, out, rows, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    HOLES: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr, PER_SLOT: tl.constexpr,
    CODE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`_attend` over quantised pages: one loop, in which every turn is masked."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.load(span)
    stop = tl.load(span + 2)
    begin = start + block * BLOCK_M
    if (begin >= stop) | (begin + BLOCK_M <= tl.load(span + 1)):
        return
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, BLOCK_N)
    is_data = (m < rows)[:, None] & (d < DIM)[None, :]
    at = (m.to(tl.int64)[:, None] * HEADS + head) * DIM + d[None, :]
    queries = tl.load(q + at, mask=is_data, other=0.0)
    # int4 comes with its scales in it: float16 rounds that less.
    dtype: tl.constexpr = tl.float16 if HALF else q.dtype.element_ty
    queries = queries.to(dtype)
    SLOTS: tl.constexpr = HEADS // GROUP * PAGE
    row_max = tl.full([BLOCK_M], EMPTY_MAX, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    first = 0
    if WINDOW > 0 and not HOLES:
        first = tl.maximum(begin - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for slot in tl.range(first, tl.minimum(begin + BLOCK_M, stop), BLOCK_N):
        page = tl.load(table + slot // PAGE).to(tl.int64)
        line = page * (2 * SLOTS) + head // GROUP * PAGE + slot % PAGE
        seen = slot + lane < stop
        if HOLES:
            seen = seen & _exists(slot, lane, valid, PAGE)
        elif WINDOW > 0:
            seen = seen & _near_new(slot, lane, span, WINDOW)
        keys, k_factor = load_tile(
            pages + line * COLUMNS, scales + line * PER_SLOT, lane * COLUMNS, lane * PER_SLOT,
            seen, DIM, DIM_PAD, CODE, dtype,
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * k_factor[None, :]
        scores = tl.where((slot + lane)[None, :] <= (start + m)[:, None], scores, float("-inf"))
        if HOLES:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        if WINDOW > 0:
            near = _in_window(slot, lane, start + m, span, page_pos, PAGE, HOLES, WINDOW)
            scores = tl.where(near, scores, float("-inf"))
        line += SLOTS
        values, v_factor = load_tile(
            pages + line * COLUMNS, scales + line * PER_SLOT, lane * COLUMNS, lane * PER_SLOT,
            seen, DIM, DIM_PAD, CODE, dtype,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        minus_max = -(new_max * factor)
        weight = tl.exp2((row_max - new_max) * factor)
        p = tl.exp2(tl.fma(scores, factor, minus_max[:, None]))
        row_sum = tl.fma(row_sum, weight, tl.sum(p, 1))
        p = (p * v_factor[None, :]).to(dtype)
        acc = tl.dot(p, values, acc * weight[:, None], input_precision="ieee")
        row_max = new_max
    if WINDOW > 0:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    result = acc / row_sum[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_data)
