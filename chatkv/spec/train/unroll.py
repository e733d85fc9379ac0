"""A head over packed rows, all depths, on its own states. Knows modules and rows; no optimiser."""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chatkv.spec.heads.modules import EagleHead, Head, ParallelHead, RecurrentHead, angles_of
from chatkv.spec.train import loss_triton
from chatkv.spec.train.base import Rows
from chatkv.spec.train.packed_attention import PackedAttention

FADE = 0.8
"""Weight of a depth over that of the one before."""
CONFIDENCE = 0.1


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch of packed rows with what the target computed over them. B rows of T."""

    rows: Rows
    states: Tensor
    """[B, T, taps, H]."""
    embedded: Tensor
    """[B, T, H] float: embeddings of the ids."""
    target: Tensor
    """[B T, K]: the target's logits of the draft ids."""
    log_total: Tensor
    """[B T] float32."""
    draft_rows: Tensor
    """[K, H]: embeddings of the draft ids, as the target's head has them."""
    place_of: Tensor
    """[V] int64: where an id stands among the draft ids; K for those outside."""

    def parts(self) -> tuple[Tensor, ...]:
        """What differs from batch to batch."""
        rows = self.rows
        return (
            rows.ids, rows.documents, rows.positions, rows.written,
            self.states, self.embedded, self.target, self.log_total,
        )  # fmt: skip


def weights_by_depth(rows: Rows, depth: int) -> list[Tensor]:
    """[B, T] float32 for depths 1..depth: 1 where a guess behind that row can be judged.

    The root, the tokens below it and the token to guess must all be part of one answer.
    """
    written = rows.written & (rows.documents > 0)
    width = written.shape[1]
    found: list[Tensor] = []
    for i in range(1, depth + 1):
        good = torch.zeros_like(written)
        if i + 1 < width:
            size = width - i - 1
            good[:, :size] = rows.documents[:, :size] == rows.documents[:, i + 1 :]
            for ahead in range(1, i + 2):
                good[:, :size] &= written[:, ahead : ahead + size]
        found.append(good.float())
    return found


def unroll(head: Head, lesson: Lesson) -> list[Tensor]:
    """States [B, T, H] of depths 1.. behind every row, with the true tokens in between."""
    features = head.features(lesson.states)
    depth = head.shape.depth
    if isinstance(head, ParallelHead):
        return list(head.fan(features).unbind(-2))
    states: list[Tensor] = []
    state = features
    attend = None
    if isinstance(head, EagleHead):
        attend = PackedAttention(lesson.rows.documents, lesson.draft_rows.dtype)
    for i in range(1, depth + 1):
        embedded = lesson.embedded.roll(-i, 1)
        if isinstance(head, EagleHead):
            assert attend is not None, "an eagle head attends"
            angles = angles_of(head.shape, lesson.rows.positions + (i - 1))
            state = head.advance(state, embedded, angles, attend)
        else:
            assert isinstance(head, RecurrentHead), "the only other kind"
            state = head.advance(state, embedded)
        states.append(state)
    return states


class Compare(torch.autograd.Function):
    """`loss_triton.compare` with the product in front of it, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, readout: Tensor, draft_rows: Tensor, target: Tensor, log_total: Tensor,
        weight: Tensor, ahead: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with torch.autocast(readout.device.type, enabled=False):
            guess = readout.to(draft_rows.dtype) @ draft_rows.T
        out = torch.empty(len(guess), 2, dtype=torch.float32, device=guess.device)
        best = torch.empty(len(guess), dtype=torch.int32, device=guess.device)
        compare = loss_triton.compare_plain
        if guess.device.type == "cuda":
            compare = loss_triton.compare
        compare(guess, target, log_total, weight, out, best, ahead)
        ctx.save_for_backward(guess, draft_rows)
        overlap = (out[:, 1] * (weight > 0)).sum()
        ctx.mark_non_differentiable(overlap, best)
        return (out[:, 0] * weight).sum(), overlap, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope, draft_rows = ctx.saved_tensors
        return (slope @ draft_rows).float() * grads[0], None, None, None, None, None


def judge(head: Head, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """(loss, [depth, 3] numbers: guesses judged, sum of overlaps, best guesses that were right)."""
    states = unroll(head, lesson)
    weights = weights_by_depth(lesson.rows, head.shape.depth)
    total = torch.zeros((), device=lesson.states.device)
    numbers: list[Tensor] = []
    for i, (state, weight) in enumerate(zip(states, weights, strict=True), 1):
        flat = weight.flatten()
        count = flat.sum()
        share = FADE ** (i - 1) * flat / count.clamp(min=1)
        readout, doubt = head.reading(state)
        loss, overlap, best = Compare.apply(
            readout.flatten(0, 1),
            lesson.draft_rows,
            lesson.target,
            lesson.log_total,
            share,
            i,
        )  # type: ignore[misc]
        truth = lesson.place_of[lesson.rows.ids.long()].roll(-(i + 1), 1).flatten()
        is_right = best.long() == truth
        unsure = torch.nn.functional.binary_cross_entropy_with_logits(
            doubt.flatten(), is_right.float(), reduction="none"
        )
        total = total + loss + CONFIDENCE * (unsure * share).sum()
        numbers.append(torch.stack([count, overlap, (is_right * flat).sum()]))
    return total, torch.stack(numbers).detach()
