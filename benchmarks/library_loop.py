"""A plain step as a careful user builds it from libraries: the peer of our own captured step.

One row, cuBLAS, the attention of torch over one contiguous cache, and between them our row kernels,
which are faster than what a compiler makes of the same lines. Captured as one graph. Its cache has
a fixed length and is read whole, so it pays for no lengths on the device: a bound, not a program.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chatkv.models import fused_triton as fused
from chatkv.models.cuda_layers import Layers, library_product
from chatkv.models.heads_triton import rotate_rows

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [1, HQ, 1, D], keys, values [1, HK, S, D], scale) to [1, HQ, 1, D]."""


def _flash(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, keys, values, 0.0, False, False, scale=scale
    )[0]


def _cudnn(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, keys, values, None, False, 0.0, False, False, scale=scale
    )[0]


ATTENTIONS: dict[str, Attend] = {"flash": _flash, "cudnn": _cudnn}


def library_step(layers: Layers, context: int, attention: str) -> torch.cuda.CUDAGraph:
    """A captured plain step behind `context` - 1 slots of noise.

    Raises:
        RuntimeError: The library does not serve the shape.
    """
    spec, weights, attend = layers.spec, layers.weights, ATTENTIONS[attention]
    like = {"dtype": weights.dtype, "device": layers.device}
    # One page a layer, as long as the context.
    shape = (spec.num_layers, 1, 2, spec.num_kv_heads, context, spec.head_dim)
    cache = torch.randn(shape, **like)
    room = layers.room(1, chunk=True)
    token = torch.zeros(1, dtype=torch.int32, device=layers.device)
    place = torch.full((1,), context - 1, dtype=torch.int32, device=layers.device)
    slot, pdl, eps = place.long(), layers.pdl, spec.norm_eps

    def step() -> None:
        fused.embed_rows(token, weights.embedding, room.hidden, pdl=pdl)
        delta = None
        for layer, rotary, pages in zip(weights.layers, layers._rotaries, cache, strict=True):
            fused.norm_rows(room.hidden, delta, layer.attention_norm, eps, room.x, pdl=pdl)
            library_product(room.x, layer.qkv, room.qkv)
            rotate_rows(room.qkv, layer.bias, rotary, place, slot, room.q, pages, pdl=pdl)
            keys, values = pages[0][:, None]
            out = attend(room.q.transpose(0, 1)[None], keys, values, spec.head_dim**-0.5)
            library_product(out.reshape(1, -1), layer.o, room.x)
            fused.norm_rows(room.hidden, room.x, layer.feed_norm, eps, room.x, pdl=pdl)
            library_product(room.x, layer.gate_up, room.gate_up)
            fused.gate_rows(room.gate_up, room.act, pdl=pdl)
            delta = room.x
            library_product(room.act, layer.down, delta)
        fused.norm_rows(room.hidden, delta, weights.norm, eps, room.x, pdl=pdl)
        library_product(room.x, weights.head, room.logits)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
