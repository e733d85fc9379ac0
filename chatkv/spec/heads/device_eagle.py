"""An eagle head on a CUDA device: new rows stored and a whole tree grown in one captured graph.

Knows tensors, rows and their places; no sequence and no `DraftTree`. New rows are those that the
walk down the last tree keeps, or some that the host names. One sequence's keys and values lie where
the graphs read them; those of others wait in memories of their own.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.device_rows import DeviceRows, picked
from chatkv.models.logits import Features
from chatkv.models.staged import Staged
from chatkv.models.tree_rows import Carried, TreeRows, WalkedRows
from chatkv.models.work import Work
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.fused_eagle import EagleMemory, FusedEagleGrower, NewRows
from chatkv.spec.heads.grow import Growth, Vocabulary
from chatkv.spec.heads.modules import WINDOW, EagleHead

GROWTH = Growth(rows=16, depth=4, width=4, children=8)
ROWS = 16
"""New rows that a graph stores; of more, the first go in launches of their own."""


class DeviceMemory(EagleMemory):
    """A memory that knows where its content is worked on."""

    owner: FusedEagle | None = None

    def copy(self) -> DeviceMemory:
        """Another one with the same content."""
        if self.owner is not None:
            self.owner.put_away()
        return DeviceMemory(*(tensor.clone() for tensor in self.tensors()))


class FusedEagle:
    """Guesses below a root, from taps of the rows before it.

    Args:
        file: An eagle head.
        model: Its target; its steps keep the taps from here on.
    """

    depth = GROWTH.depth
    reads_again = True

    def __init__(self, file: HeadFile, model: CudaDecoder) -> None:
        weights, device = model.layers.weights, model.layers.device
        assert isinstance(file.head, EagleHead), "grower_of looks before"
        head, self.window = file.head.to(device), WINDOW
        vocabulary = Vocabulary.of(file.draft_ids, weights.head, weights.embedding)
        if head.rows is not None:
            vocabulary = replace(vocabulary, draft_rows=head.rows.to(weights.dtype))
        model.tap(head.shape.taps, self.window)
        self._graphs, self._shape, self._like = model.graphs, head.shape, weights.embedding
        self._fused = FusedEagleGrower(head, vocabulary, GROWTH, self.window)
        self.rows = TreeRows.empty(GROWTH.rows, device)
        self._loaded = self._own = self.new_memory()
        ints, longs = torch.int32, torch.int64
        self._inputs = Staged(
            {
                "span": (ints, (2,)),
                "count": (ints, (1,)),
                "behind": (ints, (ROWS,)),
                "new": (longs, (ROWS,)),
            },
            device,
        )
        self._given = Staged(
            {"span": (ints, (2,)), "count": (ints, (1,)), "behind": (ints, (self.window,))}, device
        )
        self._places = torch.arange(self.window, dtype=ints, device=device)
        there, taps = self._inputs.device, (len(head.shape.taps), ROWS, head.shape.hidden)
        self._named = NewRows(
            tapped=torch.zeros(taps, device=device),
            path=torch.arange(ROWS, dtype=ints, device=device),
            behind=there["behind"],
            count=there["count"],
            span=there["span"],
        )
        self._waiting: tuple[DeviceMemory, int, DeviceRows, Sequence[int]] | None = None
        size, is_cuda = (3, GROWTH.rows), device.type == "cuda"
        self._out = torch.zeros(size, dtype=ints, device=device)
        self._here = torch.zeros(size, dtype=ints, pin_memory=is_cuda)
        self._done = torch.cuda.Event() if is_cuda else None
        self._carried: Carried | None = None
        self._works: dict[int, tuple[WalkedRows | None, Work]] = {}

    def new_memory(self) -> DeviceMemory:
        """Room for one sequence."""
        empty = EagleMemory.empty(self._shape, self.window, self._like)
        return DeviceMemory(*empty.tensors())

    def store(
        self, memory: DeviceMemory, start: int, features: Features, tokens: Sequence[int]
    ) -> None:
        """Keep rows from place `start` on. The last few wait for `grow`, which stores them too."""
        assert isinstance(features, DeviceRows)
        self._flush()
        self._waiting = (memory, start, features, list(tokens))

    def launch(self, memory: DeviceMemory, rows: tuple[int, int]) -> None:
        """Keep the rows that the walk behind a step keeps, and grow from them; returns at once.

        Args:
            rows: [first, stop) of the rows before that step.
        """
        self._flush()
        self._load(memory)
        carried = self._own_carried()
        assert carried.walked is not None, "no step was picked from"
        self._inputs.begin()["span"][:] = rows
        self._run(carried.walked)

    def read(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of the tree that was launched last, its root first."""
        if self._done is not None:
            self._done.synchronize()
        tokens, parents, chance = self._here
        return tokens.tolist(), parents.tolist(), chance.view(torch.float32).tolist()

    def grow(
        self,
        memory: DeviceMemory,
        rows: tuple[int, int],
        root: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of a tree, its root first.

        Args:
            rows: [first, stop) of the rows that are stored; the last one chose the root.
            max_rows: Not looked at: every tree has `GROWTH.rows`.
        """
        del max_rows
        if self._waiting is not None and (
            self._waiting[0] is not memory or len(self._waiting[2]) > ROWS
        ):
            self._flush()
        self._load(memory)
        there, count = self._inputs.begin(), 0
        there["behind"][0] = root
        there["new"].fill(0)
        if self._waiting is not None:
            _, _, features, tokens = self._waiting
            count = len(features)
            there["new"][:count] = features.rows
            there["behind"][:count] = tokens
        there["count"][0] = count
        there["span"][:] = rows[0], rows[1] - count
        self._inputs.send()
        if self._waiting is not None:
            index, tapped = self._inputs.device["new"], self._waiting[2].tapped
            torch.index_select(tapped, 1, index, out=self._named.tapped)
            self._waiting = None
        carried = self._own_carried()
        carried.send(None, root, rows[1] + 1, temperature=temperature, seed=seed)
        self._run(None)
        return self.read()

    def put_away(self) -> None:
        """Bring what the graphs work on back to the memory it is of."""
        self._flush()
        if self._loaded is not self._own:
            for tensor, own in zip(self._loaded.tensors(), self._own.tensors(), strict=True):
                tensor.copy_(own)

    def _own_carried(self) -> Carried:
        """What the walk leaves. Graphs hold addresses of it."""
        carried = self._graphs.carried
        assert carried is not None, "the model's layers are tapped"
        if carried is not self._carried:
            self._carried = carried
            self._works.clear()
        return carried

    def _run(self, walked: WalkedRows | None) -> None:
        """Grow from rows of a walk, or from those that were named."""
        if id(walked) not in self._works:
            work = Work(partial(self._compute, walked), self._graphs.capture)
            self._works[id(walked)] = walked, work
        self._works[id(walked)][1]()
        self._inputs.mark()
        if self._done is not None:
            self._done.record()

    @torch.no_grad()
    def _compute(self, walked: WalkedRows | None) -> None:
        new = self._named
        if walked is not None:
            self._inputs.copy()
            new = NewRows(walked.tapped, walked.path, walked.picks, walked.count, new.span)
        assert self._carried is not None
        self._fused.grow(self._carried, self._own, new, self._out, self.rows)
        self._here.copy_(self._out, non_blocking=True)

    def _load(self, memory: DeviceMemory) -> None:
        if memory is self._loaded:
            return
        if self._loaded is not self._own:
            for tensor, own in zip(self._loaded.tensors(), self._own.tensors(), strict=True):
                tensor.copy_(own)
            self._loaded.owner = None
        for own, tensor in zip(self._own.tensors(), memory.tensors(), strict=True):
            own.copy_(tensor)
        self._loaded, memory.owner = memory, self

    @torch.no_grad()
    def _flush(self) -> None:
        """Store the rows that wait, in launches of their own: many at once after a prompt.

        Nothing waits for the device here: this may happen behind a step.
        """
        if self._waiting is None:
            return
        memory, start, features, tokens = self._waiting
        self._waiting = None
        self._load(memory)
        count = min(len(tokens), self.window)
        here, there = self._given.begin(), self._given.device
        here["behind"][:count], here["count"][0] = tokens[-count:], count
        here["span"][:] = start + len(tokens) - count
        self._given.send()
        self._fused.store(
            self._own,
            NewRows(
                tapped=picked(features.tapped, features.rows[-count:]).contiguous(),
                path=self._places[:count],
                behind=there["behind"],
                count=there["count"],
                span=there["span"],
            ),
        )
