"""Plays prompts with drafting off and on and compares the ids. The claim of the project, runnable
by anyone.

Two engines share one model and nothing else: no page, no draft, no reply goes from one to the
other. The drafted one runs pinned trees with its guard off, so that it drafts wherever there is a
guess. Several conversations share each step, in other company on each side: what a reply's
neighbours are must not show either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ContextFull, UsageError
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.models.catalog import ModelFile
from chatkv.models.devices import load_model
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from chatkv.spec.drafters import check_names
from chatkv.spec.token_log import TokenIndex
from sessions.build import load_draft

SHAPE = "tree:5"
"""Guesses of a drafted step: enough for siblings and paths, cheap enough for a CPU."""
TOGETHER = 8
"""Conversations played side by side."""

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


Group: TypeAlias = list[tuple[Prompt, SamplingParams]]


def read_prompts(paths: Seq[Path]) -> Iterator[Prompt]:
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


class _Talk:
    """One conversation being played on an engine: turn after turn, at most one reply at a time."""

    def __init__(self, engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.replies: list[tuple[int, ...]] = []
        """The ids of each reply; fewer than turns when the context is full."""
        self._turns = list(prompt.turns)
        self._tokens = engine.model.tokenizer.head_ids()
        self._sampled = [False] * len(self._tokens)

    def begin(self) -> Sequence | None:
        """Put the next turn in place; None when there is none, or no room for it."""
        tokenizer = self.engine.model.tokenizer
        if len(self.replies) == len(self._turns):
            return None
        given = tokenizer.user_ids(self._turns[len(self.replies)], not self.replies)
        self._tokens += given
        self._sampled += [False] * len(given)
        try:
            seq = self.engine.add(self._tokens, self._sampled, self.params)
        except ContextFull:
            return None
        for _ in self.engine.prefill(seq):
            pass
        return seq

    def end(self, seq: Sequence) -> None:
        """Keep a reply that is finished."""
        self.engine.finish(seq)
        reply = tuple(seq.tokens[seq.prompt_tokens :])
        self.replies.append(reply)
        tokenizer = self.engine.model.tokenizer
        closing = tokenizer.closing_ids(reply[-1] in tokenizer.eos_ids)
        self._tokens = [*seq.tokens, *closing]
        self._sampled = [*seq.sampled, *[False] * len(closing)]


def _play(
    engine: Engine, group: Group, stop: Callable[[], bool], log: TokenIndex | None = None
) -> list[list[tuple[int, ...]]]:
    """Play conversations side by side: which of them share a step changes all the time.

    Replies go to `log` when they end, so that the drafter `history` has something to copy. Those
    that are whole when `stop` says so are all there will be.
    """
    talks = [_Talk(engine, prompt, params) for prompt, params in group]
    waiting = list(talks)
    running: list[tuple[_Talk, Sequence]] = []
    while (waiting or running) and not stop():
        for talk in waiting:
            if (seq := talk.begin()) is not None:
                running.append((talk, seq))
        if going := [seq for _, seq in running if not seq.finished]:
            engine.step(going)
        waiting = [talk for talk, seq in running if seq.finished]
        for talk, seq in running:
            if seq.finished:
                talk.end(seq)
                if log is not None:
                    log.add((), talk.replies[-1])
        running = [(talk, seq) for talk, seq in running if not seq.finished]
    return [talk.replies for talk in talks]


def _groups(engine: Engine, items: Iterable[tuple[Prompt, SamplingParams]]) -> Iterator[Group]:
    """As many conversations at a time as the pool surely holds, `TOGETHER` at most."""
    room = engine.pool.num_pages * engine.pool.page_size
    group: Group = []
    used = 0
    for prompt, params in items:
        # An id is a byte or more; what the template adds is little.
        longest = sum(len(turn.encode()) + 32 + (params.max_tokens or 0) for turn in prompt.turns)
        needed = min(longest, engine.context_limit) + 2 * engine.pool.page_size
        if group and (len(group) == TOGETHER or used + needed > room):
            yield group
            group, used = [], 0
        group.append((prompt, params))
        used += needed
    if group:
        yield group


def verify_prompts(
    file: ModelFile,
    prompts: Seq[Path],
    *,
    device: str = "auto",
    limit: int | None = None,
    max_tokens: int = 64,
    temperatures: Seq[float] = (0.0, 0.7, 1.0),
    drafters: Seq[str] = ("ngram", "random"),
    draft_model: str | None = None,
    threads: int | None = None,
    kv: KVFormat = PLAIN,
    progress: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
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
        draft_model: Of the drafter `draft_model`; None is the model itself.
        threads: CPU threads.
        kv: How keys and values are held, on both sides.
        progress: Called with one line after each prompt.
        stop: Asked before each step; once it says yes, only what is whole is compared.

    Returns:
        `complete` (false if it was stopped), `prompts`, `replies`, `tokens`, `different` (replies),
        `mode`, `drafted_steps`, and `differences`: where the first ten are.

    Raises:
        UsageError: There is nothing to play, or a file cannot be read.
        ModelError: The model cannot be loaded.
        BackendUnavailable: The device is not here, or cannot run it.
    """
    chosen = list(read_prompts(prompts)) if prompts else [Prompt(*one) for one in BUILT_IN]
    chosen = chosen[:limit]
    if not chosen:
        raise UsageError("There is no prompt to play.", hint="Name another file with --prompts.")
    names = check_names(drafters)  # an unknown name fails before the model is loaded
    if progress is not None:
        progress(f"loading {file.name} ...")
    model, notice = load_model(file, device, threads=threads)
    if notice and progress is not None:
        progress(notice)
    held: dict[str, Any] = {"kv_dtype": kv.name, "keep_layers": kv.keep_layers}
    plain = Engine(
        model, EngineConfig(spec="none", drafters=(), **held), costs={1: 1.0}, guard=False
    )
    config = EngineConfig(spec=SHAPE, drafters=tuple(names), **held)
    log, draft = TokenIndex(), None
    if "draft_model" in names:
        draft = load_draft(draft_model or str(file.path), model, threads)
    drafted = Engine(model, config, costs={1: 1.0}, token_log=log, draft=draft, guard=False)
    items = [
        (
            prompt,
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=_seed(prompt, temperature)
            ),
        )
        for prompt in chosen
        for temperature in temperatures
    ]
    tokens = replies = different = played = 0
    complete = True
    differences: list[dict[str, Any]] = []
    for group in _groups(plain, items):
        sides = _play(plain, group, stop), _play(drafted, group, stop, log)
        complete = not stop()
        for (prompt, params), expected, got in zip(group, *sides, strict=True):
            if not complete:
                whole = min(len(expected), len(got))
                expected, got = expected[:whole], got[:whole]
            tokens += sum(map(len, expected))
            replies += len(expected)
            for turn, (left, right) in enumerate(zip(expected, got, strict=False), start=1):
                if left != right:
                    different += 1
                    differences.append(_difference(prompt, params.temperature, turn, left, right))
            different += abs(len(expected) - len(got))
        if not complete:
            break
        played += len(group)
        if progress is not None:
            progress(f"{played}/{len(items)} chats, {tokens} tokens, {different} different")
    drafting = drafted.drafting.controller.stats
    return {
        "v": 1,
        "complete": complete,
        "prompts": len(chosen),
        "replies": replies,
        "tokens": tokens,
        "different": different,
        "device": model.device,
        "kv": kv.name,
        "mode": model.backend.mode,
        "drafters": list(drafted.drafting.drafters.names),
        "drafted_steps": drafting.steps - drafting.plain_steps,
        "temperatures": list(temperatures),
        "differences": differences[:10],
    }


def _seed(prompt: Prompt, temperature: float) -> int:
    text = f"{prompt.id} {temperature}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _difference(
    prompt: Prompt, temperature: float, turn: int, left: Seq[int], right: Seq[int]
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
