"""The captured steps of one model, by bucket; and steps that begin before the host has seen what
the step in front gave.

A step whose tree grows on the device needs one thing from the host that the device does not have
yet: where its rows go. That is known but for the number of rows that the walk in front keeps, so
the host sends the places for all numbers, and a kernel in front of the step picks. Such a step has
the bits of the same step begun later, and if it turns out not to be the one that is wanted, it is
dropped: its rows lie behind all that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatkv.kv.pool import PagePool
from chatkv.models.cuda_layers import Layers
from chatkv.models.graphs import Bucket, CapturedStep
from chatkv.models.model import ForwardBatch
from chatkv.models.tree_rows import Carried


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was begun ahead."""

    step: CapturedStep
    batch: ForwardBatch
    """As if the walk in front kept no row; its slots go on behind its rows."""
    page_size: int

    def is_for(self, batch: ForwardBatch) -> bool:
        """Whether it is the step that is wanted now, row by row and page by page."""
        mine, call = self.batch, batch.call
        if batch.grown is not mine.grown or len(batch.tokens) != len(mine.tokens):
            return False
        if Bucket.of(batch) != self.step.bucket:
            return False
        rows, (length,) = len(mine.tokens), call.kv_len_host
        kept = length - mine.call.kv_len_host[0]
        if not 0 < kept <= len(mine.slots) - rows:
            return False
        entries = -(-length // self.page_size)
        return np.array_equal(batch.slots, mine.slots[kept : kept + rows]) and all(
            _are_same(getattr(call, name), getattr(mine.call, name), entries)
            for name in ("page_table", "valid", "page_pos")
        )


class StepGraphs:
    """The captured steps of one model.

    Args:
        layers: The model.
        capture: False runs every step launch by launch: slower, the same bits.
    """

    def __init__(self, layers: Layers, *, capture: bool = True) -> None:
        self.layers = layers
        self.capture = capture and layers.device.type == "cuda"
        self.carried: Carried | None = None
        """What the walk of a single sequence leaves for whoever grows its next tree."""
        self._steps: dict[Bucket, list[CapturedStep]] = {}
        """One for each bucket; two where steps begin ahead, since each may still be read while the
        other runs."""
        self._last: CapturedStep | None = None
        self._flight: Flight | None = None
        self.was_begun = False
        """Whether the step that was asked for last had begun ahead."""
        self._pages: Tensor | None = None
        self._memory: Any | None = None

    def tap(self, layers: tuple[int, ...]) -> None:
        """Leave the residual behind these layers in the room of each step, and what is carried."""
        if layers == self.layers.taps:
            return
        self.layers.taps = layers
        hidden = self.layers.spec.hidden_size
        self.carried = Carried(len(layers), hidden, self.layers.device) if layers else None
        self._steps.clear()
        self._last = self._flight = None

    def run(self, batch: ForwardBatch, pool: PagePool) -> CapturedStep:
        """Run a batch over the pages of a pool; says where the results are.

        Raises:
            ValueError: No bucket holds the batch.
        """
        flight, self._flight = self._flight, None
        if self._pages is not pool.data:
            # Graphs hold addresses of pages.
            self._steps.clear()
            flight, self._pages = None, pool.data
            self._memory = torch.cuda.graph_pool_handle() if self.capture else None
        self.was_begun = flight is not None and flight.is_for(batch)
        if flight is not None and self.was_begun:
            return flight.step
        step = self._last = self._step(Bucket.of(batch), 0, pool)
        step.run(batch)
        return step

    def run_on(self, batch: ForwardBatch, pool: PagePool) -> None:
        """Begin the step behind the one that ran last, whose walk and growth are on their way.

        Args:
            batch: As of `CapturedStep.run` with counts.
        """
        last, bucket = self._last, Bucket.of(batch)
        if last is None or last.bucket != bucket or self._pages is not pool.data:
            return
        place = 1 if last is self._steps[bucket][0] else 0
        step = self._last = self._step(bucket, place, pool)
        step.run(batch, last.walks.counts)
        self._flight = Flight(step, batch, pool.page_size)

    def _step(self, bucket: Bucket, place: int, pool: PagePool) -> CapturedStep:
        steps = self._steps.setdefault(bucket, [])
        while len(steps) <= place:
            steps.append(CapturedStep(self.layers, pool, bucket, self._memory, self.carried))
        return steps[place]


def _are_same(one: Tensor | None, other: Tensor | None, entries: int) -> bool:
    """Whether the first entries of the only sequence are."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one.numpy()[0, :entries], other.numpy()[0, :entries])
