"""The three kinds of draft head as plain torch modules, for training and for guessing.

Rows are independent, shapes are static and nothing is read back, so a guess can be captured in a
graph. States are float32; products run in the dtype of the weights, or in that of autocast.

The root x_1 is the token the target has just chosen at a row, and the taps are of that row. State i
stands behind x_1 .. x_i and guesses x_{i+1}:

    features    f   = W_f [rms(tap) for each tap]
    recurrent   s_i = s_{i-1} + W_d (silu(W_g z) * W_u z),  s_0 = f,
                      z = [rms(s_{i-1}); rms(E[x_i])]
    parallel    s_i = f + silu(W_i f)
    eagle       s_i = one decoder layer over [E[x_i]; s_{i-1}], s_0 = f, which sees earlier rows
    guess       logits = E[draft ids] (gamma * rms(s_i)),  confidence = sigmoid(w . s_i + b)
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chatkv.spec.heads.shape import HeadShape

WINDOW = 512
"""Rows an eagle head looks back on when it guesses. It copies from far back: over answers to 9
MT-bench prompts at temperature 0.7, trees of 8 rows gained 2.00, 2.15, 2.47 and 2.64 tokens a step
with 64, 128, 256 and 512 of them."""


class Attend(Protocol):
    """Attention of an eagle layer over whatever holds its keys and values.

    Takes rotated queries [..., HQ, D], rotated keys and values [..., HK, D] of the new rows, and
    gives [..., HQ, D].
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in the dtype of the weights, or of autocast."""
    return F.linear(x.to(weight.dtype), weight)


class Head(nn.Module):
    """What the kinds share: taps to features, states to guesses."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        self.fuse = nn.Parameter(torch.empty(hidden, shape.features))
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.confidence = nn.Parameter(torch.zeros(hidden + 1))
        # Begins as the last tap, which the target itself reads its guess from.
        nn.init.normal_(self.fuse, std=0.3 / shape.features**0.5)
        with torch.no_grad():
            self.fuse[:, -hidden:] += torch.eye(hidden)

    def features(self, taps: Tensor) -> Tensor:
        """[..., hidden] float32 of taps [..., taps, hidden]."""
        read = rms(taps) if self.shape.source == "chatkv" else taps
        return product(read.flatten(-2), self.fuse).float()

    def readout(self, state: Tensor) -> Tensor:
        """[..., hidden], to be multiplied with the embeddings of the draft ids."""
        return rms(state, eps=self.shape.eps) * self.gamma

    def reading(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """`readout` and `doubt` of the same states."""
        normed, w = rms(state, eps=self.shape.eps), self.confidence.float()
        return normed * self.gamma, (normed * w[:-1]).sum(-1) + w[-1]

    def logits(self, state: Tensor, rows: Tensor) -> Tensor:
        """[..., K] float32 over draft ids whose embeddings are rows [K, hidden].

        The ids are sorted by frequency: fewer rows are the most frequent ones.
        """
        return product(self.readout(state), rows).float()

    def doubt(self, state: Tensor) -> Tensor:
        """[...] float32: sigmoid of it is the chance that the best guess is right."""
        return self.reading(state)[1]


class RecurrentHead(Head):
    """One small cell, the same weights at every depth."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.gate = _matrix(shape.inner, 2 * shape.hidden)
        self.up = _matrix(shape.inner, 2 * shape.hidden)
        self.down = _matrix(shape.hidden, shape.inner)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The state behind one more token, given its embedding [..., hidden]."""
        z = torch.cat([rms(state), rms(embedded)], -1)
        return state + product(F.silu(product(z, self.gate)) * product(z, self.up), self.down)


class ParallelHead(Head):
    """Medusa: a block a depth, all of them blind to what the others guess."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.blocks = nn.Parameter(torch.zeros(shape.depth, shape.hidden, shape.hidden))
        nn.init.normal_(self.blocks, std=0.3 / shape.hidden**0.5)

    def fan(self, features: Tensor) -> Tensor:
        """[..., depth, hidden]: the states of all depths at once."""
        wide = product(features, self.blocks.flatten(0, 1))
        return features[..., None, :] + F.silu(wide.unflatten(-1, self.blocks.shape[:2]))


class EagleHead(Head):
    """One decoder layer with keys and values of its own."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        hidden, dim = shape.hidden, shape.head_dim
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.token_norm = nn.Parameter(torch.ones(hidden))
        self.state_norm = nn.Parameter(torch.ones(hidden))
        self.feed_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = _matrix(heads * dim, 2 * hidden)
        self.o = _matrix(hidden, shape.num_heads * dim)
        self.gate = _matrix(shape.inner, hidden)
        self.up = _matrix(shape.inner, hidden)
        self.down = _matrix(hidden, shape.inner)
        self.rows: nn.Parameter | None = None
        """[K, hidden] to guess with, of a head that was imported; else the target lends its own."""
        if shape.source == "eagle3":
            self.rows = _matrix(shape.draft_ids, hidden)

    def advance(
        self, state: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """The state behind one more token.

        Args:
            state: [..., hidden].
            embedded: [..., hidden] of the token.
            angles: cos and sin [..., D / 2] of the position of the row.
            attend: Keeps the keys and values of these rows and attends to what they may see.
        """
        q, k, v = self._heads(state, embedded, angles)
        mixed = attend(q, k, v)
        if self.shape.norms_residual:
            state = rms(state, self.state_norm, self.shape.eps)
        state = state + product(mixed.flatten(-2), self.o)
        z = rms(state, self.feed_norm, self.shape.eps)
        return state + product(F.silu(product(z, self.gate)) * product(z, self.up), self.down)

    def stored(
        self, features: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [..., HK, D] of rows whose next tokens are settled, from their features.

        These are what `advance` of the first depth hands to `attend`; they stay for good.
        """
        _, k, v = self._heads(features, embedded, angles)
        return k, v

    def _heads(
        self, state: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        eps = shape.eps
        z = torch.cat([rms(embedded, self.token_norm, eps), rms(state, self.state_norm, eps)], -1)
        heads = product(z, self.qkv).unflatten(-1, (-1, shape.head_dim))
        q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], -2)
        return rotate(q, *angles), rotate(k, *angles), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary positions of x [..., heads, D]; angles [..., D / 2]."""
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def angles_of(shape: HeadShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., D / 2] float32 of positions [...]."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = shape.rope_theta ** (-steps / shape.head_dim)
    if shape.rope_factors:
        frequencies = frequencies / steps.new_tensor(shape.rope_factors)
    angles = positions[..., None].double() * frequencies
    return angles.cos().float(), angles.sin().float()


def new_head(shape: HeadShape) -> Head:
    """An untrained head of that kind."""
    return {"recurrent": RecurrentHead, "parallel": ParallelHead, "eagle": EagleHead}[shape.kind](
        shape
    )


def _matrix(outputs: int, inputs: int) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(outputs, inputs))
    nn.init.normal_(weight, std=0.5 / inputs**0.5)
    return weight


def parameters_of(head: Head) -> Sequence[tuple[str, nn.Parameter]]:
    """Names and weights, in the order of the file."""
    return sorted(head.named_parameters())
