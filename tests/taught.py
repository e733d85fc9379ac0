"""What heads are trained from in tests: a few conversations, prompts, and the target's own word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from chatkv.spec.train.base import Base, Rows, last_rows
from chatkv.spec.train.distill import DistillConfig
from chatkv.spec.train.shards import Conversation

HEAD = [60, 117, 62]
PROMPTS = [["one", "two"], ["three"], ["four, a longer one"]]


def alone(weights, ids) -> torch.Tensor:
    """[T, V]: the target's logits over one conversation."""
    own = torch.tensor([ids], dtype=torch.int32)
    rows = Rows(own, torch.ones_like(own), torch.arange(len(ids))[None].int(), own > -1)
    states = Base(weights).run(rows).states
    return last_rows(weights, states[0, :, -1]) @ weights.head.T


def some_conversations(count: int = 7, seed: int = 0) -> list[Conversation]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = rng.integers(0, 250, rng.integers(20, 60)).astype(np.int32)
        found.append(Conversation(ids, ((8, len(ids)),), 0.7, 3, 11))
    return found


def config_for(prompts: Path, out: Path, **more) -> DistillConfig:
    settings = {"seats": 4, "length": 64, "answer_tokens": 20, "max_tokens": 200, **more}
    return DistillConfig((prompts,), out, 60.0, **settings)
