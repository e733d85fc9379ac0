"""One attention call: who attends to what. Knows shapes and promises; computes nothing.

The operation itself is defined by `chatkv.attention.reference.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT4_GROUP = 32


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """N sequences with T new rows in all, each row seeing slots of its own sequence.

    Letters: M table entries a sequence, S slots a page, W ancestor words, R rows of one sequence.

    Raises:
        ValueError: A shape or dtype breaks the contract. Page ids, and lengths on a device, are the
            caller's promise.
    """

    page_table: Tensor
    """[N, M] int32. Entry m holds slots m * S to (m + 1) * S. Entries from ceil(kv_len / S) on may
    hold anything."""
    q_start: Tensor
    """[N + 1] int32, from 0, not falling. Sequence n owns rows q_start[n]:q_start[n + 1]."""
    kv_len: Tensor
    """[N] int32, in slots, holes included. Counts the new rows: row i is in slot kv_len - R + i."""
    ancestors: Tensor | None = None
    """[T, W] int64, or None for a causal chain. Bit j % 64 of word j // 64 is set when the row sees
    row j of its sequence. Its own bit is set, and its other bits are those of its parent; parents
    come before children."""
    valid: Tensor | None = None
    """[N, M, 2] int32 (lo, hi), or None when no slot is missing. Entry m keeps offsets
    lo <= o < hi; new rows count as kept whatever it says."""
    q_pos: Tensor | None = None
    """[T] int32, position of each row and of its key. Needed with `window`."""
    page_pos: Tensor | None = None
    """[N, M] int32, position of offset 0 of each entry, maybe negative. Needed with `window`."""
    window: int | None = None
    """In tokens: a row sees keys whose position is above its own minus `window`."""
    scale: float | None = None
    """Factor on the scores. None is D ** -0.5."""
    q_start_host: tuple[int, ...] = ()
    """The numbers of q_start. May be left out when q_start is on the CPU."""
    kv_len_host: tuple[int, ...] = ()
    """The numbers of kv_len. May be left out when kv_len is on the CPU."""

    def __post_init__(self) -> None:
        # Made at every step: what goes wrong is spelled out only when it does.
        for name in ("q_start", "kv_len"):
            if not getattr(self, f"{name}_host"):
                tensor: Tensor = getattr(self, name)
                _expect(tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions, not 1")
                _expect(
                    tensor.device.type == "cpu", f"{name}_host is needed: {name} is on a device"
                )
                object.__setattr__(self, f"{name}_host", tuple(tensor.tolist()))
        starts, lengths = self.q_start_host, self.kv_len_host
        num_sequences, num_rows = len(lengths), starts[-1] if starts else -1
        if len(starts) != num_sequences + 1 or starts[0] != 0:
            _expect(False, f"q_start {starts} does not fit {num_sequences} sequences")
        for (first, stop), length in zip(pairwise(starts), lengths, strict=True):
            if not 0 <= stop - first <= length:
                _expect(first <= stop, f"q_start {starts} falls")
                _expect(False, f"kv_len {length} is below its {stop - first} new rows")
        entries = self.page_table.shape[1] if self.page_table.dim() == 2 else -1
        self._expect_shape("page_table", (num_sequences, entries), torch.int32)
        self._expect_shape("q_start", (num_sequences + 1,), torch.int32)
        self._expect_shape("kv_len", (num_sequences,), torch.int32)
        self._expect_shape("valid", (num_sequences, entries, 2), torch.int32)
        self._expect_shape("page_pos", (num_sequences, entries), torch.int32)
        if self.ancestors is not None:
            longest = max((b - a for a, b in pairwise(starts)), default=0)
            rows, words = self.ancestors.shape if self.ancestors.dim() == 2 else (-1, -1)
            if rows < num_rows or words * 64 < longest:
                shape = tuple(self.ancestors.shape)
                _expect(
                    False,
                    f"ancestors {shape} does not fit {num_rows} rows, {longest} in one sequence",
                )
            self._expect_shape("ancestors", (rows, words), torch.int64)
        if self.window is not None:
            _expect(self.window >= 1, f"window is {self.window}")
            _expect(
                self.q_pos is not None and self.page_pos is not None, "a window needs positions"
            )
        if self.q_pos is not None:
            _expect(
                self.q_pos.dim() == 1 and self.q_pos.shape[0] >= num_rows,
                f"q_pos {tuple(self.q_pos.shape)} does not fit {num_rows} rows",
            )
            self._expect_shape("q_pos", (self.q_pos.shape[0],), torch.int32)

    @classmethod
    def of(
        cls,
        page_table: Tensor,
        rows: Sequence[int],
        kv_len: Sequence[int],
        *,
        ancestors: Tensor | None = None,
        valid: Tensor | None = None,
        page_pos: Tensor | None = None,
    ) -> AttentionCall:
        """A call on the CPU from plain numbers: new rows and slots of each sequence."""
        starts, q_start = _starts(tuple(rows))
        return cls(
            page_table=page_table,
            q_start=q_start,
            kv_len=torch.from_numpy(np.array(kv_len, np.int32)),
            ancestors=ancestors,
            valid=valid,
            page_pos=page_pos,
            q_start_host=starts,
            kv_len_host=tuple(kv_len),
        )

    def with_positions(self, positions: np.ndarray, page_size: int) -> AttentionCall:
        """The same call on the CPU with what a window looks at.

        Args:
            positions: [T] of the rows.
            page_size: S. Where the call does not say where its entries stand, slots are positions.
        """
        page_pos = self.page_pos
        if page_pos is None:
            sequences, entries = self.page_table.shape
            page_pos = page_size * torch.arange(entries, dtype=torch.int32).expand(sequences, -1)
        q_pos = torch.from_numpy(np.asarray(positions).astype(np.int32))
        return replace(self, q_pos=q_pos, page_pos=page_pos)

    def within(self, window: int | None) -> AttentionCall:
        """The same call for a layer with that window. Needs `q_pos` and `page_pos` if it is one."""
        return self if window == self.window else replace(self, window=window)

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.kv_len_host)

    @property
    def num_rows(self) -> int:
        """Rows that are computed; q may hold more, as padding."""
        return self.q_start_host[-1]

    def score_scale(self, head_dim: int) -> float:
        """The factor on the scores."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def check(self, q: Tensor, pages: Tensor, scales: Tensor | None = None) -> None:
        """Raise ValueError unless q, pages and scales fit this call. Reads nothing on a device.

        Args:
            q: [>= T, HQ, D] float16, bfloat16 or float32 (float64 in the reference only).
            pages: [P, 2, HK, S, D], dtype of q, int8 or float8_e4m3fn; for int4 [..., D / 2] uint8.
            scales: [P, 2, HK, S, C] float16 or float32 for quantised pages, C = 1 or D / 32 (int4).
        """
        _expect(q.dim() == 3 and q.dtype in FLOATS, f"q is {q.dtype} {tuple(q.shape)}")
        _expect(pages.dim() == 5 and pages.shape[1] == 2, f"pages are {tuple(pages.shape)}")
        _expect(q.shape[0] >= self.num_rows, f"q has {q.shape[0]} rows for {self.num_rows}")
        _, _, num_kv_heads, page_size, width = pages.shape
        num_heads, head_dim = q.shape[1:]
        _expect(num_heads % num_kv_heads == 0, f"{num_kv_heads} kv heads do not divide {num_heads}")
        _expect(
            page_size >= 16 and page_size & (page_size - 1) == 0,
            f"page size {page_size} is not a power of two from 16 on",
        )
        columns = head_dim // 2 if pages.dtype == torch.uint8 else head_dim
        _expect(width == columns, f"pages of {width} columns do not fit head size {head_dim}")
        _expect(pages.stride(-1) == 1 and q.stride(-1) == 1, "the last dimension is not contiguous")
        entries = self.page_table.shape[1]
        longest = max(self.kv_len_host, default=0)
        _expect(
            longest <= entries * page_size, f"kv_len {longest} in {entries} pages of {page_size}"
        )
        tensors = [pages, scales, self.page_table, self.q_start, self.kv_len, self.ancestors]
        tensors += [self.valid, self.q_pos, self.page_pos]
        devices = {tensor.device for tensor in [q, *tensors] if tensor is not None}
        _expect(len(devices) == 1, f"tensors on {sorted(map(str, devices))}")
        self._check_scales(q, pages, scales)

    def _check_scales(self, q: Tensor, pages: Tensor, scales: Tensor | None) -> None:
        if pages.dtype in FLOATS:
            _expect(pages.dtype == q.dtype, f"pages are {pages.dtype}, q is {q.dtype}")
            _expect(scales is None, f"{pages.dtype} pages take no scales")
            return
        _expect(
            pages.dtype in (torch.int8, torch.float8_e4m3fn, torch.uint8),
            f"pages are {pages.dtype}",
        )
        per_slot = 1
        if pages.dtype == torch.uint8:
            _expect(q.shape[-1] % 64 == 0, f"int4 needs a head size of 64 n, not {q.shape[-1]}")
            per_slot = q.shape[-1] // INT4_GROUP
        _expect(
            scales is not None
            and scales.shape == (*pages.shape[:4], per_slot)
            and scales.dtype in (torch.float16, torch.float32),
            f"scales do not fit {pages.dtype} pages {tuple(pages.shape)}",
        )

    def _expect_shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor: Tensor | None = getattr(self, name)
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            _expect(False, f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")


@lru_cache(maxsize=64)
def _starts(rows: tuple[int, ...]) -> tuple[tuple[int, ...], Tensor]:
    """`q_start` of so many rows a sequence, on both sides. Read only."""
    starts = (0, *accumulate(rows))
    return starts, torch.tensor(starts, dtype=torch.int32)


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"Attention call: {problem}.")
