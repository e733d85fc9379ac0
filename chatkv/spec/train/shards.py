"""Written conversations as files: token ids, where the answers are, how they were sampled.

Knows numpy archives; no model and no text. A shard appears under its name only when it is whole,
and stays under the size a shard is allowed.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chatkv.errors import ModelError

FORMAT = 1
MAX_TOKENS = 12_000_000
"""Tokens of one shard: about 11 MB, since text compresses to 0.9 bytes a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """What the model wrote, and what it was given."""

    ids: npt.NDArray[np.int32]
    answers: tuple[tuple[int, int], ...]
    """Half-open ranges of ids the model wrote at `temperature`."""
    temperature: float
    prompt: int = -1
    """Place of the prompt in the sorted prompt files; -1: the model made it up."""
    seed: int = 0


def write_shard(
    path: Path, conversations: Sequence[Conversation], about: dict[str, Any], vocab_size: int
) -> None:
    """Write a shard, whole or not at all."""
    words = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    arrays = {
        "ids": np.concatenate([c.ids for c in conversations] or [np.zeros(0)]).astype(words),
        "lengths": np.array([len(c.ids) for c in conversations], np.uint32),
        "spans": np.array([len(c.answers) for c in conversations], np.uint32),
        "answers": np.array([s for c in conversations for s in c.answers], np.uint32).reshape(
            -1, 2
        ),
        "temperature": np.array([c.temperature for c in conversations], np.float32),
        "prompt": np.array([c.prompt for c in conversations], np.int32),
        "seed": np.array([c.seed for c in conversations], np.int64),
        "about": np.frombuffer(json.dumps({**about, "format": FORMAT}).encode(), np.uint8),
    }
    part = path.with_name(f".{path.name}.{os.getpid()}.npz")
    try:
        np.savez_compressed(part, allow_pickle=False, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_shard(path: Path) -> tuple[list[Conversation], dict[str, Any]]:
    """The conversations of a shard and what is said about them.

    Raises:
        ModelError: The file cannot be read, or is of another format.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays["about"].tobytes())
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}, not {FORMAT}")
        ids = np.split(arrays["ids"].astype(np.int32), np.cumsum(arrays["lengths"])[:-1])
        spans = np.split(arrays["answers"].astype(np.int64), np.cumsum(arrays["spans"])[:-1])
        return [
            Conversation(
                own,
                tuple((int(a), int(b)) for a, b in answers),
                float(temperature),
                int(prompt),
                int(seed),
            )
            for own, answers, temperature, prompt, seed in zip(
                ids, spans, arrays["temperature"], arrays["prompt"], arrays["seed"], strict=True
            )
        ] if len(arrays["lengths"]) else [], about
    # numpy and zipfile raise many kinds for a file cut short.
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read: {error}.", hint="Delete it; the stage writes others."
        ) from error


def shard_paths(folder: Path) -> list[Path]:
    """All shards of a folder, in the order they were written."""
    return sorted(folder.glob("distill-*.npz"))


class ShardWriter:
    """Conversations on their way into a folder's shards.

    Args:
        stint: Number of this run; names its files.
        about: Written into each shard.
    """

    def __init__(self, folder: Path, stint: int, about: dict[str, Any], vocab_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.stint, self.about, self.vocab_size = folder, stint, about, vocab_size
        self.tokens = 0
        """Of all conversations added."""
        self._number = 0
        self._open: list[Conversation] = []
        self._open_tokens = 0
        self._unsaved = 0

    def add(self, conversations: Iterable[Conversation]) -> None:
        """Take conversations; a shard that is full is closed."""
        for conversation in conversations:
            size = len(conversation.ids)
            if self._open_tokens + size > MAX_TOKENS:
                self.flush()
                self._number += 1
                self._open, self._open_tokens = [], 0
            self._open.append(conversation)
            self._open_tokens += size
            self.tokens += size
            self._unsaved += 1

    def flush(self) -> None:
        """Write what is not on disk yet."""
        if self._unsaved:
            path = self.folder / f"distill-{self.stint:02d}-{self._number:02d}.npz"
            write_shard(path, self._open, self.about, self.vocab_size)
            self._unsaved = 0


def next_stint(folder: Path) -> int:
    """The number after the last stint that left a shard."""
    return max((int(path.name.split("-")[1]) for path in shard_paths(folder)), default=-1) + 1
