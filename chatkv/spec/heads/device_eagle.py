"""An eagle head on a CUDA device: new rows stored and a whole tree grown in one captured graph.

Knows tensors, rows and their places; no sequence and no `DraftTree`. One sequence's keys and values
lie where the graph reads them; those of others wait in memories of their own.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.device_rows import DeviceRows
from chatkv.models.logits import Features
from chatkv.models.staged import Staged
from chatkv.models.work import captured
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.grow import EagleCell, Growth, Vocabulary, grow
from chatkv.spec.heads.modules import WINDOW, EagleHead, angles_of
from chatkv.spec.heads.noise_triton import draft_noise

GROWTH = Growth(rows=16, depth=4, width=4, children=8)
ROWS = 8
"""New rows that the graph stores; of more, the first go one launch after another."""


class DeviceMemory:
    """Keys and values [W + 1, HK, D] float32 of one sequence, and the state [1, H] behind its last
    row. Row p is in slot p % W; the last slot is for rows that are padding."""

    def __init__(self, keys: Tensor, values: Tensor, state: Tensor) -> None:
        self.keys, self.values, self.state = keys, values, state
        self.owner: DeviceEagle | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is held."""
        return self.keys, self.values, self.state

    def copy(self) -> DeviceMemory:
        """Another one with the same content."""
        if self.owner is not None:
            self.owner.put_away()
        return DeviceMemory(*(tensor.clone() for tensor in self.tensors()))


class DeviceEagle:
    """Guesses below a root, from taps of the rows before it.

    Args:
        file: An eagle head.
        model: Its target.
    """

    def __init__(self, file: HeadFile, model: CudaDecoder) -> None:
        weights, device = model.layers.weights, model.layers.device
        assert isinstance(file.head, EagleHead), "grower_of looks before"
        self._head = head = file.head.to(device)
        for parameter in head.parameters():
            if parameter.dim() > 1:  # norms stay exact
                parameter.data = parameter.data.to(weights.dtype)
        self._vocabulary = Vocabulary.of(file.draft_ids, weights.head, weights.embedding)
        if head.rows is not None:
            self._vocabulary = replace(self._vocabulary, draft_rows=head.rows)
        self.window = WINDOW
        shape = head.shape
        self._floats = {"dtype": torch.float32, "device": device}
        self._loaded = self._own = self.new_memory()
        self._taps = torch.zeros(ROWS, len(shape.taps), shape.hidden, **self._floats)
        self._noise = torch.zeros(1, GROWTH.depth, shape.draft_ids, **self._floats)
        longs = torch.int64
        self._inputs = Staged(
            {
                "new": (longs, (ROWS,)),
                "behind": (longs, (ROWS,)),
                "places": (longs, (ROWS,)),
                "slots": (longs, (ROWS,)),
                "last": (longs, (1,)),
                "rows": (longs, (2,)),
                "root": (longs, (1,)),
                "seed": (longs, (1,)),
                "position": (torch.int32, (1,)),
                "inverse_t": (torch.float64, (1,)),
            },
            device,
        )
        self._waiting: tuple[DeviceMemory, int, DeviceRows, Sequence[int]] | None = None
        self._slots = torch.arange(self.window, device=device)
        self._out = torch.zeros(3, GROWTH.rows, **self._floats)
        self._here = torch.zeros(3, GROWTH.rows, pin_memory=device.type == "cuda")
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture = model.graphs.capture

    def new_memory(self) -> DeviceMemory:
        """Room for one sequence."""
        shape = self._head.shape
        size = (self.window + 1, shape.num_kv_heads, shape.head_dim)
        keys, values = torch.zeros(size, **self._floats), torch.zeros(size, **self._floats)
        return DeviceMemory(keys, values, torch.zeros(1, shape.hidden, **self._floats))

    def store(
        self, memory: DeviceMemory, start: int, features: Features, tokens: Sequence[int]
    ) -> None:
        """Keep rows from place `start` on. The last few wait for `grow`, which stores them too."""
        assert isinstance(features, DeviceRows)
        self._flush()
        self._waiting = (memory, start, features, list(tokens))

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
        there = self._inputs.begin()
        there["new"].fill(0)
        there["slots"].fill(self.window)
        there["last"][0] = -1
        if self._waiting is not None:
            _, start, features, tokens = self._waiting
            count = len(features)
            there["new"][:count] = features.rows
            there["behind"][:count] = tokens
            there["places"][:count] = np.arange(start, start + count)
            there["slots"][:count] = there["places"][:count] % self.window
            there["last"][0] = count - 1
        there["rows"][:] = rows
        there["root"][0] = root
        there["seed"][0] = seed if temperature > 0 else -1
        there["position"][0] = rows[1] + 1
        there["inverse_t"][0] = 1 / temperature if temperature > 0 else 1
        self._inputs.send()
        if self._waiting is not None:
            tapped = self._waiting[2].tapped.transpose(0, 1)
            index = self._inputs.device["new"]
            torch.index_select(tapped, 0, index, out=self._taps)
            self._waiting = None
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
            if self._capture:
                self._graph = captured(self._compute, None)
        self._inputs.wait()
        ids, parents, chance = self._here.numpy()
        return (
            ids.astype(np.int64).tolist(), parents.astype(np.int64).tolist(), chance.tolist()
        )  # fmt: skip

    def put_away(self) -> None:
        """Bring what the graph works on back to the memory it is of."""
        self._flush()
        if self._loaded is not self._own:
            for tensor, own in zip(self._loaded.tensors(), self._own.tensors(), strict=True):
                tensor.copy_(own)

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
        """Store the rows that wait, launch by launch: many at once after a prompt."""
        if self._waiting is None:
            return
        memory, start, features, tokens = self._waiting
        self._waiting = None
        self._load(memory)
        device = self._taps.device
        taps = features.tapped[:, list(features.rows)].transpose(0, 1)
        behind = torch.tensor(tokens, device=device)
        places = torch.arange(start, start + len(tokens), device=device)
        states = self._head.features(taps)
        self._keep(states, behind, places, places % self.window)
        self._own.state.copy_(states[-1:])

    def _keep(self, states: Tensor, behind: Tensor, places: Tensor, slots: Tensor) -> None:
        angles = angles_of(self._head.shape, places)
        keys, values = self._head.stored(states, self._vocabulary.embedding[behind], angles)
        self._own.keys.index_copy_(0, slots, keys.float())
        self._own.values.index_copy_(0, slots, values.float())

    @torch.no_grad()
    def _compute(self) -> None:
        there = self._inputs.device
        states = self._head.features(self._taps)
        self._keep(states, there["behind"], there["places"], there["slots"])
        newest = states.index_select(0, there["last"].clamp(min=0))
        self._own.state.copy_(torch.where(there["last"] >= 0, newest, self._own.state))
        draft_noise(there["seed"], there["position"], self._vocabulary.draft_ids, self._noise)
        found = grow(
            self._head,
            EagleCell(self._head, self._own.state, there["rows"][1:] - 1, self._look),
            self._vocabulary,
            there["root"],
            GROWTH,
            inverse_t=there["inverse_t"].float(),
            noise=self._noise,
        )
        # Ids are below 2^24: float32 holds them.
        for line, values in enumerate((found.tokens, found.parents, found.chance)):
            self._out[line].copy_(values[0])
        self._here.copy_(self._out, non_blocking=True)

    def _look(self, q: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scores over the stored rows of the window; see `grow.Look`."""
        first, stop = self._inputs.device["rows"].unbind()
        places = stop - 1 - torch.remainder(stop - 1 - self._slots, self.window)
        keys, values = self._own.keys[:-1], self._own.values[:-1]
        scores = torch.einsum("nwhgd,shd->nwhgs", q, keys)
        scores = scores.masked_fill(places < first, -torch.inf)

        def mix(shares: Tensor) -> Any:
            return torch.einsum("nwhgs,shd->nwhgd", shares, values)

        return scores, mix
