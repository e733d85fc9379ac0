"""The attention operation in plain torch: what every backend must compute. Slow on purpose.

Knows one row at a time. Prefill, decode and tree verification are this one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from chatkv.attention.call import INT4_GROUP, AttentionCall


class ReferenceBackend:
    """`paged_attention` behind the backend interface; for tests and for `--backend reference`."""

    name = "reference"
    # A row is computed from what it sees and nothing else, so neighbours cannot change it.
    mode: Literal["exact", "guarded"] = "exact"
    numerics = "reference-1"
    max_depth = 16

    def __init__(self) -> None:
        self.calls = 0
        """How many calls this backend has served."""

    def attend(
        self, call: AttentionCall, q: Tensor, pages: Tensor, *, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Serve one call. Shapes as in `paged_attention`."""
        call.check(q, pages, scales)
        self.calls += 1
        return attend(call, q, pages, scales)


def paged_attention(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    kv_len: Tensor,
    *,
    ancestors: Tensor | None = None,
    valid: Tensor | None = None,
    q_pos: Tensor | None = None,
    page_pos: Tensor | None = None,
    window: int | None = None,
    scales: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the new rows of N sequences to their own pages.

    A row sees the stored slots of its sequence that exist, and the new rows that its ancestor bits
    name.

    Args:
        q: [T, HQ, D] float, rotated already. Rows of one sequence are adjacent, parents before
            children. Rows from q_start[N] on are padding: not computed, their outputs undefined.
        pages: [P, 2, HK, S, D], keys (rotated) in [:, 0], values in [:, 1]. Dtype of q, int8 or
            float8_e4m3fn; or uint8 with D / 2 columns for int4 (low nibble channel d, high nibble
            channel d + D / 2, code - 8).
        page_table, q_start, kv_len: As in `AttentionCall`, and with them
        ancestors, valid, q_pos, page_pos, window, scale.
        scales: [P, 2, HK, S, C] float16 for quantised pages: value = code * scale. C is 1 for int8
            and fp8, D / 32 for int4 (32 neighbouring channels share one).

    Returns:
        out: [T, HQ, D], dtype of q.
        lse: [T, HQ] float32 (float64 for a float64 q), natural log of the sum of
            exp(score * scale) over the keys seen. Always finite.

    Slots at or past kv_len or outside `valid` are never used: NaN there reaches no row. Nothing is
    modified.

    Raises:
        ValueError: A shape or dtype breaks the contract.
    """
    call = AttentionCall(
        page_table=page_table,
        q_start=q_start,
        kv_len=kv_len,
        ancestors=ancestors,
        valid=valid,
        q_pos=q_pos,
        page_pos=page_pos,
        window=window,
        scale=scale,
        q_start_host=tuple(q_start.tolist()),
        kv_len_host=tuple(kv_len.tolist()),
    )
    call.check(q, pages, scales)
    return attend(call, q, pages, scales)


def attend(
    call: AttentionCall, q: Tensor, pages: Tensor, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`paged_attention` of a call that was checked."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_size, group = pages.shape[3], q.shape[1] // pages.shape[2]
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=dtype)
    for n in range(call.num_sequences):
        first, stop = call.q_start_host[n : n + 2]
        for row in range(first, stop):
            slots = visible_slots(call, n, row - first, page_size)
            page, offset = call.page_table[n][slots // page_size].long(), slots % page_size
            stored = pages[page, :, :, offset]
            shared = None if scales is None else scales[page, :, :, offset]
            keys, values = dequantise(stored, shared, dtype).repeat_interleave(group, 2).unbind(1)
            scores = torch.einsum("hd,lhd->hl", q[row].to(dtype), keys)
            scores = scores * call.score_scale(q.shape[-1])
            lse[row] = scores.logsumexp(-1)
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values).to(q.dtype)
    return out, lse


def visible_slots(call: AttentionCall, n: int, row: int, page_size: int) -> Tensor:
    """Slots that row `row` of sequence n sees, ascending, [L] int64 on the call's device."""
    first, stop = call.q_start_host[n : n + 2]
    stored = call.kv_len_host[n] - (stop - first)
    slot = torch.arange(stored, device=call.page_table.device)
    entry, offset = slot // page_size, slot % page_size
    seen = torch.ones_like(slot, dtype=torch.bool)
    if call.valid is not None:
        lo, hi = call.valid[n].unbind(-1)
        seen &= (lo[entry] <= offset) & (offset < hi[entry])
    new = torch.arange(stop - first, device=slot.device)
    if call.ancestors is None:
        is_ancestor = new <= row
    else:
        words = call.ancestors[first + row]
        is_ancestor = (words[new // 64] >> (new % 64)) & 1 == 1
    if call.window is not None and call.q_pos is not None and call.page_pos is not None:
        oldest = call.q_pos[first + row] - call.window + 1
        seen &= call.page_pos[n][entry] + offset >= oldest
        is_ancestor &= call.q_pos[first:stop] >= oldest
    return torch.cat([slot[seen], stored + new[is_ancestor]])


def dequantise(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of stored rows: code * scale.

    Args:
        codes: [..., D] in a page dtype ([..., D / 2] uint8 for int4).
        scales: [..., C], or None for float pages.
        dtype: Of the result, [..., D].
    """
    if scales is None:
        return codes.to(dtype)
    if codes.dtype != torch.uint8:
        return codes.to(dtype) * scales.to(dtype)
    values = torch.cat([codes & 15, codes >> 4], dim=-1).to(dtype) - 8
    return values * scales.to(dtype).repeat_interleave(INT4_GROUP, dim=-1)


def ancestor_words(parents: Sequence[int]) -> Tensor:
    """Ancestor words [R, W] int64 of a tree, W = 1 up to 64 rows.

    Args:
        parents: Parent row of each row, -1 for a root; parents come before children.
    """
    words = torch.zeros(len(parents), max(1, -(-len(parents) // 64)), dtype=torch.int64)
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"Row {row} has parent {parent}, which does not come before it.")
        if parent >= 0:
            words[row] = words[parent]
        # Bit 63 is the sign of an int64.
        words[row, row // 64] |= 1 << (row % 64) if row % 64 < 63 else -(1 << 63)
    return words


def causal_ancestors(rows: int) -> Tensor:
    """Ancestor words of a chain of `rows` rows: the same as no words at all."""
    return ancestor_words(range(-1, rows - 1))
