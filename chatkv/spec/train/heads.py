"""Stage `train`: heads of all kinds side by side on the same rows, until the clock says stop.

Knows lessons, optimisers and checkpoints. What is saved is the running average, as a file that can
be used; a later stint starts from it.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatkv.errors import UsageError
from chatkv.models.dense import DenseWeights
from chatkv.spec.heads.file import HeadFile, load, save, target_of
from chatkv.spec.heads.modules import Head, new_head
from chatkv.spec.heads.shape import Kind, shape_for
from chatkv.spec.train.lessons import LessonStore
from chatkv.spec.train.pupil import Pupil
from chatkv.spec.train.unroll import Lesson, judge
from chatkv.tokenizer import Tokenizer

WARM_UP = 0.03
"""Share of the time in which the rate rises."""
REPORT_S, SAVE_S = 10.0, 60.0
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What a stint of training is to do."""

    out: Path
    seconds: float
    kinds: tuple[Kind, ...]
    rows: int = 16
    """Packed rows of one step."""
    rate: float = 1e-3
    last_rate: float = 1e-5
    seed: int = 0


def rate_at(share: float, config: TrainConfig) -> float:
    """The learning rate once this share of the time has passed."""
    if share < WARM_UP:
        return config.rate * max(share / WARM_UP, 0.01)
    fall = 0.5 * (1 + math.cos(math.pi * min((share - WARM_UP) / (1 - WARM_UP), 1)))
    return config.last_rate + (config.rate - config.last_rate) * fall


def checkpoint(out: Path, kind: Kind) -> Path:
    """Where the head of a kind is kept between stints."""
    return out / f"heads-{kind}.safetensors"


def train(
    config: TrainConfig,
    weights: DenseWeights,
    tokenizer: Tokenizer,
    store: LessonStore,
    held_out: LessonStore,
    report: Report,
) -> dict[str, Any]:
    """Train until the time is over; returns what each head does on rows it has not seen."""
    started = time.monotonic()
    if config.seconds <= 0:
        raise UsageError(
            "Getting ready took all the time there was to train.", hint="Give it more --minutes."
        )
    device, spec = weights.device, weights.spec
    torch.manual_seed(config.seed)
    pupils: dict[Kind, Pupil] = {}
    earlier: dict[Kind, dict[str, Any]] = {}
    for kind in config.kinds:
        path = checkpoint(config.out, kind)
        if path.is_file():
            before = load(path, spec, tokenizer.tok_fp())
            if before.draft_ids.tolist() != store.draft_ids.tolist():
                report(f"{kind}: other draft ids than before; its weights are kept")
            head, earlier[kind] = before.head, dict(before.training)
            head.shape = replace(head.shape, draft_ids=len(store.draft_ids))
        else:
            shape = shape_for(kind, spec, draft_ids=len(store.draft_ids))
            head, earlier[kind] = new_head(shape), {}
            with torch.no_grad():
                head.gamma.copy_(weights.norm)
        pupils[kind] = Pupil(head, device)

    def keep(measured: dict[Kind, Any] | None = None) -> None:
        for kind, pupil in pupils.items():
            before = earlier[kind]
            facts = {
                "steps": before.get("steps", 0) + pupil.steps,
                "seconds": round(before.get("seconds", 0) + time.monotonic() - started, 1),
                "beside": [other for other in pupils if other != kind],
                "rows_a_step": config.rows,
                "row_tokens": store.rows.ids.shape[1],
                "rows": len(store),
                "stints": before.get("stints", 0) + 1,
            }
            if measured:
                facts["held_out"] = measured[kind]
            file = HeadFile(
                pupil.average, store.draft_ids, target_of(spec, tokenizer.tok_fp()), facts
            )
            save(checkpoint(config.out, kind), file)

    # Another stint sees the rows in another order.
    behind = sum(int(before.get("steps", 0)) for before in earlier.values())
    generator = torch.Generator().manual_seed(config.seed + behind)
    order = torch.randperm(len(store), generator=generator)
    at, told, kept = 0, started, started
    passes = 0.0
    lesson: Lesson | None = None
    while not passes or time.monotonic() - started < config.seconds:
        now = time.monotonic()
        if at + config.rows > len(order):
            order, at = torch.randperm(len(store), generator=generator), 0
        places = order[at : at + config.rows].to(device)
        at += config.rows
        passes += len(places) / len(store)
        lesson = store.lesson(places, lesson)
        rate = rate_at((now - started) / config.seconds, config)
        for pupil in pupils.values():
            pupil.learn(lesson, rate)
        if device.type == "cuda":
            # The clock must not run ahead of the device.
            torch.cuda.synchronize(device)
        if now - told > REPORT_S:
            told = now
            for kind, pupil in pupils.items():
                report(f"{kind} step {pupil.steps}, {passes:.2f} passes, "
                       f"rate {rate:.1e}: {_line(pupil.numbers)}")  # fmt: skip
                pupil.numbers.zero_()
        if now - kept > SAVE_S:
            kept = now
            keep()
    found: dict[Kind, Any] = {
        kind: examine(pupil.average, held_out, config) for kind, pupil in pupils.items()
    }
    keep(found)
    for kind, numbers in found.items():
        report(f"{kind}, {pupils[kind].steps} steps, unseen rows: {numbers}")
    return {f"{kind}_steps": pupil.steps for kind, pupil in pupils.items()}


@torch.no_grad()
def examine(head: Head, store: LessonStore, config: TrainConfig) -> dict[str, list[float]]:
    """Shares of guesses that were right, and overlaps with the target's law, by depth."""
    total = torch.zeros(head.shape.depth, 3, device=store.states.device)
    for first in range(0, len(store), config.rows):
        places = torch.arange(first, min(first + config.rows, len(store)))
        with torch.autocast(store.states.device.type, torch.bfloat16):
            total += judge(head, store.lesson(places.to(store.states.device)))[1]
    return {"right": _shares(total, 2), "overlap": _shares(total, 1)}


def _shares(numbers: Tensor, column: int) -> list[float]:
    counts = numbers[:, 0].clamp(min=1)
    return [round(value, 4) for value in (numbers[:, column] / counts).tolist()]


def _line(numbers: Tensor) -> str:
    return f"right {_text(_shares(numbers, 2))}, overlap {_text(_shares(numbers, 1))}"


def _text(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
