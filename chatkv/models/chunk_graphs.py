"""Captured prompt chunks: one CUDA graph per number of rows, for every start and every length.

Knows buffers, staged inputs and graphs; the arithmetic is in `cuda_layers.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatkv.kv.pool import PagePool
from chatkv.kv.table import Holes
from chatkv.models.chunks import Chunking
from chatkv.models.cuda_layers import Layers, Room, Rows, most_slots
from chatkv.models.device_rows import DeviceRows
from chatkv.models.graphs import ROWS
from chatkv.models.staged import Staged
from chatkv.models.work import captured


class CapturedChunk:
    """Chunks of one size: their inputs and their graph.

    Args:
        layers: The model.
        pool: The pages the graph reads and writes.
        room: Buffers of so many rows.
        last: Where the new row that comes last is left, as row 0.
        tapped: [taps, W, H] float32, where the tapped residuals of the last W rows are left.
        has_holes: For sequences that forgot something. Others are spared the inputs.
        memory: Pool of memory that all graphs share; None does not capture.
    """

    def __init__(
        self, layers: Layers, pool: PagePool, room: Room, last: Room, tapped: Tensor,
        has_holes: bool, memory: Any | None,
    ) -> None:  # fmt: skip
        self.layers, self.pool, self.room, self.last = layers, pool, room, last
        self.tapped = tapped
        self._memory = memory
        self._graph: torch.cuda.CUDAGraph | None = None
        rows, ints, longs = len(room.hidden), torch.int32, torch.int64
        entries = pool.pages_for(most_slots(layers.spec, has_holes))
        holes = {"valid": (ints, (entries, 2)), "page_pos": (ints, (entries,))}
        self.inputs = Staged(
            {
                "tokens": (ints, (rows,)),
                "positions": (ints, (rows,)),
                "slots": (longs, (rows,)),
                "span": (ints, (4,)),
                "last": (longs, (1,)),
                "tapped": (longs, (tapped.shape[1],)),
                "page_table": (ints, (entries,)),
                **(holes if has_holes else {}),
            },
            layers.device,
        )
        there = self.inputs.device
        self._holes = (there["valid"], there["page_pos"]) if has_holes else None

    def run(
        self, tokens: np.ndarray, slots: np.ndarray, entries: np.ndarray, start: int, known: int,
        holes: Holes | None,
    ) -> None:  # fmt: skip
        """Run new ids behind `known` slots in a chunk that begins at slot `start`.

        All rows are run, the known and the missing ones as padding: one shape, the same bits.
        Returns before the device is done.
        """
        there = self.inputs.begin()
        first, stop = known - start, known - start + len(tokens)
        there["tokens"].fill(0)
        there["tokens"][first:stop] = tokens
        there["slots"].fill(-1)
        there["slots"][first:stop] = slots
        ahead = 0 if holes is None else holes.ahead
        np.minimum(
            np.arange(start + ahead, start + ahead + len(there["positions"]), dtype=np.int32),
            start + ahead + stop - 1,
            out=there["positions"],
        )
        there["span"][:] = start, known, start + stop, ahead
        there["last"][0] = stop - 1
        tapped = self.tapped.shape[1]
        np.maximum(np.arange(stop - tapped, stop), 0, out=there["tapped"])
        there["page_table"][: len(entries)] = entries
        if holes is not None:
            there["valid"][: len(entries)] = holes.valid
            there["page_pos"][: len(entries)] = holes.page_pos
        self.inputs.send()
        if self._graph is not None:
            self._graph.replay()
            return
        self._compute()
        if self._memory is not None:
            self._graph = captured(self._compute, self._memory)

    def _compute(self) -> None:
        there, room = self.inputs.device, self.room
        rows = Rows(there["tokens"], there["positions"], there["slots"])

        def tap(layer: int) -> None:
            for place in self.layers.places(layer):
                torch.index_select(room.hidden, 0, there["tapped"], out=self.tapped[place])

        table, span = there["page_table"], there["span"]
        self.layers.chunk(rows, self.pool, room, table, span, tap, holes=self._holes)
        last = self.layers.spec.num_layers
        tap(last)
        for place in self.layers.places(last):
            self.tapped[place].add_(room.x[there["tapped"]])
        torch.index_select(room.hidden, 0, there["last"], out=self.last.hidden[:1])
        torch.index_select(room.x, 0, there["last"], out=self.last.x[:1])


class ChunkGraphs:
    """The captured chunks of one model, in buffers they share.

    Args:
        layers: The model.
        capture: False runs every chunk launch by launch: slower, the same bits.
    """

    def __init__(self, layers: Layers, *, capture: bool = True) -> None:
        self.layers = layers
        self.chunking = Chunking.of(layers.spec.hidden_size)
        self.capture = capture and layers.device.type == "cuda"
        self._chunks: dict[tuple[int, bool], CapturedChunk] = {}
        self._room: Room | None = None
        self._last = layers.room(ROWS[0])
        self._head: torch.cuda.CUDAGraph | None = None
        self._logits = torch.zeros(layers.spec.vocab_size, pin_memory=layers.device.type == "cuda")
        self._pages: Tensor | None = None
        self._memory: Any | None = None
        self._tapped = self._last.hidden.new_zeros(0, 0, 0)

    def tap(self, rows: int) -> None:
        """Leave the residual behind `Layers.taps` of the last rows of each chunk."""
        shape = (len(self.layers.taps), rows, self.layers.spec.hidden_size)
        self._tapped = self._last.hidden.new_zeros(shape)
        self._chunks.clear()

    def features(self, count: int) -> DeviceRows:
        """Tapped residuals of the last rows of the chunk that ran last; a copy."""
        return DeviceRows(self._tapped[:, self._tapped.shape[1] - count :].clone(), range(count))

    def run(
        self, rows: int, tokens: np.ndarray, slots: np.ndarray, entries: np.ndarray, start: int,
        known: int, pool: PagePool, holes: Holes | None = None,
    ) -> None:  # fmt: skip
        """Run new ids in a chunk of `rows` rows. See `CapturedChunk.run`."""
        if self._pages is not pool.data:
            # Graphs hold addresses of pages.
            self._chunks.clear()
            self._head = None
            self._pages = pool.data
            self._memory = torch.cuda.graph_pool_handle() if self.capture else None
        if self._room is None:
            self._room = self.layers.room(self.chunking.last, with_logits=False, chunk=True)
        kind = rows, holes is not None
        chunk = self._chunks.get(kind)
        if chunk is None:
            room = self._room.first(rows)
            chunk = self._chunks[kind] = CapturedChunk(
                self.layers, pool, room, self._last, self._tapped, kind[1], self._memory
            )
        chunk.run(tokens, slots, entries, start, known, holes)

    def logits(self) -> np.ndarray:
        """[V] float32 of the new row that came last; waits for the device."""
        if self._head is not None:
            self._head.replay()
        else:
            self._project()
            if self._memory is not None:
                self._head = captured(self._project, self._memory)
        self._logits.copy_(self._last.logits[0], non_blocking=True)
        if self.layers.device.type == "cuda":
            torch.cuda.current_stream(self.layers.device).synchronize()
        return self._logits.numpy().copy()

    def _project(self) -> None:
        self.layers.head(self._last)
