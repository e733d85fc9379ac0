"""A model's weights as plain tensors on one device, in the order the device's layers read them.

Knows shapes and places; no file format and no forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chatkv.errors import ModelError
from chatkv.models.spec import ModelSpec
from chatkv.models.weights import Matrix, Weights

GIB = 2**30
HEADROOM_BYTES = GIB
"""Kept free while loading: libraries' workspaces, captured steps, rows of a prompt chunk."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One decoder layer; matrices [outputs, inputs] in the model's dtype, vectors float32."""

    qkv: Tensor
    """[(HQ + 2 HK) D, H]; queries and keys in half-split rotary order."""
    o: Tensor
    """[H, HQ D]."""
    gate_up: Tensor
    """[2 I, H], the gates first."""
    down: Tensor
    """[H, I]."""
    attention_norm: Tensor
    feed_norm: Tensor
    bias: Tensor | None = None
    """[(HQ + 2 HK) D] of qkv."""
    q_norm: Tensor | None = None
    """[D], over each query head."""
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """All tensors of a model."""

    spec: ModelSpec
    embedding: Tensor
    """[V, H]."""
    head: Tensor
    """[V, H]; the embedding itself when the model ties them."""
    norm: Tensor
    """[H] float32."""
    layers: tuple[DenseLayer, ...]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def needed_bytes(spec: ModelSpec, dtype: torch.dtype, tied: bool) -> dict[str, int]:
    """Bytes on the device by part."""
    hidden, wide = spec.hidden_size, spec.num_heads * spec.head_dim
    narrow = spec.num_kv_heads * spec.head_dim
    layer = hidden * (2 * wide + 2 * narrow) + 3 * hidden * spec.intermediate_size
    return {
        "layers": spec.num_layers * layer * dtype.itemsize,
        "vocabulary": (1 if tied else 2) * spec.vocab_size * hidden * dtype.itemsize,
    }


def expect_room(spec: ModelSpec, dtype: torch.dtype, tied: bool, device: torch.device) -> None:
    """Raise unless a model of this shape fits what is free.

    Raises:
        ModelError: With what is needed, by part, and what is free.
    """
    if device.type != "cuda":
        return
    parts = needed_bytes(spec, dtype, tied)
    free = torch.cuda.mem_get_info(device)[0]
    if sum(parts.values()) + HEADROOM_BYTES <= free:
        return
    named = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items())
    needed = (sum(parts.values()) + HEADROOM_BYTES) / GIB
    raise ModelError(
        f"{spec.name} needs {needed:.1f} GiB on {device} ({named}, working room "
        f"{HEADROOM_BYTES / GIB:.1f}), but {free / GIB:.1f} GiB are free.",
        hint="Use a smaller model, close what else uses the device, or choose --device cpu.",
    )


def from_packed(
    model: Weights,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> DenseWeights:
    """The dequantised weights of a converted file, each rounded to `dtype` once.

    Raises:
        ModelError: The device has no room.
    """
    spec = model.spec
    expect_room(spec, dtype, model.head == model.vocabulary, device)

    def matrix(packed: Matrix) -> Tensor:
        return torch.from_numpy(model.dense(packed)).to(device).to(dtype)

    def vector(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    layers: list[DenseLayer] = []
    for i, parts in enumerate(model.layers):
        if progress is not None:
            progress("loading", i, spec.num_layers)
        # Packed in blocks of 32 gates and their 32 ups.
        pairs = matrix(parts["gate_up"]).view(-1, 2, 32, spec.hidden_size)
        layers.append(
            DenseLayer(
                qkv=matrix(parts["qkv"]),
                o=matrix(parts["o"]),
                gate_up=pairs.transpose(0, 1).reshape(-1, spec.hidden_size).contiguous(),
                down=matrix(parts["down"]),
                attention_norm=vector(model.norms[2 * i]),
                feed_norm=vector(model.norms[2 * i + 1]),
            )
        )
    embedding = matrix(model.vocabulary)
    head = embedding if model.head == model.vocabulary else matrix(model.head)
    return DenseWeights(spec, embedding, head, vector(model.norms[-1]), tuple(layers))
