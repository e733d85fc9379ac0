"""Stage `distill`: conversations written by the target itself, as files of token ids.

Knows prompts, seats and the clock. Temperature 0 is asked for once a prompt, since it would give
the same answer again; the rest of its share are prompts the model makes up.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chatkv.errors import UsageError
from chatkv.models.dense import DenseWeights
from chatkv.spec.train.prompts import LONGEST, Frame, Novelty, read_prompts
from chatkv.spec.train.shards import (
    Conversation,
    ShardWriter,
    next_stint,
    read_shard,
    shard_paths,
)
from chatkv.spec.train.writer import BatchWriter, Brief
from chatkv.tokenizer import Tokenizer

TEMPERATURES, SHARES = (0.0, 0.7, 1.0), (0.5, 0.3, 0.2)
FILE_SHARE = {0.0: 0.3, 0.7: 0.6, 1.0: 0.6}
"""How many conversations begin with a prompt of the files, by temperature."""
STEPS = 16
"""Tokens between two looks at which seats are done."""
FLUSH_S = 20.0
SHORT = 16
"""Tokens an answer must have room for."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """What a stint is to do."""

    prompts: tuple[Path, ...]
    out: Path
    seconds: float
    seats: int = 2048
    length: int = 1024
    answer_tokens: int = 384
    make_prompts: bool = True
    max_tokens: int = 20_000_000
    """Stop early once this stint has written so many."""


@dataclass(slots=True)
class Task:
    """One conversation on its way."""

    temperature: float
    seed: int
    prompt: int
    turns: list[list[int]] = field(default_factory=list)
    """User turns to come, as ids."""
    answers: list[tuple[int, int]] = field(default_factory=list)
    begins: int = 0
    """Where the answer begins that is being written; 0: a prompt is being made up."""


class Distiller:
    """Decides what each seat writes next.

    Args:
        rows: User turns of each prompt, as ids.
        stint: Seeds the draws: no two stints write the same.
        greedy: Prompts that were answered at temperature 0 before.
    """

    def __init__(
        self,
        config: DistillConfig,
        frame: Frame,
        rows: Sequence[list[list[int]]],
        eos_ids: Sequence[int],
        *,
        stint: int,
        greedy: set[int],
        novelty: Novelty,
    ) -> None:
        self.config, self.frame, self.rows, self.eos_ids = config, frame, rows, tuple(eos_ids)
        self.novelty = novelty
        self._random = random.Random(f"chatkv distill {stint}")
        # A made-up prompt ends as the template would end it, by the stop id of the footer.
        self.makes_prompts = config.make_prompts and frame.footer[:1] in [(e,) for e in eos_ids]
        room = config.length - len(frame.head) - len(frame.footer)
        room -= min(SHORT, config.answer_tokens)
        self._places = [place for place, turns in enumerate(rows) if len(turns[0]) <= room]
        if not self._places and not self.makes_prompts:
            raise UsageError(
                f"None of {len(rows)} prompts fits conversations of {config.length} tokens.",
                hint="Raise --length, or give other --prompts.",
            )
        self._greedy = [place for place in self._places if place not in greedy]
        self._random.shuffle(self._greedy)

    def begin(self) -> tuple[Task, Brief]:
        """A new conversation."""
        heat = self._random.choices(TEMPERATURES, SHARES)[0]
        if heat == 0 and not self._greedy and not self.makes_prompts:
            heat = 0.7
        seed = self._random.getrandbits(63)
        from_file = not self.makes_prompts or self._random.random() < FILE_SHARE[heat]
        if not from_file or not self._places or (heat == 0 and not self._greedy):
            limit = len(self.frame.head) + LONGEST + 1
            return Task(heat, seed, -1), self._brief(self.frame.head, limit, 1.0, seed, True)
        place = self._greedy.pop() if heat == 0 else self._random.choice(self._places)
        turns = self.rows[place]
        task = Task(heat, seed, place, list(turns[1:]))
        brief = self.answer(task, [*self.frame.head, *turns[0], *self.frame.footer], True)
        assert brief is not None, "only prompts that fit are drawn"
        return task, brief

    def go_on(self, task: Task, ids: Sequence[int]) -> Brief | None:
        """What a seat that came to an end writes next; None when the conversation is complete."""
        ended = ids[-1] in self.eos_ids
        if task.begins == 0:
            made_up = ids[len(self.frame.head) : -1]
            is_whole = ids[-1] == self.frame.footer[0]
            if not is_whole or not self.novelty.accepts(made_up):
                return None
            return self.answer(task, [*ids, *self.frame.footer[1:]], False)
        task.answers.append((task.begins, len(ids)))
        if not ended or not task.turns:
            return None
        turn = task.turns.pop(0)
        later = [*ids, *self.frame.between, *turn, *self.frame.footer]
        return self.answer(task, later, False)

    def answer(self, task: Task, ids: Sequence[int], is_new: bool) -> Brief | None:
        """The brief of an answer behind these ids; None if there is no room for a short one."""
        limit = min(len(ids) + self.config.answer_tokens, self.config.length)
        if limit < len(ids) + min(SHORT, self.config.answer_tokens):
            return None
        task.begins = len(ids)
        return self._brief(ids, limit, task.temperature, task.seed, is_new)

    def _brief(
        self, ids: Sequence[int], limit: int, temperature: float, seed: int, is_new: bool
    ) -> Brief:
        return Brief(list(ids), min(limit, self.config.length), temperature, seed, is_new)


def conversation(task: Task, ids: Sequence[int]) -> Conversation:
    """What is stored of a task."""
    return Conversation(
        np.array(ids, np.int32), tuple(task.answers), task.temperature, task.prompt, task.seed
    )


def distill(
    config: DistillConfig, weights: DenseWeights, tokenizer: Tokenizer, report: Report
) -> dict[str, Any]:
    """Write conversations until the clock says stop; returns what was done."""
    started = time.monotonic()
    frame = Frame.of(tokenizer)
    rows = [
        [tokenizer.encode(turn, special=False) for turn in turns]
        for turns in read_prompts(config.prompts)
    ]
    stint = next_stint(config.out)
    greedy, novelty = _earlier(config.out, frame)
    plan = Distiller(
        config, frame, rows, weights.spec.eos_ids, stint=stint, greedy=greedy, novelty=novelty
    )
    about = {
        "stint": stint,
        "weights": weights.spec.weights_digest,
        "tokenizer": tokenizer.tok_fp().hex(),
        "model": weights.spec.name,
        "head": len(frame.head),
    }
    shards = ShardWriter(config.out, stint, about, weights.spec.vocab_size)
    writer = BatchWriter(
        weights, frame.head, seats=config.seats, length=config.length, eos_ids=weights.spec.eos_ids
    )
    tasks: dict[int, Task] = {}
    briefs: dict[int, Brief] = {}
    for seat in range(config.seats):
        tasks[seat], briefs[seat] = plan.begin()
    writer.assign(briefs)
    report(f"stint {stint}: {len(rows)} prompts, {config.seats} seats, ready in "
           f"{time.monotonic() - started:.1f} s")  # fmt: skip
    began = flushed = time.monotonic()
    while (now := time.monotonic()) - started < config.seconds:
        if shards.tokens >= config.max_tokens:
            break
        writer.run(STEPS)
        done = writer.finished()
        briefs = {}
        for seat, ids in done.items():
            brief = plan.go_on(tasks[seat], ids)
            if brief is None:
                if tasks[seat].answers:
                    shards.add([conversation(tasks[seat], ids)])
                tasks[seat], brief = plan.begin()
            briefs[seat] = brief
        writer.assign(briefs)
        if now - flushed > FLUSH_S:
            shards.flush()
            flushed = time.monotonic()
            report(_line(shards.tokens, now - began, novelty))
    for seat, ids in writer.unfinished().items():
        task = tasks[seat]
        if task.begins and len(ids) > task.begins:
            task.answers.append((task.begins, len(ids)))
        if task.answers:
            shards.add([conversation(task, ids)])
    shards.flush()
    report(_line(shards.tokens, time.monotonic() - began, novelty))
    if not shards.tokens:
        raise UsageError(
            f"No answer was written in {config.seconds:.0f} seconds, of which getting ready took "
            f"{began - started:.0f}.",
            hint="Give it more --minutes.",
        )
    return {
        "stint": stint,
        "tokens": shards.tokens,
        "writing_s": time.monotonic() - began,
        "made_up": novelty.kept,
        "made_up_dropped": novelty.dropped,
    }


def _line(tokens: int, seconds: float, novelty: Novelty) -> str:
    return (
        f"{tokens:,} tokens in {seconds:.0f} s ({tokens / max(seconds, 1e-9):,.0f} a second), "
        f"{novelty.kept} prompts made up, {novelty.dropped} dropped"
    )


def _earlier(folder: Path, frame: Frame) -> tuple[set[int], Novelty]:
    """Prompts answered at temperature 0, and prompts made up, in earlier stints."""
    greedy: set[int] = set()
    novelty = Novelty()
    for path in shard_paths(folder):
        for done in read_shard(path)[0]:
            if done.prompt >= 0 and done.temperature == 0:
                greedy.add(done.prompt)
            elif done.prompt < 0:
                end = done.answers[0][0] - len(frame.footer)
                novelty.accepts([int(i) for i in done.ids[len(frame.head) : end]])
    return greedy, novelty
