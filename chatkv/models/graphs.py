"""A step captured as CUDA graphs for one bucket of shapes; and the same step not captured.

Knows buckets, staged inputs and graphs; the arithmetic is in `cuda_layers.py`. A step fills a
bucket's inputs, sends them in one transfer and replays. Rows that a bucket has too many are
padding: they store nothing and nobody attends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.kv.pool import PagePool
from chatkv.models.cuda_layers import SPARE_POSITIONS, Layers, Rows, most_slots
from chatkv.models.device_rows import DeviceRow, DeviceRows
from chatkv.models.model import ForwardBatch
from chatkv.models.staged import Fields, Staged
from chatkv.models.tree_rows import Carried, TreeRows, WalkedRows, row_fields
from chatkv.models.walk_triton import LONGEST_PATH, WalkRoom, move_rows, shift_rows, walk_rows
from chatkv.models.work import Work
from chatkv.sampling import SamplingParams
from chatkv.sampling_triton import FLOATS, INTEGERS, PickRoom, pick_rows, settings_of

SEQUENCES = (1, 2, 4, 8, 16, 32)
ROWS = (16, 32, 64, 128, 256, 512)
"""Rows in all. Plain decoding of one sequence is the 16-row bucket with one live row."""
MOST_ROWS = 64
LONGEST = (1, 16, MOST_ROWS)
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
        wanted = batch.logit_rows is None or len(batch.logit_rows) > 0 or batch.tapped > 0
        return _bucket(batch.call.q_start_host, wanted, batch.call.valid is not None)


class CapturedStep:
    """One bucket: its inputs, its buffers, and its graphs: the step, and the picking with the walk.

    Args:
        layers: The model.
        pool: The pages the graph reads and writes.
        bucket: The shape.
        memory: Pool of memory that all graphs share; None does not capture.
        carried: Where the walk leaves what the next tree grows from.
    """

    def __init__(
        self,
        layers: Layers,
        pool: PagePool,
        bucket: Bucket,
        memory: Any | None,
        carried: Carried | None = None,
    ) -> None:
        self.layers, self.pool, self.bucket = layers, pool, bucket
        self._carried = carried if bucket.sequences == 1 else None
        capture = memory is not None
        self._memory = memory
        self._grown: dict[tuple[int, int], Work] = {}
        self.step = Work(self._compute, capture, memory)
        self.picking = Work(self._choose, capture, memory)
        self.generation = 0
        """How many steps ran here; what an old step left is gone."""
        self._kept: list[ref[DeviceRow] | ref[DeviceRows]] = []
        count, device = bucket.sequences, layers.device
        entries = pool.pages_for(most_slots(layers.spec, bucket.has_holes) + SPARE_POSITIONS)
        ints, longs = torch.int32, torch.int64
        holes: Fields = {"valid": (ints, (count, entries, 2))} if bucket.has_holes else {}
        if bucket.has_holes and layers.spec.windows:
            holes["page_pos"] = (ints, (count, entries))
        reach: Fields = {"reach": (longs, (bucket.rows + LONGEST_PATH,))} if count == 1 else {}
        self.inputs = Staged(
            {
                **row_fields(bucket.rows),
                "slots": (longs, (bucket.rows,)),
                "q_start": (ints, (count + 1,)),
                "kv_len": (ints, (count,)),
                "split": (ints, (1,)),
                "page_table": (ints, (count, entries)),
                **holes,
                **reach,
            },
            device,
        )
        self.settings = Staged(
            {
                "rows": (ints, (1,)),
                "integers": (longs, (bucket.rows, INTEGERS)),
                "floats": (torch.float64, (bucket.rows, FLOATS)),
                "walks": (ints, (count,)),
            },
            device,
        )
        self._set: tuple[object, ...] | None = None
        codes = pool.scales is not None
        self.room = layers.room(bucket.rows, with_logits=bucket.want_logits, codes=codes)
        there, sent = self.inputs.device, self.settings.device
        self.picks = PickRoom.of(sent["rows"], there["positions"], sent["integers"], sent["floats"])
        self.walks = WalkRoom.of(there, sent["walks"])
        path, counts = self.walks.path[0], self.walks.counts
        self._walked = WalkedRows(self.room.tapped, path, counts, self.picks.out)
        self._picked = torch.zeros(bucket.rows, dtype=ints, pin_memory=device.type == "cuda")
        self._here = torch.cuda.Event() if device.type == "cuda" else None
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
                q_pos=there["positions"],
                page_pos=self._page_pos(),
                q_start_host=(0, *[min(bucket.longest, bucket.rows)] * count),
                kv_len_host=(entries * pool.page_size,) * count,
            ),
        )

    def _page_pos(self) -> Tensor | None:
        """[N, M] positions of entries, if the model has windows. Without holes they are slots."""
        there = self.inputs.device
        if not self.layers.spec.windows or "page_pos" in there:
            return there.get("page_pos")
        count, entries = there["page_table"].shape
        starts = torch.arange(entries, dtype=torch.int32, device=self.layers.device)
        return (self.pool.page_size * starts).repeat(count, 1)

    def run(self, batch: ForwardBatch, counts: Tensor | None = None) -> None:
        """Run a batch that fits the bucket. Returns before the device is done.

        Args:
            counts: [1] int32 on the device: how many rows the walk behind the step before keeps.
                The batch is then as if it kept none, and its slots go on behind its rows.
        """
        for kept in self._kept:
            if (row := kept()) is not None:
                row.leave()
        self._kept.clear()
        self._fill(batch)
        self.generation += 1
        if batch.grown is None:
            self.step()
        else:
            self._grown_step(batch.grown, counts)()
        self.inputs.mark()

    def set(self, starts: tuple[int, ...], params: tuple[SamplingParams | None, ...]) -> None:
        """How each sequence picks, and where its rows begin; None for one that does not here."""
        if self._set == (starts, params):
            return
        self._set = (starts, params)
        there = self.settings.begin()
        count = 0
        there["walks"][:] = 0
        for place, ((first, stop), own) in enumerate(zip(pairwise(starts), params, strict=True)):
            if own is None:
                continue
            integers, floats = settings_of(own)
            there["integers"][first:stop] = integers
            there["floats"][first:stop] = floats
            there["walks"][place] = 1
            count = stop
        there["rows"][0] = count
        self.settings.send()

    def pick(self, behind: Callable[[], None] | None = None) -> list[int]:
        """A token for each row of the bucket, any for rows that do not pick here.

        The walk down the trees follows, and `behind` it what else the device is to do; returns
        when the tokens are here.
        """
        self.picking()
        if self._here is not None:
            self._here.record(self.inputs.stream)
        if self._carried is not None:
            self._carried.walked = self._walked
        if behind is not None:
            behind()
        if self._here is not None:
            self._here.synchronize()
        return self._picked.tolist()

    def keep(self, row: int) -> DeviceRow:
        """A row of logits that outlives the next run."""
        kept = DeviceRow(self.room.logits, row)
        self._kept.append(ref(kept))
        return kept

    def features(self, rows: Sequence[int]) -> DeviceRows:
        """The tapped residuals of rows; they outlive the next run."""
        kept = DeviceRows(self.room.tapped, rows)
        self._kept.append(ref(kept))
        return kept

    def _grown_step(self, rows: TreeRows, counts: Tensor | None) -> Work:
        """The step of a tree that lies on the device already. Graphs hold addresses."""
        places = rows.block.data_ptr(), 0 if counts is None else counts.data_ptr()
        if places not in self._grown:
            compute = partial(self._compute, rows, counts)
            self._grown[places] = Work(compute, self._memory is not None, self._memory)
        return self._grown[places]

    def _compute(self, grown: TreeRows | None = None, counts: Tensor | None = None) -> None:
        if grown is None:
            self.inputs.copy()
        elif len(grown.tokens) == self.bucket.rows:
            self.inputs.copy(grown.block)
        else:  # rows of others stand behind
            self.inputs.copy()
            for name in ("tokens", "positions", "ancestors"):
                rows: Tensor = getattr(grown, name)
                self.inputs.device[name][: len(rows)].copy_(rows)
        if counts is not None:
            shift_rows(self.inputs.device, counts)
        want_logits = self.bucket.want_logits
        self.layers.step(self.rows, self.pool, self.room, want_logits=want_logits)

    def _choose(self) -> None:
        """Picks and the walk: one graph, since the device rests some ten microseconds between
        two, and walks in five."""
        pdl = self.layers.pdl
        pick_rows(self.room.logits, self.picks, pdl=pdl)
        walk_rows(self.picks, self.walks, self.room.tapped, self._carried, pdl=pdl)
        if self.bucket.longest > 1:
            for tensor in self.pool.tensors:  # layers that stay plain too
                move_rows(tensor, None, self.walks, pdl=pdl)
        self._picked.copy_(self.picks.out, non_blocking=True)

    def _fill(self, batch: ForwardBatch) -> None:
        call, count = batch.call, len(batch.tokens)
        sequences = call.num_sequences
        there = self.inputs.begin()
        size = 0 if batch.grown is None else len(batch.grown.tokens)
        if count > size:
            # Rows that are padding hold what others left there: any token, any position.
            there["tokens"][size:count] = batch.tokens[size:]
            there["positions"][size:count] = batch.positions[size:]
            words = _chains(call.q_start_host) if call.ancestors is None else call.ancestors.numpy()
            there["ancestors"][size:count] = words[size:count]
        else:
            assert count == self.bucket.rows, f"a tree of {count} rows for {self.bucket}"
        there["split"][0] = size if count > size > 0 else MOST_ROWS
        if len(batch.slots) > count:
            there["reach"][: len(batch.slots)] = batch.slots
        else:
            there["slots"][:count] = batch.slots
            there["slots"][count:] = -1
        there["q_start"][: sequences + 1] = call.q_start_host
        there["q_start"][sequences + 1 :] = count
        there["kv_len"][:sequences] = call.kv_len_host
        there["kv_len"][sequences:] = 0
        table = call.page_table.numpy()
        there["page_table"][:sequences, : table.shape[1]] = table
        if call.valid is not None:
            there["valid"][:sequences, : table.shape[1]] = call.valid.numpy()
        if call.page_pos is not None and "page_pos" in there:
            there["page_pos"][:sequences, : table.shape[1]] = call.page_pos.numpy()


@lru_cache(maxsize=1024)
def _bucket(starts: tuple[int, ...], want_logits: bool, has_holes: bool) -> Bucket:
    longest = max(b - a for a, b in pairwise(starts))
    return Bucket(
        _least(SEQUENCES, len(starts) - 1, "sequences"),
        _least(ROWS, starts[-1], "rows"),
        _least(LONGEST, longest, "rows of one sequence"),
        want_logits,
        has_holes,
    )


def _least(sizes: tuple[int, ...], needed: int, what: str) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise ValueError(f"A step of {needed} {what}; {sizes[-1]} can be run.")


@lru_cache(maxsize=64)
def _chains(starts: tuple[int, ...]) -> np.ndarray:
    """[T, 1] ancestor words of rows that each see all before them."""
    words = [np.left_shift(np.int64(2), np.arange(b - a)) - 1 for a, b in pairwise(starts)]
    return np.concatenate(words)[:, None]
