"""Plays prompts with drafting off and on and compares the ids. The claim of the project, runnable
by anyone.

Two engines share one model and nothing else: no page, no draft, no reply goes from one to the
other. The drafted one runs pinned trees with its guard off, so that it drafts wherever there is a
guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ContextFull, UsageError
from chatkv.models.catalog import ModelFile
from chatkv.models.devices import load_model
from chatkv.models.model import Model
from chatkv.sampling import SamplingParams
from chatkv.spec.drafters import create_drafters

SHAPE = "tree:5"
"""Guesses of a drafted step: enough for siblings and paths, cheap enough for a CPU."""

BUILT_IN = (
    ("greeting", ("Hello! Who are you?", "Say the same in one short sentence.")),
    ("list", ("Name five fruits, one a line.", "Now repeat the list in reverse order.")),
    ("code", ("Write a Python function that adds two numbers.", "Rename the function to total.")),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to play: user turns in order."""

    id: str
    turns: tuple[str, ...]


def read_prompts(paths: Sequence[Path]) -> Iterator[Prompt]:
    """Prompts of JSONL files (`{"id": ..., "turns": [...]}` a line) and of folders of them.

    Raises:
        UsageError: A path is missing, or a line is no such object.
    """
    for path in paths:
        files = sorted(path.glob("**/*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"There is no .jsonl file in {path}.", hint="Name a file of prompts.")
        for file in files:
            yield from _read_file(file)


def _read_file(file: Path) -> Iterator[Prompt]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}.", hint="Name a UTF-8 file.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            turns = tuple(str(turn) for turn in data["turns"])
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"Line {number} of {file} is no prompt: {error!r}.",
                hint='Each line is an object like {"id": "a", "turns": ["Hello"]}.',
            ) from error
        yield Prompt(str(data.get("id", f"{file.name}:{number}")), turns)


class _Player:
    """One way to answer: plain, or drafted."""

    def __init__(self, model: Model, config: EngineConfig, costs: dict[int, float] | None) -> None:
        self.engine = Engine(model, config, costs=costs, guard=False)
        self.drafted_steps = 0

    def play(self, prompt: Prompt, params: SamplingParams) -> list[tuple[int, ...]]:
        """The ids of each reply; fewer than turns when the context is full."""
        tokenizer = self.engine.model.tokenizer
        tokens, sampled = tokenizer.head_ids(), [False] * len(tokenizer.head_ids())
        replies: list[tuple[int, ...]] = []
        for place, turn in enumerate(prompt.turns):
            given = tokenizer.user_ids(turn, place == 0)
            tokens, sampled = [*tokens, *given], [*sampled, *[False] * len(given)]
            try:
                seq = self.engine.add(tokens, sampled, params)
            except ContextFull:
                break
            for _ in self.engine.prefill(seq):
                pass
            while not seq.finished:
                self.engine.step([seq])
            stats = self.engine.finish(seq)
            self.drafted_steps += stats.steps - stats.plain_steps
            reply = tuple(seq.tokens[seq.prompt_tokens :])
            replies.append(reply)
            closing = tokenizer.closing_ids(reply[-1] in tokenizer.eos_ids)
            tokens = [*seq.tokens, *closing]
            sampled = [*seq.sampled, *[False] * len(closing)]
        return replies


def verify_prompts(
    file: ModelFile,
    prompts: Sequence[Path],
    *,
    device: str = "auto",
    limit: int | None = None,
    max_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    drafters: Sequence[str] = ("ngram", "random"),
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Play every prompt plain and drafted at every temperature.

    Args:
        file: The model.
        device: Where it runs: `auto`, `cpu`, `cuda`.
        prompts: JSONL files or folders of them; none plays a few built-in ones.
        limit: Prompts at most.
        max_tokens: Of each reply.
        temperatures: Each with top_p 0.95 and a seed made from the prompt's id.
        drafters: Merged in one tree.
        threads: CPU threads.
        progress: Called with one line after each prompt.

    Returns:
        `prompts`, `replies`, `tokens`, `different` (replies), `mode`, `drafted_steps`, and
        `differences`: where the first ten are.

    Raises:
        UsageError: There is nothing to play, or a file cannot be read.
        ModelError: The model cannot be loaded.
        BackendUnavailable: The device is not here, or cannot run it.
    """
    chosen = list(read_prompts(prompts)) if prompts else [Prompt(*one) for one in BUILT_IN]
    chosen = chosen[:limit]
    if not chosen:
        raise UsageError("There is no prompt to play.", hint="Name another file with --prompts.")
    create_drafters(drafters, vocab_size=1)  # an unknown name fails before the model is loaded
    model, notice = load_model(file, device, threads=threads)
    if notice and progress is not None:
        progress(notice)
    plain = _Player(model, EngineConfig(spec="none"), {1: 1.0})
    drafted = _Player(model, EngineConfig(spec=SHAPE, drafters=tuple(drafters)), {1: 1.0})
    tokens = replies = 0
    differences: list[dict[str, Any]] = []
    different = 0
    for number, prompt in enumerate(chosen, start=1):
        for temperature in temperatures:
            params = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=_seed(prompt, temperature)
            )
            expected, got = plain.play(prompt, params), drafted.play(prompt, params)
            tokens += sum(map(len, expected))
            replies += len(expected)
            for turn, (left, right) in enumerate(zip(expected, got, strict=False), start=1):
                if left != right:
                    different += 1
                    differences.append(_difference(prompt, temperature, turn, left, right))
            different += abs(len(expected) - len(got))
        if progress is not None:
            progress(f"{number}/{len(chosen)} prompts, {tokens} tokens, {different} different")
    return {
        "v": 1,
        "prompts": len(chosen),
        "replies": replies,
        "tokens": tokens,
        "different": different,
        "device": model.device,
        "mode": model.backend.mode,
        "drafters": list(drafters),
        "drafted_steps": drafted.drafted_steps,
        "temperatures": list(temperatures),
        "differences": differences[:10],
    }


def _seed(prompt: Prompt, temperature: float) -> int:
    text = f"{prompt.id} {temperature}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _difference(
    prompt: Prompt, temperature: float, turn: int, left: Sequence[int], right: Sequence[int]
) -> dict[str, Any]:
    place = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return {
        "prompt": prompt.id,
        "temperature": temperature,
        "turn": turn,
        "token": place,
        "plain": left[place : place + 8],
        "drafted": right[place : place + 8],
    }
