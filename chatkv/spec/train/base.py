"""The frozen target over packed rows: what heads read, and what they are to guess.

Knows weights and rows of ids; whole rows at once, no cache. States are those of training: near the
engine's, not its bits.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.attention.triton_tree import TritonBackend
from chatkv.models.cuda_layers import Layers, library_product
from chatkv.models.dense import DenseWeights
from chatkv.spec.heads.shape import taps_of
from chatkv.spec.train import loss_triton
from chatkv.spec.train.kernels import kernels_for
from chatkv.spec.train.packed_attention import Layout, look_back

CHUNK = 4096
"""Rows of logits over the whole vocabulary at once."""
PAGE = 64
"""Rows of a page of keys and values, which the rotating kernel stores them in."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows on the device, [R, T] each."""

    ids: Tensor
    documents: Tensor
    positions: Tensor
    written: Tensor


@dataclass(frozen=True, slots=True)
class Taps:
    """What the target computed over packed rows."""

    states: Tensor
    """[R, T, taps, H] in the dtype of the weights: outputs of the tapped layers."""
    log_total: Tensor
    """[R, T] float32: log of the sum of exp of all logits. Empty if not asked for."""


class Base:
    """A target that reads rows."""

    def __init__(self, weights: DenseWeights) -> None:
        self.weights = weights
        self.taps = taps_of(weights.spec.num_layers)
        self._rotary = Layers(weights, TritonBackend(), "library").rotary
        self._kernels = kernels_for(weights.device)

    @torch.no_grad()
    def run(self, rows: Rows, *, with_totals: bool = True) -> Taps:
        """One pass; each conversation sees itself only."""
        weights, spec, kernels = self.weights, self.weights.spec, self._kernels
        count, width = rows.ids.shape
        total, eps, dtype, device = count * width, spec.norm_eps, weights.dtype, weights.device
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        hidden = torch.empty(total, spec.hidden_size, device=device)
        x = torch.empty(total, spec.hidden_size, dtype=dtype, device=device)
        qkv = torch.empty(total, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
        q = torch.empty(total, heads, dim, dtype=dtype, device=device)
        pages = torch.empty(-(-total // PAGE), 2, kv_heads, PAGE, dim, dtype=dtype, device=device)
        act = torch.empty(total, spec.intermediate_size, dtype=dtype, device=device)
        states = torch.empty(total, len(self.taps), spec.hidden_size, dtype=dtype, device=device)
        positions = rows.positions.flatten().contiguous()
        slots = torch.arange(total, device=device)
        delta: Tensor | None = None
        kernels.embed(rows.ids.flatten().contiguous(), weights.embedding, hidden)
        for number, layer in enumerate(weights.layers):
            rotary = replace(self._rotary, q_norm=layer.q_norm, k_norm=layer.k_norm)
            kernels.norm(hidden, delta, layer.attention_norm, eps, x)
            self._keep(number, hidden, states)
            library_product(x, layer.qkv, qkv)
            kernels.rotate(qkv, layer.bias, rotary, positions, slots, q, pages)
            k, v = (pages[:, part].transpose(1, 2).flatten(0, 1)[:total] for part in (0, 1))
            x = F.linear(attend(q, k, v, rows.documents).flatten(1), layer.o)
            kernels.norm(hidden, x, layer.feed_norm, eps, x)
            kernels.gate(F.linear(x, layer.gate_up), act)
            delta = x
            library_product(act, layer.down, delta)
        kernels.norm(hidden, delta, weights.norm, eps, x)
        self._keep(spec.num_layers, hidden, states)
        totals = self._log_totals(x).view(count, width) if with_totals else hidden.new_empty(0)
        return Taps(states.view(count, width, *states.shape[1:]), totals)

    def _keep(self, number: int, hidden: Tensor, states: Tensor) -> None:
        # A model of few layers has one tap more than once.
        for place, tap in enumerate(self.taps):
            if tap == number:
                states[:, place] = hidden

    def _log_totals(self, x: Tensor) -> Tensor:
        """[N] float32 of the normed residual [N, H]."""
        head, total = self.weights.head, loss_triton.log_totals_plain
        if x.device.type == "cuda":
            total = loss_triton.log_totals
        out = torch.empty(len(x), dtype=torch.float32, device=x.device)
        logits = torch.empty(min(CHUNK, len(x)), len(head), dtype=torch.float32, device=x.device)
        for first in range(0, len(x), CHUNK):
            part = x[first : first + CHUNK]
            library_product(part, head, logits[: len(part)])
            total(logits[: len(part)], out[first : first + CHUNK])
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Causal attention inside conversations: q [R T, HQ, D], k and v [R T, HK, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    if q.device.type == "cuda":
        return look_back(q, k, v, Layout.of(documents))[0]
    rows = documents.shape
    causal = torch.ones(rows[1], rows[1], dtype=torch.bool).tril()
    visible = (documents[:, :, None] == documents[:, None, :]) & causal
    q, k, v = (part.unflatten(0, rows).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
    return mixed.transpose(1, 2).flatten(0, 1)


def last_rows(weights: DenseWeights, hidden: Tensor) -> Tensor:
    """What the target multiplies with its head, of the last tap [..., H]."""
    normed = F.rms_norm(hidden.float(), hidden.shape[-1:], weights.norm, weights.spec.norm_eps)
    return normed.to(weights.dtype)
