"""Attention of an eagle head while it is unrolled over packed rows.

A row of the first depth sees the rows before it in its conversation, itself included. A row of a
later depth sees those of the first depth too, and its own of the depths between. Knows tensors and
a library's attention over conversations of different lengths; no head.

The part over many rows is the library's. The few own keys are added by hand: a softmax over both is
two softmaxes put together by their totals, and the library's backward pass gives the right slopes
once it is told the output and the totals of both.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_A_ROW = 32
"""Conversations of one packed row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where conversations begin in B rows of T, one after another."""

    starts: Tensor
    """[B MOST_A_ROW + 1] int32, ascending; the rest is B T."""
    width: int

    @classmethod
    def of(cls, documents: Tensor) -> Layout:
        """From the number of the conversation at every place, [B, T]; static shapes."""
        rows, width = documents.shape
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        place = torch.arange(rows * width, device=documents.device, dtype=torch.int32)
        found = torch.where(begins.flatten(), place, rows * width).sort().values
        most = rows * MOST_A_ROW + 1
        if len(found) < most:
            found = torch.nn.functional.pad(found, (0, most - len(found)), value=rows * width)
        return cls(found[:most].int(), width)


def look_back(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Any]:
    """Causal attention inside conversations, rows [N, H, D]; totals [H, N] float32 and a state."""
    if q.device.type != "cuda":
        visible, scale = _visible(len(q), layout), q.shape[-1] ** -0.5
        scores = torch.einsum("nhd,mhd->hnm", q, k).float() * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v.float()).to(q.dtype)
        return out, scores.logsumexp(-1), None
    starts, width = layout.starts, layout.width
    out, totals, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, width, width, 0.0, True, False
    )
    return out, totals, state


def look_back_slopes(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, totals: Tensor, state: Any,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Slopes of q, k and v, from the output and the totals over all that a row saw."""
    if q.device.type != "cuda":
        visible, scale = _visible(len(q), layout), q.shape[-1] ** -0.5
        scores = torch.einsum("nhd,mhd->hnm", q, k).float() * scale
        shares = (scores - totals[..., None]).exp().masked_fill(~visible, 0.0)
        gain = torch.einsum("nhd,mhd->hnm", slope.float(), v.float())
        delta = (slope.float() * out.float()).sum(-1).T
        inner = shares * (gain - delta[..., None]) * scale
        return (
            torch.einsum("hnm,mhd->nhd", inner, k.float()),
            torch.einsum("hnm,nhd->mhd", inner, q.float()),
            torch.einsum("hnm,nhd->mhd", shares, slope.float()),
        )
    starts, width = layout.starts, layout.width
    return torch.ops.aten._flash_attention_backward(
        slope, q, k, v, out, totals, starts, starts, width, width, 0.0, True, *state
    )


def _visible(count: int, layout: Layout) -> Tensor:
    place = torch.arange(count, device=layout.starts.device, dtype=torch.int32)
    number = torch.searchsorted(layout.starts, place, right=True)
    return (number[:, None] == number) & (place[:, None] >= place)


class Attention(torch.autograd.Function):
    """q [N, HQ, D], k and v [N, HK, D] of the first depth, own keys and values [M, N, HK, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, layout: Layout
    ) -> Tensor:
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (part.repeat_interleave(group, 1) for part in (k, v))
        out, totals, state = look_back(q, wide_k, wide_v, layout)
        shares = None
        if len(own_k):
            by_group = q.float().unflatten(1, (-1, group))
            scores = torch.einsum("nhgd,mnhd->mnhg", by_group, own_k.float()) * q.shape[-1] ** -0.5
            scores = scores.flatten(2)
            stored = totals.T
            both = torch.logaddexp(stored, scores.logsumexp(0))
            shares = (scores - both).exp()
            own = torch.einsum("mnhg,mnhd->nhgd", shares.unflatten(2, (-1, group)), own_v.float())
            kept = (stored - both).exp()[..., None]
            out = (kept * out.float() + own.flatten(1, 2)).to(q.dtype)
            totals = both.T.contiguous()
        ctx.save_for_backward(q, wide_k, wide_v, own_k, own_v, out, totals, shares)
        ctx.layout, ctx.state, ctx.group = layout, state, group
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        q, wide_k, wide_v, own_k, own_v, out, totals, shares = ctx.saved_tensors
        slope, group = slopes[0].to(q.dtype).contiguous(), ctx.group
        for_q, for_k, for_v = look_back_slopes(
            slope, q, wide_k, wide_v, out, totals, ctx.state, ctx.layout
        )
        for_k, for_v = (part.unflatten(1, (-1, group)).sum(2) for part in (for_k, for_v))
        if shares is None:
            return for_q, for_k, for_v, None, None, None
        wide, by_group = (part.float().unflatten(1, (-1, group)) for part in (slope, q))
        shares = shares.unflatten(2, (-1, group))
        delta = (slope.float() * out.float()).sum(-1).unflatten(1, (-1, group))
        gain = torch.einsum("nhgd,mnhd->mnhg", wide, own_v.float())
        inner = shares * (gain - delta) * q.shape[-1] ** -0.5
        own = torch.einsum("mnhg,mnhd->nhgd", inner, own_k.float()).flatten(1, 2)
        return (
            for_q.float() + own,
            for_k,
            for_v,
            torch.einsum("mnhg,nhgd->mnhd", inner, by_group),
            torch.einsum("mnhg,nhgd->mnhd", shares, wide),
            None,
        )


class PackedAttention:
    """`Attend` of one unrolling, a call a depth, over rows [B, T, heads, D].

    Args:
        documents: [B, T]; a row sees rows of its own conversation.
        dtype: Of the products.
    """

    def __init__(self, documents: Tensor, dtype: torch.dtype) -> None:
        self._layout = Layout.of(documents)
        self._dtype = dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.shape[:2]
        q, k, v = (part.to(self._dtype).flatten(0, 1).contiguous() for part in (q, k, v))
        self._keys.append(k)
        self._values.append(v)
        none = k.new_empty(0, *k.shape)
        own_k = torch.stack(self._keys[1:]) if len(self._keys) > 1 else none
        own_v = torch.stack(self._values[1:]) if len(self._values) > 1 else none
        out = Attention.apply(q, self._keys[0], self._values[0], own_k, own_v, self._layout)
        return out.unflatten(0, rows).float()  # type: ignore[union-attr]
