"""The target model writing many conversations at once, one token each a step.

Knows weights, seats and token ids; no text and no files. A conversation sits in a seat with a
stretch of keys and values of its own. Given ids (a prompt, the next user turn) go through the same
step as written ones: no prefill, one captured graph. The ids all conversations begin with are
computed once and copied.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatkv.attention.triton_tree import TritonBackend
from chatkv.models.cuda_layers import Layers, library_product
from chatkv.models.dense import DenseWeights
from chatkv.spec.train import writer_triton
from chatkv.spec.train.kernels import kernels_for


@dataclass(frozen=True, slots=True)
class Brief:
    """What a seat is to write next."""

    ids: Sequence[int]
    """All ids so far, those of the head included."""
    limit: int
    """Length at which writing stops without a stop id."""
    temperature: float
    seed: int
    is_new: bool = True
    """False: the seat goes on with the conversation it holds; `ids` extends that."""


class BatchWriter:
    """Seats on a device. `assign` gives them work, `run` writes, `finished` gives it back.

    Args:
        weights: Of the target.
        head: Ids every conversation begins with.
        seats: Conversations at once.
        length: Longest conversation in tokens.
        eos_ids: Ids that end what is written.
    """

    def __init__(
        self,
        weights: DenseWeights,
        head: Sequence[int],
        *,
        seats: int,
        length: int,
        eos_ids: Sequence[int],
    ) -> None:
        spec = weights.spec
        self.seats, self.length, self.head = seats, length, list(head)
        self.device = device = weights.device
        self._weights = weights
        self._rotary = Layers(weights, TritonBackend(), "library").rotary
        self._kernels = kernels_for(device)
        self._is_plain = device.type == "cpu"
        like: dict[str, Any] = {"dtype": weights.dtype, "device": device}
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        words: dict[str, Any] = {"dtype": torch.int32, "device": device}
        longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.ids = torch.zeros(seats, length, **words)
        self._position = torch.zeros(seats, **words)
        self._given = torch.ones(seats, **words)
        self._limit = torch.full((seats,), 2, **words)
        self._inverse_t = torch.zeros(seats, **floats)
        self._seed = torch.zeros(seats, **longs)
        self._done = torch.ones(seats, dtype=torch.bool, device=device)
        self._eos = torch.tensor(list(eos_ids), **words)
        self._offset = torch.arange(seats, **longs) * length
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._pages = torch.zeros(spec.num_layers, seats, 2, kv_heads, length, dim, **like)
        self._prefix: Tensor | None = None
        self._hidden = torch.zeros(seats, spec.hidden_size, **floats)
        self._x = torch.zeros(seats, spec.hidden_size, **like)
        self._qkv = torch.zeros(seats, (heads + 2 * kv_heads) * dim, **like)
        self._q = torch.zeros(seats, heads, dim, **like)
        self._attended = torch.zeros(seats, heads, dim, **like)
        self._gate_up = torch.zeros(seats, 2 * spec.intermediate_size, **like)
        self._act = torch.zeros(seats, spec.intermediate_size, **like)
        self._logits = torch.zeros(seats, spec.vocab_size, **floats)
        self._picked = torch.zeros(seats, **words)
        self._graph: Any | None = None
        self._compute_prefix()

    def assign(self, briefs: dict[int, Brief]) -> None:
        """Give seats work. A seat is taken from what it did before."""
        if not briefs:
            return
        places = sorted(briefs)
        rows = np.zeros((len(places), self.length), np.int32)
        table = np.zeros((len(places), 3), np.int64)
        heat = np.zeros(len(places), np.float32)
        for at, seat in enumerate(places):
            brief = briefs[seat]
            known = len(brief.ids)
            if not len(self.head) <= known < brief.limit <= self.length:
                raise ValueError(f"{known} ids of {brief.limit}, room for {self.length}")
            rows[at, :known] = brief.ids
            table[at] = known, brief.limit, brief.seed
            heat[at] = 1 / brief.temperature if brief.temperature > 0 else 0.0
        index = torch.tensor(places).to(self.device)
        numbers = torch.from_numpy(table).to(self.device)
        self.ids[index] = torch.from_numpy(rows).to(self.device)
        self._given[index] = numbers[:, 0].int()
        self._limit[index] = numbers[:, 1].int()
        self._seed[index] = numbers[:, 2]
        self._inverse_t[index] = torch.from_numpy(heat).to(self.device)
        fresh = torch.tensor([briefs[seat].is_new for seat in places]).to(self.device)
        # A seat that goes on feeds the id it ended with; a new one the last id of the head.
        begin = torch.where(fresh, len(self.head) - 1, self._position[index] + 1)
        self._position[index] = begin.int()
        self._done[index] = False
        new = [seat for seat in places if briefs[seat].is_new]
        if new and self._prefix is not None:
            head = self._prefix.shape[3]
            self._pages[:, torch.tensor(new).to(self.device), :, :, :head] = self._prefix[:, None]

    def run(self, steps: int) -> None:
        """Write up to so many tokens in each seat."""
        if self._graph is None and not self._is_plain:
            self._capture()
        for _ in range(steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def finished(self) -> dict[int, list[int]]:
        """All ids of the seats that have come to an end."""
        return self._rows(self._done)

    def unfinished(self) -> dict[int, list[int]]:
        """All ids so far of the seats that are at work."""
        return self._rows(~self._done)

    def _rows(self, mask: Tensor) -> dict[int, list[int]]:
        index = mask.nonzero()[:, 0]
        rows = self.ids[index].cpu().numpy()
        lengths = self._position[index].cpu().numpy() + (1 + self._done[index].int().cpu().numpy())
        return {
            int(seat): row[:length].tolist()
            for seat, row, length in zip(index.tolist(), rows, lengths, strict=True)
        }

    def _compute_prefix(self) -> None:
        """Keys and values of the head, in the first seat, copied to all that begin."""
        steps = len(self.head)
        self.ids[0, :steps] = torch.tensor(self.head, dtype=torch.int32, device=self.device)
        self._given[0], self._limit[0], self._done[0] = steps, steps + 1, False
        for _ in range(steps):
            self._step()
        self._prefix = self._pages[:, 0, :, :, :steps].clone()

    def _capture(self) -> None:
        saved = [t.clone() for t in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(self._state(), saved, strict=True):
            tensor.copy_(value)
        self._graph = graph

    def _state(self) -> tuple[Tensor, ...]:
        return self.ids, self._position, self._done

    def _step(self) -> None:
        """One token for each seat."""
        spec, weights, plain = self._weights.spec, self._weights, self._is_plain
        kernels = self._kernels
        attend = writer_triton.attend_plain if plain else writer_triton.attend
        pick = writer_triton.pick_plain if plain else writer_triton.pick
        at = self._position[:, None].long()
        tokens = self.ids.gather(1, at)[:, 0]
        slots = self._offset + self._position
        kernels.embed(tokens, weights.embedding, self._hidden)
        delta: Tensor | None = None
        for layer, pages in zip(weights.layers, self._pages, strict=True):
            rotary = replace(self._rotary, q_norm=layer.q_norm, k_norm=layer.k_norm)
            kernels.norm(self._hidden, delta, layer.attention_norm, spec.norm_eps, self._x)
            library_product(self._x, layer.qkv, self._qkv)
            kernels.rotate(self._qkv, layer.bias, rotary, self._position, slots, self._q, pages)
            attend(self._q, pages, self._position, self._attended, spec.head_dim**-0.5)
            library_product(self._attended.flatten(1), layer.o, self._x)
            kernels.norm(self._hidden, self._x, layer.feed_norm, spec.norm_eps, self._x)
            library_product(self._x, layer.gate_up, self._gate_up)
            kernels.gate(self._gate_up, self._act)
            delta = self._x
            library_product(self._act, layer.down, delta)
        kernels.norm(self._hidden, delta, weights.norm, spec.norm_eps, self._x)
        library_product(self._x, weights.head, self._logits)
        pick(self._logits, self._inverse_t, self._seed, self._position + 1, self._picked)
        self._advance()

    def _advance(self) -> None:
        at = self._position + 1
        place = at[:, None].long()
        known = self.ids.gather(1, place)[:, 0]
        token = torch.where(at < self._given, known, self._picked)
        self.ids.scatter_(1, place, torch.where(self._done, known, token)[:, None])
        ends = (token[:, None] == self._eos).any(1) | (at + 1 >= self._limit)
        self._done |= ends & (at >= self._given)
        self._position += (~self._done).int()
