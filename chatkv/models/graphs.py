"""Steps captured as CUDA graphs, one for each bucket of shapes; and the same steps not captured.

Knows buckets, staged inputs and graphs; the arithmetic is in `cuda_layers.py`. A step fills a
bucket's inputs, sends them in one transfer and replays. Rows that a bucket has too many are
padding: they store nothing and nobody attends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.kv.pool import PagePool
from chatkv.models.cuda_layers import SPARE_POSITIONS, Layers, Rows, most_slots
from chatkv.models.model import ForwardBatch
from chatkv.models.staged import Staged
from chatkv.sampling_triton import FLOATS, INTEGERS, PickRoom, pick_rows

SEQUENCES = (1, 2, 4, 8, 16, 32)
ROWS = (16, 32, 64, 128, 256, 512)
"""Rows in all. Plain decoding of one sequence is the 16-row bucket with one live row."""
LONGEST = (1, 16, 64)
"""Most rows of one sequence: it decides how attention is launched, and no bits."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape that is captured."""

    sequences: int
    rows: int
    longest: int
    want_logits: bool
    has_holes: bool
    """For sequences that forgot something. Others are spared the inputs."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> Bucket:
        """The smallest that holds the batch.

        Raises:
            ValueError: None does.
        """
        starts = batch.call.q_start_host
        longest = max(b - a for a, b in pairwise(starts))
        wanted = batch.logit_rows is None or len(batch.logit_rows) > 0 or batch.tapped > 0
        return cls(
            _least(SEQUENCES, len(starts) - 1, "sequences"),
            _least(ROWS, len(batch.tokens), "rows"),
            _least(LONGEST, longest, "rows of one sequence"),
            wanted,
            batch.call.valid is not None,
        )


class DeviceRow:
    """[V] float32 on the device; comes to the host when numpy asks.

    It is copied only if somebody still holds it when its step runs again.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def leave(self) -> None:
        """Its place is about to be overwritten."""
        self.values = self.values.clone()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values.cpu().numpy().astype(dtype or np.float32, copy=bool(copy))


class DeviceRows:
    """Tapped residuals of some rows, on the device. [rows, taps, H] when numpy asks.

    Args:
        tapped: [taps, R, H], of which they are a part.
        rows: Their places.
    """

    def __init__(self, tapped: Tensor, rows: Sequence[int]) -> None:
        self.tapped, self.rows = tapped, rows

    def leave(self) -> None:
        """Their place is about to be overwritten."""
        self.tapped, self.rows = _picked(self.tapped, self.rows), range(len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int, /) -> DeviceRow:
        return DeviceRow(self.tapped[:, self.rows[row]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = self.tapped[:, list(self.rows)].transpose(0, 1)
        return rows.cpu().numpy().astype(dtype or np.float32, copy=bool(copy))


class CapturedStep:
    """One bucket: its inputs, its buffers, and its two graphs (the step, and the picking).

    Args:
        layers: The model.
        pool: The pages the graph reads and writes.
        bucket: The shape.
        memory: Pool of memory that all graphs share; None does not capture.
    """

    def __init__(self, layers: Layers, pool: PagePool, bucket: Bucket, memory: Any | None) -> None:
        self.layers, self.pool, self.bucket = layers, pool, bucket
        self._memory = memory
        self._step_graph: torch.cuda.CUDAGraph | None = None
        self._pick_graph: torch.cuda.CUDAGraph | None = None
        self.generation = 0
        """How many steps ran here; what an old step left is gone."""
        self._kept: list[ref[DeviceRow] | ref[DeviceRows]] = []
        count, device = bucket.sequences, layers.device
        entries = pool.pages_for(most_slots(layers.spec, bucket.has_holes) + SPARE_POSITIONS)
        ints, longs = torch.int32, torch.int64
        holes = {"valid": (ints, (count, entries, 2))} if bucket.has_holes else {}
        self.inputs = Staged(
            {
                "tokens": (ints, (bucket.rows,)),
                "positions": (ints, (bucket.rows,)),
                "slots": (longs, (bucket.rows,)),
                "ancestors": (longs, (bucket.rows, 1)),
                "q_start": (ints, (count + 1,)),
                "kv_len": (ints, (count,)),
                "page_table": (ints, (count, entries)),
                **holes,
            },
            device,
        )
        self.settings = Staged(
            {
                "rows": (ints, (1,)),
                "integers": (longs, (bucket.rows, INTEGERS)),
                "floats": (torch.float64, (bucket.rows, FLOATS)),
            },
            device,
        )
        codes = pool.scales is not None
        self.room = layers.room(bucket.rows, with_logits=bucket.want_logits, codes=codes)
        self.picks = PickRoom.of(**self.settings.device)
        self._picked = torch.zeros(bucket.rows, dtype=ints, pin_memory=device.type == "cuda")
        there = self.inputs.device
        self.rows = Rows(
            tokens=there["tokens"],
            positions=there["positions"],
            slots=there["slots"],
            # The host's numbers only say how large a replay may be.
            call=AttentionCall(
                page_table=there["page_table"],
                q_start=there["q_start"],
                kv_len=there["kv_len"],
                ancestors=there["ancestors"],
                valid=there["valid"] if bucket.has_holes else None,
                q_start_host=(0, *[min(bucket.longest, bucket.rows)] * count),
                kv_len_host=(entries * pool.page_size,) * count,
            ),
        )

    def run(self, batch: ForwardBatch) -> None:
        """Run a batch that fits the bucket. Returns before the device is done."""
        for kept in self._kept:
            if (row := kept()) is not None:
                row.leave()
        self._kept.clear()
        self._fill(batch)
        self.inputs.send()
        self.generation += 1
        if self._step_graph is not None:
            self._step_graph.replay()
            return
        self._compute()
        if self._memory is not None:
            self._step_graph = captured(self._compute, self._memory)

    def pick(self) -> list[int]:
        """A token for each row of the bucket; rows without settings staged have any.

        Returns when they are here.
        """
        self.settings.send()
        if self._pick_graph is not None:
            self._pick_graph.replay()
        else:
            self._choose()
            if self._memory is not None:
                self._pick_graph = captured(self._choose, self._memory)
        self.settings.wait()
        return self._picked.tolist()

    def keep(self, row: int) -> DeviceRow:
        """A row of logits that outlives the next run."""
        kept = DeviceRow(self.room.logits[row])
        self._kept.append(ref(kept))
        return kept

    def features(self, rows: Sequence[int]) -> DeviceRows:
        """The tapped residuals of rows; they outlive the next run."""
        kept = DeviceRows(self.room.tapped, rows)
        self._kept.append(ref(kept))
        return kept

    def _compute(self) -> None:
        want_logits = self.bucket.want_logits
        self.layers.step(self.rows, self.pool, self.room, want_logits=want_logits)

    def _choose(self) -> None:
        pick_rows(self.room.logits, self.picks, pdl=self.layers.pdl)
        self._picked.copy_(self.picks.out, non_blocking=True)

    def _fill(self, batch: ForwardBatch) -> None:
        call, count = batch.call, len(batch.tokens)
        sequences = call.num_sequences
        there = self.inputs.begin()
        there["tokens"][:count] = batch.tokens
        there["tokens"][count:] = 0
        there["positions"][:count] = batch.positions
        there["positions"][count:] = 0
        there["slots"][:count] = batch.slots
        there["slots"][count:] = -1
        there["q_start"][: sequences + 1] = call.q_start_host
        there["q_start"][sequences + 1 :] = count
        there["kv_len"][:sequences] = call.kv_len_host
        there["kv_len"][sequences:] = 0
        words = _chains(call.q_start_host) if call.ancestors is None else call.ancestors.numpy()
        there["ancestors"][:count] = words[:count]
        table = call.page_table.numpy()
        there["page_table"][:sequences, : table.shape[1]] = table
        if call.valid is not None:
            there["valid"][:sequences, : table.shape[1]] = call.valid.numpy()


class StepGraphs:
    """The captured steps of one model.

    Args:
        layers: The model.
        capture: False runs every step launch by launch: slower, the same bits.
    """

    def __init__(self, layers: Layers, *, capture: bool = True) -> None:
        self.layers = layers
        self.capture = capture and layers.device.type == "cuda"
        self._steps: dict[Bucket, CapturedStep] = {}
        self._pages: Tensor | None = None
        self._memory: Any | None = None

    def tap(self, layers: tuple[int, ...]) -> None:
        """Leave the residual behind these layers in the room of each step."""
        self.layers.taps = layers
        self._steps.clear()

    def run(self, batch: ForwardBatch, pool: PagePool) -> CapturedStep:
        """Run a batch over the pages of a pool; says where the results are.

        Raises:
            ValueError: No bucket holds the batch.
        """
        if self._pages is not pool.data:
            # Graphs hold addresses of pages.
            self._steps.clear()
            self._pages = pool.data
            self._memory = torch.cuda.graph_pool_handle() if self.capture else None
        bucket = Bucket.of(batch)
        step = self._steps.get(bucket)
        if step is None:
            step = self._steps[bucket] = CapturedStep(self.layers, pool, bucket, self._memory)
        step.run(batch)
        return step


def captured(work: Callable[[], None], memory: Any) -> torch.cuda.CUDAGraph:
    """A graph of work that has run once: everything is compiled, and its results stand."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        work()
    return graph


def _picked(tapped: Tensor, rows: Sequence[int]) -> Tensor:
    """[taps, rows, H], a copy."""
    first = rows[0]
    if list(rows) == list(range(first, first + len(rows))):
        return tapped[:, first : first + len(rows)].clone()  # no index has to go to the device
    return tapped[:, list(rows)]


def _least(sizes: tuple[int, ...], needed: int, what: str) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise ValueError(f"A step of {needed} {what}; {sizes[-1]} can be run.")


def _chains(starts: tuple[int, ...]) -> np.ndarray:
    """[T, 1] ancestor words of rows that each see all before them."""
    words = [np.left_shift(np.int64(2), np.arange(b - a)) - 1 for a, b in pairwise(starts)]
    return np.concatenate(words)[:, None]
