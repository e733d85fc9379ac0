"""Stage `measure`: tokens a step of trained heads on answers of the target, without an engine.

Knows conversations with their seeds, heads, and the tree `grow` makes at every token of an answer.
An answer is walked as the engine would: each step gains the guesses that were right, and one.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.models.dense import DenseWeights
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.grow import (
    Cell,
    EagleCell,
    Growth,
    Guesses,
    Look,
    ParallelCell,
    RecurrentCell,
    Vocabulary,
    grow,
)
from chatkv.spec.heads.modules import WINDOW, EagleHead, ParallelHead, RecurrentHead, angles_of
from chatkv.spec.heads.noise_triton import draft_noise, draft_noise_plain
from chatkv.spec.repeats import has_repeats
from chatkv.spec.train.base import Base, Rows
from chatkv.spec.train.distill import DistillConfig, Distiller, Task, conversation
from chatkv.spec.train.prompts import Frame, Novelty
from chatkv.spec.train.shards import Conversation
from chatkv.spec.train.writer import BatchWriter, Brief

STEPS = 16
DEPTH = 4
GROWTHS = {
    "chain of 4": Growth(rows=5, depth=DEPTH, width=1, children=1),
    "tree of 16": Growth(rows=16, depth=DEPTH, width=4, children=10),
}
FORMS = ("chain of 1", *GROWTHS)
ANCHORS = 4096
"""Trees made at once."""
MOST = 16
"""Conversations of a batch."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One answer and the guesses that were right behind each of its tokens."""

    temperature: float
    repeats: bool
    right: npt.NDArray[np.int64]
    """[tokens of the answer - 1], as if each of them were a root."""

    def steps(self) -> int:
        """Verify steps from the first token to the last."""
        at = steps = 0
        while at < len(self.right):
            at += int(self.right[at]) + 1
            steps += 1
        return steps


def answer_prompts(
    config: DistillConfig,
    weights: DenseWeights,
    frame: Frame,
    rows: Sequence[list[list[int]]],
    temperatures: Sequence[float],
) -> list[Conversation]:
    """The target's answers to every prompt at every temperature, each prompt with one seed."""
    eos_ids = weights.spec.eos_ids
    plan = Distiller(config, frame, rows, eos_ids, stint=0, greedy=set(), novelty=Novelty())
    waiting: list[tuple[Task, Brief]] = []
    for place, turns in enumerate(rows):
        for heat in temperatures:
            task = Task(heat, 1_000_003 * (place + 1), place, list(turns[1:]))
            brief = plan.answer(task, [*frame.head, *turns[0], *frame.footer], True)
            if brief is not None:
                waiting.append((task, brief))
    seats = min(config.seats, len(waiting))
    writer = BatchWriter(weights, frame.head, seats=seats, length=config.length, eos_ids=eos_ids)
    tasks: dict[int, Task] = {}
    done: list[Conversation] = []
    briefs: dict[int, Brief] = {}
    for seat in range(seats):
        tasks[seat], briefs[seat] = waiting.pop()
    while tasks:
        writer.assign(briefs)
        writer.run(STEPS)
        briefs = {}
        for seat, ids in writer.finished().items():
            if seat not in tasks:
                continue
            brief = plan.go_on(tasks[seat], ids)
            if brief is None:
                done.append(conversation(tasks.pop(seat), ids))
                if not waiting:
                    continue
                tasks[seat], brief = waiting.pop()
            briefs[seat] = brief
    return done


@dataclass(frozen=True, slots=True)
class Anchors:
    """A batch of B conversations in rows of T, and the places from `first` on as anchors.

    An anchor is the row before a root: its taps are read, and the tree stands below the root.
    """

    first: int
    positions: Tensor
    """[B, T]."""
    taps: Tensor
    """[B, T, taps, H]."""
    roots: Tensor
    """[B, T]: the id behind each row."""
    later: Tensor
    """[B, T, DEPTH]: the ids behind that; -1 where there are none."""
    inverse_t: Tensor
    """[A] float32, A = B (T - first)."""
    noise: Tensor
    """[A, DEPTH, K]."""


def walks(
    files: Mapping[str, HeadFile], weights: DenseWeights, conversations: Sequence[Conversation]
) -> dict[str, dict[str, list[Walk]]]:
    """Every answer walked with every head (all of the same draft ids), by head and form."""
    base = Base(weights)
    ids = next(iter(files.values())).draft_ids
    vocabulary = Vocabulary.of(ids, weights.head, weights.embedding)
    found: dict[str, dict[str, list[Walk]]] = {name: {f: [] for f in FORMS} for name in files}
    # Answers that begin at about the same place, so that few rows are prompt or padding.
    order = sorted(conversations, key=lambda c: (c.answers[0][0], len(c.ids)))
    repeats = {id(c): [has_repeats(c.ids, a, b) for a, b in c.answers] for c in order}
    while order:
        last = order[-MOST:]
        span = max(len(c.ids) for c in last) - min(c.answers[0][0] for c in last) + 1
        count = min(MOST, max(1, ANCHORS // span))
        batch, order = order[-count:], order[:-count]
        anchors = _anchors(base, vocabulary, batch)
        for name, file in files.items():
            for form, growth in GROWTHS.items():
                right = _right(file, weights, vocabulary, anchors, growth)
                for done, line in zip(batch, right, strict=True):
                    for (a, b), is_repeating in zip(done.answers, repeats[id(done)], strict=True):
                        own = line[a - 1 - anchors.first : b - 2 - anchors.first]
                        # Nothing can be gained behind the end.
                        own = np.minimum(own, np.arange(len(own), 0, -1) - 1)
                        found[name][form].append(Walk(done.temperature, is_repeating, own))
    for by_form in found.values():
        by_form["chain of 1"] = [
            replace(walk, right=np.minimum(walk.right, 1)) for walk in by_form["chain of 4"]
        ]
    return found


@torch.no_grad()
def _anchors(base: Base, vocabulary: Vocabulary, batch: Sequence[Conversation]) -> Anchors:
    device = base.weights.device
    width = max(len(done.ids) for done in batch)
    ids = np.full((len(batch), width + DEPTH + 2), -1, np.int64)
    for row, done in enumerate(batch):
        ids[row, : len(done.ids)] = done.ids
    truth = torch.from_numpy(ids).to(device)
    own = truth[:, :width].clamp(min=0).int()
    numbers = torch.arange(width, device=device, dtype=torch.int32).expand(len(batch), -1)
    rows = Rows(own, torch.ones_like(own), numbers, own >= 0)
    first = min(done.answers[0][0] for done in batch) - 1
    seeds = torch.tensor([c.seed if c.temperature > 0 else -1 for c in batch], device=device)
    heat = torch.tensor(
        [1 / c.temperature if c.temperature > 0 else 1.0 for c in batch], device=device
    )
    each = seeds[:, None].expand(-1, width - first).flatten()
    noise = torch.empty(len(each), DEPTH, len(vocabulary.draft_ids), device=device)
    draw = draft_noise if device.type == "cuda" else draft_noise_plain
    draw(each, (numbers[:, first:] + 2).flatten(), vocabulary.draft_ids, noise)
    return Anchors(
        first=first,
        positions=numbers,
        taps=base.run(rows, with_totals=False).states,
        roots=truth[:, 1 : width + 1].clamp(min=0),
        later=torch.stack([truth[:, 2 + i : 2 + i + width] for i in range(DEPTH)], -1),
        inverse_t=heat[:, None].expand(-1, width - first).flatten(),
        noise=noise,
    )


@torch.no_grad()
def _right(
    file: HeadFile, weights: DenseWeights, vocabulary: Vocabulary, anchors: Anchors, growth: Growth
) -> npt.NDArray[np.int64]:
    """[B, T - first]: right guesses below the root behind each anchor."""
    roots = anchors.roots[:, anchors.first :]
    guesses = grow(
        file.head,
        _cell(file.head, weights, anchors),
        vocabulary,
        roots.flatten(),
        growth,
        inverse_t=anchors.inverse_t,
        noise=anchors.noise,
    )
    later = anchors.later[:, anchors.first :].flatten(0, 1)
    return matched(guesses, later).view(roots.shape).cpu().numpy()


def _cell(head: Any, weights: DenseWeights, anchors: Anchors) -> Cell:
    """The states of a head of any kind below all anchors."""
    taps = anchors.taps[:, anchors.first :].flatten(0, 1)
    if isinstance(head, RecurrentHead):
        return RecurrentCell(head, taps)
    if isinstance(head, ParallelHead):
        return ParallelCell(head, taps)
    assert isinstance(head, EagleHead), "the last kind"
    keys, values = head.stored(
        head.features(anchors.taps),
        weights.embedding[anchors.roots],
        angles_of(head.shape, anchors.positions),
    )
    positions = anchors.positions[:, anchors.first :].flatten()
    return EagleCell(head, head.features(taps), positions, causal_look(keys, values, anchors.first))


def causal_look(keys: Tensor, values: Tensor, first: int = 0) -> Look:
    """Rows t >= first of each of B sequences see the WINDOW rows up to t; keys [B, T, HK, D]."""
    count, width = keys.shape[:2]
    every = torch.ones(width, width, dtype=torch.bool, device=keys.device)
    hidden = (every.triu(1) | every.tril(-WINDOW))[first:]

    def look(q: Tensor) -> tuple[Tensor, Any]:
        q = q.unflatten(0, (count, width - first))
        scores = torch.einsum("btwhgd,bshd->btwhgs", q, keys)
        scores = scores.masked_fill(hidden[None, :, None, None, None], -torch.inf)

        def mix(shares: Tensor) -> Tensor:
            own = shares.unflatten(0, (count, width - first))
            return torch.einsum("btwhgs,bshd->btwhgd", own, values).flatten(0, 1)

        return scores.flatten(0, 1), mix

    return look


def matched(guesses: Guesses, later: Tensor) -> Tensor:
    """[N]: how far the true tokens [N, depth] lead down the tree."""
    row = torch.zeros(len(later), 1, dtype=torch.int32, device=later.device)
    length = torch.zeros(len(later), dtype=torch.int64, device=later.device)
    going = torch.ones(len(later), dtype=torch.bool, device=later.device)
    for depth in range(later.shape[1]):
        below = (guesses.parents == row) & (guesses.tokens == later[:, depth : depth + 1])
        below[:, 0] = False
        going = going & below.any(1)
        length += going.long()
        row = below.int().argmax(1, keepdim=True).int()
    return length


def summary(found: Sequence[Walk]) -> dict[str, float | list[float] | int]:
    """tau over all answers, over those without long repeats, and a_d over all tokens."""
    plain = [walk for walk in found if not walk.repeats]
    right = np.concatenate([walk.right for walk in found] or [np.zeros(0, np.int64)])
    shares: list[float] = []
    for depth in range(1, int(right.max(initial=0)) + 1):
        shares.append(round(float((right >= depth).sum() / max((right >= depth - 1).sum(), 1)), 3))
    return {
        "answers": len(found),
        "without_repeats": len(plain),
        "tau": _tau(found),
        "tau_without_repeats": _tau(plain),
        "a": shares,
    }


def _tau(found: Sequence[Walk]) -> float:
    steps = sum(walk.steps() for walk in found)
    return round(sum(len(walk.right) for walk in found) / max(steps, 1), 3)
