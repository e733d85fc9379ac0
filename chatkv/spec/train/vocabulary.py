"""Stage `vocabulary`: the ids that a head may guess, from how often the model wrote them."""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chatkv.errors import UsageError
from chatkv.spec.train.shards import Conversation, read_shard, shard_paths

FILE = "vocabulary.json"
SIZES = (4096, 8192, 16384)


def read_all(folder: Path, weights_digest: str) -> list[Conversation]:
    """The conversations of all shards.

    Raises:
        UsageError: There are none, or another model wrote them.
    """
    found: list[Conversation] = []
    for path in shard_paths(folder):
        conversations, about = read_shard(path)
        if about["weights"] != weights_digest:
            raise UsageError(
                f"{path} was written by {about['model']} with weights {about['weights'][:16]}..., "
                f"not {weights_digest[:16]}...",
                hint="Give each model a folder of its own.",
            )
        found += conversations
    if not found:
        raise UsageError(f"{folder} holds no conversations.", hint="Run the stage distill first.")
    return found


def count_ids(conversations: Sequence[Conversation], vocab_size: int) -> npt.NDArray[np.int64]:
    """[V]: how often each id stands in an answer."""
    parts = [done.ids[a:b] for done in conversations for a, b in done.answers]
    every = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return np.bincount(every, minlength=vocab_size)


def choose(
    counts: npt.NDArray[np.int64], size: int, special: Sequence[int]
) -> npt.NDArray[np.int64]:
    """The most frequent ids, sorted by frequency; special ids are always among them."""
    order = np.argsort(-counts, kind="stable")
    kept = set(special)
    for token in order:
        if len(kept) >= size:
            break
        kept.add(int(token))
    return np.array([token for token in order if int(token) in kept], np.int64)


def make(
    conversations: Sequence[Conversation], vocab_size: int, size: int, special: Sequence[int]
) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Draft ids, and the share of written ids that the most frequent ones cover."""
    counts = count_ids(conversations, vocab_size)
    total = max(int(counts.sum()), 1)
    ids = choose(counts, min(size, vocab_size), special)
    falling = np.sort(counts)[::-1]
    shares = {str(n): round(float(falling[:n].sum()) / total, 4) for n in SIZES if n <= vocab_size}
    return ids, {"written": total, "coverage": shares}


def write(folder: Path, ids: npt.NDArray[np.int64], facts: dict[str, Any]) -> None:
    """Store the choice for the later stages."""
    part = folder / f".{FILE}"
    part.write_text(json.dumps({**facts, "ids": ids.tolist()}))
    part.replace(folder / FILE)


def read(folder: Path) -> npt.NDArray[np.int64] | None:
    """The stored choice, if that stage has run."""
    path = folder / FILE
    return np.array(json.loads(path.read_text())["ids"], np.int64) if path.is_file() else None
