"""A model that writes into each row a number that depends on all rows it sees, on its id and its
position, and on how it was computed. `expected` says the same numbers from ids and ops alone.

One row seen too many, too few, out of order, at another position or from another path changes the
number, and all numbers behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from chatkv.attention.call import AttentionCall
from chatkv.attention.reference import visible_slots
from chatkv.kv.ops import Op, live_ranges, next_position
from chatkv.kv.pool import PagePool

SIZE = 16
CHUNK = 6


def number(seen: Sequence[int], token: int, position: int, how: int) -> int:
    """What a row holds: 20 bits, so that a float32 keeps them."""
    packed = struct.pack(f"<{len(seen)}i3i", *seen, token, position, how)
    return crc32(packed) & 0xFFFFF


def expected(
    ids: Sequence[int], sampled: Sequence[bool], ops: Sequence[Op], window: int | None = None
) -> list[int]:
    """The number of every id, forgotten ones too, each from what it saw when it was computed."""
    numbers: list[int] = []
    run = 0
    edges = {op.at for op in ops}
    for place, (token, chosen) in enumerate(zip(ids, sampled, strict=True)):
        if chosen or place in edges or (place and sampled[place - 1]):
            run = place
        oldest = 0 if window is None else place - window + 1
        live = live_ranges(ops, place)
        seen = [numbers[i] for a, b in live for i in range(max(a, oldest), b)]
        how = -1 if chosen else (place - run) % CHUNK
        numbers.append(number(seen, token, next_position(ops, place), how))
    return numbers


class HashModel:
    """What `Prompts` asks of a model. Turned keys are not looked at, positions are."""

    device, max_step_rows, page_size, backend_name = "cpu", 5, SIZE, "hash"

    def __init__(self, window: int | None = None) -> None:
        self.spec = SimpleNamespace(rope_frequencies=np.ones(1), widest_window=window)
        self.rows = 0

    def new_pool(self, num_pages: int) -> PagePool:
        pool = PagePool(
            num_pages=num_pages, page_size=SIZE, num_layers=1, num_kv_heads=1, head_dim=2,
            dtype=torch.float32,
        )  # fmt: skip
        pool.data.fill_(torch.nan)
        return pool

    def chunk(self, offset: int) -> tuple[int, int]:
        return offset // CHUNK * CHUNK, CHUNK

    def step(self, batch: Any, pool: PagePool) -> Any:
        self._run(batch.call, batch.tokens, batch.positions, batch.slots, pool, None)
        return SimpleNamespace(row=lambda _: np.zeros(16, np.float32))

    def prefill(
        self, tokens: Any, start: int, known: int, slots: Any, entries: Any, pool: PagePool, *,
        chunk_rows: int, want_logits: bool, tapped: int = 0, holes: Any = None,
    ) -> Any:  # fmt: skip
        assert start <= known < known + len(tokens) <= start + chunk_rows
        call = AttentionCall.of(
            torch.from_numpy(entries)[None],
            [len(tokens)],
            [known + len(tokens)],
            valid=None if holes is None else torch.from_numpy(holes.valid)[None],
            page_pos=None if holes is None else torch.from_numpy(holes.page_pos)[None],
        )
        positions = np.arange(known, known + len(tokens)) + (holes.ahead if holes else 0)
        how = [(known - start + i) % chunk_rows for i in range(len(tokens))]
        self._run(call, tokens, positions, slots, pool, how)
        return np.zeros(16, np.float32) if want_logits else None

    def _run(
        self, call: AttentionCall, tokens: Any, positions: Any, slots: Any, pool: PagePool,
        how: list[int] | None,
    ) -> None:  # fmt: skip
        call = call.with_positions(positions, SIZE).within(self.spec.widest_window)
        values = pool.data.numpy()[0, :, 1, 0, :, 0]  # [P, S], a view
        for n in range(call.num_sequences):
            first, stop = call.q_start_host[n : n + 2]
            for row in range(first, stop):
                self.rows += 1
                slot = visible_slots(call, n, row - first, SIZE).numpy()
                pages, offsets = call.page_table[n].numpy()[slot // SIZE], slot % SIZE
                seen = values[pages[:-1], offsets[:-1]]
                page = int(pages[-1])
                assert page * SIZE + offsets[-1] == slots[row]
                assert not np.isnan(seen).any(), "a row that nobody wrote is seen"
                assert pool.refs(page) == 1, f"page {page} is shared and was written"
                kind = -1 if how is None else how[row]
                value = number(
                    seen.astype(int).tolist(), int(tokens[row]), int(positions[row]), kind
                )
                pool.data[0, page, :, :, int(slots[row]) % SIZE] = value
