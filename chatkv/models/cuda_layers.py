"""The Llama family's forward pass on a device, layer by layer, over rows in buffers of their own.

Knows weights, rows, slots and the attention backend; no sequence, no sampling, no captured graph.
A step has the linear layers of `skinny_triton.py`: for a narrow model with the norms inside them,
for a wide one with products cut in parts that the norm adds up; or a library's, in checked pieces.
A prompt chunk has the library's at one fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.attention.triton_tree import TritonBackend, supports_pdl
from chatkv.kv.pool import PagePool
from chatkv.models import fused_triton as fused
from chatkv.models import skinny_tiles
from chatkv.models import skinny_triton as skinny
from chatkv.models.chunks import attend_chunk
from chatkv.models.dense import DenseLayer, DenseWeights
from chatkv.models.fused_triton import Scaled
from chatkv.models.heads_triton import Rotary, rotate_rows
from chatkv.models.spec import ModelSpec

Linear = Literal["triton", "library"]
NARROW = 1024
"""Widest residual that is normed inside the products around it. Part of the bits."""
CHUNK_HEADS = 8
"""Heads of one program while a chunk is rotated. Part of the bits where heads are normed."""
PDL_ROWS = 512
"""Rows of a chunk up to which kernels start early: where a kernel fills the device, those that wait
for it are in its way."""
PAGE_SIZE = 64
"""Slots of a page on a device."""
CONTEXT_LIMIT = 1 << 17
"""Positions that are kept at most: their angles, and their pages in a captured step."""
SPARE_POSITIONS = 64
"""Rows of a tree may stand behind the last position of the context."""


@dataclass(frozen=True, slots=True)
class Rows:
    """T rows to run, on the device."""

    tokens: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32."""
    slots: Tensor
    """[T] int64 physical; -1 stores nothing."""
    call: AttentionCall | None = None
    """None in a prompt chunk, which has an attention of its own."""


@dataclass(frozen=True, slots=True)
class Room:
    """Buffers of T rows, used again by every layer and every step. What is not used is empty."""

    hidden: Tensor
    """[T, H] float32, the residual."""
    x: Tensor
    """[T, H], normed, or on its way through a norm."""
    squares: Tensor
    """[T, P] of `Scaled`."""
    qkv: Tensor
    """[T, (HQ + 2 HK) D] before rotation."""
    q: Tensor
    """[T, HQ, D]."""
    parts: Tensor
    """[S, T, H] float32, products that are still to be added up."""
    gate_up: Tensor
    """[T, 2 I]."""
    act: Tensor
    """[T, I]."""
    logits: Tensor
    """[T, V] float32."""
    tapped: Tensor
    """[taps, T, H] float32, the residual behind the layers that are tapped."""

    def first(self, rows: int) -> Room:
        """The same buffers for fewer rows. Not for products in parts."""
        return Room(
            self.hidden[:rows], self.x[:rows], self.squares[:rows], self.qkv[:rows], self.q[:rows],
            self.parts, self.gate_up[:rows], self.act[:rows], self.logits[:rows],
            self.tapped[:, :rows],
        )  # fmt: skip


class Layers:
    """The weights with everything a pass needs beside them.

    Args:
        weights: On one device.
        backend: Attention of steps.
        linear: `triton`, or `library` for torch's matrix products in checked pieces.
    """

    def __init__(
        self, weights: DenseWeights, backend: TritonBackend, linear: Linear = "triton"
    ) -> None:
        self.weights = weights
        self.backend = backend
        self.linear: Linear = linear
        self.taps: tuple[int, ...] = ()
        """Layers, counted from 1, whose residual a step leaves in `Room.tapped`."""
        self.pieces: Mapping[tuple[int, int, int], int] = {}
        """(rows, outputs, inputs) -> rows that may go through the library at once: `row_check`."""
        self.spec = spec = weights.spec
        self.device = weights.device
        self.pdl = supports_pdl(self.device)
        self.is_narrow = spec.hidden_size <= NARROW
        self.rotates = weights.layers[0].q_norm is None
        """Whether rotation happens inside the product; not behind a norm over heads."""
        self._rotaries = self._rotary_of_layers()
        norms = [
            norm for layer in weights.layers for norm in (layer.attention_norm, layer.feed_norm)
        ]
        self._norms = [*norms, weights.norm]

    @property
    def rotary(self) -> Rotary:
        """Of the first layer."""
        return self._rotaries[0]

    @property
    def splits(self) -> int:
        """S of `Room.parts`: the most parts of a product."""
        layer = self.weights.layers[0]
        return max(skinny_tiles.split_tile(*weight.shape).split for weight in (layer.o, layer.down))

    def room(
        self, rows: int, *, with_logits: bool = True, chunk: bool = False, codes: bool = False
    ) -> Room:
        """Buffers for that many rows; `codes` for a step over quantised pages."""
        spec = self.spec
        like: dict[str, Any] = {"dtype": self.weights.dtype, "device": self.device}
        floats: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        own = self.linear == "triton" and not chunk
        width, hidden = all_heads_width(spec), spec.hidden_size
        narrow = own and self.is_narrow
        blocks = skinny_tiles.residual_blocks(hidden) if narrow else 0
        # Cleared once: rows that are padding must be finite.
        return Room(
            hidden=torch.zeros(rows, hidden, **floats),
            x=torch.zeros(rows, hidden, **like),
            squares=torch.zeros(rows, blocks, **floats),
            qkv=torch.zeros(
                0 if own and self.rotates and not codes else rows,
                width,
                **(floats if own else like),
            ),
            q=torch.zeros(rows, spec.num_heads, spec.head_dim, **like),
            parts=torch.zeros(self.splits if own and not narrow else 0, rows, hidden, **floats),
            gate_up=torch.zeros(0 if own else rows, 2 * spec.intermediate_size, **like),
            act=torch.zeros(rows, spec.intermediate_size, **like),
            logits=torch.zeros(rows if with_logits else 0, spec.vocab_size, **floats),
            tapped=torch.zeros(len(self.taps) if with_logits else 0, rows, hidden, **floats),
        )

    def step(self, rows: Rows, pool: PagePool, room: Room, *, want_logits: bool) -> None:
        """Run rows of any sequences: K/V into the pages, logits of all rows into the room."""
        spec, weights = self.spec, self.weights
        assert rows.call is not None, "a step attends to pages"
        calls = {window: rows.call.within(window) for window in {*spec.windows} or {None}}
        plans = {
            window: self.backend.plan(
                call, spec.num_heads, spec.num_kv_heads, spec.head_dim, pool.page_size
            )
            for window, call in calls.items()
        }
        x = self._begin(rows, room)
        for place, (layer, stored) in enumerate(zip(weights.layers, pool.layers, strict=True)):
            self._project_heads(layer, self._rotaries[place], x, rows, room, *stored)
            (pages, scales), window = stored, spec.window(place)
            attended, _ = self.backend.attend(
                calls[window], room.q, pages, scales=scales, plan=plans[window]
            )
            self._add(attended.flatten(1), layer.o, self._norms[2 * place + 1], room)
            if self.linear == "triton":
                skinny.gate_project(x, layer.gate_up, room.act, pdl=self.pdl)
            else:
                self.multiply(room.x, layer.gate_up, room.gate_up)
                fused.gate_rows(room.gate_up, room.act, pdl=self.pdl)
            self._add(room.act, layer.down, self._norms[2 * place + 2], room)
            if want_logits:
                for tap in self.places(place + 1):
                    room.tapped[tap].copy_(room.hidden)
        if not want_logits:
            return
        if self.linear == "triton":
            skinny.project(x, weights.head, room.logits, pdl=self.pdl)
        else:
            self.multiply(room.x, weights.head, room.logits)

    def places(self, layer: int) -> list[int]:
        """Where the residual behind a layer is kept: with few layers, maybe more than once."""
        return [place for place, tap in enumerate(self.taps) if tap == layer]

    def _begin(self, rows: Rows, room: Room) -> Tensor | Scaled:
        """Embed; what the first product reads, and all later ones of the same room."""
        table, norm, eps = self.weights.embedding, self._norms[0], self.spec.norm_eps
        if self.linear == "triton" and self.is_narrow:
            scaled = Scaled(room.x, room.squares, eps)
            fused.embed_rows(
                rows.tokens, table, room.hidden, norm=norm, scaled=scaled, pdl=self.pdl
            )
            return scaled
        fused.embed_rows(rows.tokens, table, room.hidden, pdl=self.pdl)
        fused.norm_rows(room.hidden, None, norm, eps, room.x, pdl=self.pdl)
        return room.x

    def _project_heads(
        self, layer: DenseLayer, rotary: Rotary, x: Tensor | Scaled, rows: Rows, room: Room,
        pages: Tensor, scales: Tensor | None,
    ) -> None:  # fmt: skip
        # A scale is over a whole head, and a program of that product has a part of one.
        if self.linear == "triton" and self.rotates and scales is None:
            skinny.rotate_project(
                x, layer.qkv, layer.bias, rotary, rows.positions, rows.slots, room.q, pages,
                pdl=self.pdl,
            )  # fmt: skip
            return
        if self.linear == "triton":
            skinny.project(x, layer.qkv, room.qkv, pdl=self.pdl)
        else:
            self.multiply(room.x, layer.qkv, room.qkv)
        rotate_rows(
            room.qkv, layer.bias, rotary, rows.positions, rows.slots, room.q, pages, scales,
            pdl=self.pdl,
        )  # fmt: skip

    def _add(self, rows: Tensor, weight: Tensor, norm: Tensor, room: Room) -> None:
        """Add a product to the residual, and norm that for the next product."""
        eps = self.spec.norm_eps
        if self.linear == "triton" and self.is_narrow:
            scaled = Scaled(room.x, room.squares, eps)
            skinny.add_project(rows, weight, room.hidden, norm, scaled, pdl=self.pdl)
            return
        if self.linear == "triton":
            delta = room.parts[: skinny_tiles.split_tile(*weight.shape).split]
            skinny.project_parts(rows, weight, delta, pdl=self.pdl)
        else:
            delta = room.x
            self.multiply(rows, weight, delta)
        fused.norm_rows(room.hidden, delta, norm, eps, room.x, pdl=self.pdl)

    def head(self, room: Room) -> None:
        """Logits of what `chunk` left, in a room of a step."""
        weights = self.weights
        fused.norm_rows(room.hidden, room.x, weights.norm, self.spec.norm_eps, room.x)
        if self.linear == "triton":
            skinny.project(room.x, weights.head, room.logits)
        else:
            self.multiply(room.x, weights.head, room.logits)

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [T, N] = x weight^T by the library, in pieces of as many rows as were checked."""
        rows = len(x)
        size = self.pieces.get((rows, weight.shape[0], weight.shape[1]), rows)
        for first in range(0, rows, size):
            library_product(x[first : first + size], weight, out[first : first + size])

    def chunk(
        self, rows: Rows, pool: PagePool, room: Room, table: Tensor, span: Tensor,
        tap: Callable[[int], None] | None = None, *, holes: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Run the rows of one prompt chunk; the residual and what is to be added stay in the room.

        Args:
            rows: All rows of the chunk, padding included. Their call is not read.
            table, span, holes: As in `chunks.attend_chunk`.
            tap: Called with 1, 2, ... when the residual behind that layer is whole. Not for the
                last layer.
        """
        eps, pdl = self.spec.norm_eps, self.pdl and len(rows.tokens) <= PDL_ROWS
        fused.embed_rows(rows.tokens, self.weights.embedding, room.hidden, pdl=pdl)
        delta: Tensor | None = None
        for place, (layer, (pages, scales)) in enumerate(
            zip(self.weights.layers, pool.layers, strict=True)
        ):
            rotary = self._rotaries[place]
            fused.norm_rows(room.hidden, delta, layer.attention_norm, eps, room.x, pdl=pdl)
            if tap is not None and place:
                tap(place)
            library_product(room.x, layer.qkv, room.qkv)
            rotate_rows(
                room.qkv, layer.bias, rotary, rows.positions, rows.slots, room.q, pages, scales,
                heads_a_program=CHUNK_HEADS, pdl=pdl,
            )  # fmt: skip
            window = self.spec.window(place) or 0
            attend_chunk(
                room.q, pages, table, span, room.q, scales, holes=holes, window=window, pdl=pdl
            )
            library_product(room.q.flatten(1), layer.o, room.x)
            fused.norm_rows(room.hidden, room.x, layer.feed_norm, eps, room.x, pdl=pdl)
            library_product(room.x, layer.gate_up, room.gate_up)
            fused.gate_rows(room.gate_up, room.act, pdl=pdl)
            delta = room.x
            library_product(room.act, layer.down, delta)

    def _rotary_of_layers(self) -> list[Rotary]:
        spec = self.spec
        stop = min(spec.context_limit, CONTEXT_LIMIT) + SPARE_POSITIONS
        steps = torch.arange(0, spec.head_dim, 2, dtype=torch.float64)
        frequencies = spec.rope_theta ** (-steps / spec.head_dim)
        if spec.rope_factors:
            frequencies /= torch.tensor(spec.rope_factors, dtype=torch.float64)
        # On the host, so that the angles are the same on every device.
        angles = torch.arange(stop, dtype=torch.float64)[:, None] * frequencies
        cos, sin = (table.float().to(self.device) for table in (angles.cos(), angles.sin()))
        return [
            Rotary(
                cos, sin, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                layer.q_norm, layer.k_norm, spec.norm_eps,
            )
            for layer in self.weights.layers
        ]  # fmt: skip


def most_slots(spec: ModelSpec, has_holes: bool) -> int:
    """Slots of the longest table that is run. Where something was forgotten, pages are filled in
    part: with twice the room, on average half."""
    return min(spec.context_limit, CONTEXT_LIMIT) * (2 if has_holes else 1)


def all_heads_width(spec: ModelSpec) -> int:
    """Columns of queries, keys and values together."""
    return (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


def library_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, N] = x [T, K] weight [N, K]^T by the library; float32 out is not rounded between."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.T, out=out)
    elif x.device.type == "cuda":
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), weight.T.to(out.dtype), out=out)
