"""What exactness costs: plain decoding, and the same with products of the library.

Knows clocks. The ids of the two may differ, and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chatkv.engine import Engine
from chatkv.errors import ModelError
from chatkv.models.model import Model
from chatkv.sampling import SamplingParams
from sessions.bench.spec_play import Reply, play
from sessions.verify import Prompt

TAX_PROMPTS = 8
"""Conversations played for it at most."""


@dataclass(frozen=True, slots=True)
class Tax:
    """Plain rates, exact and free."""

    exact_tokens_per_s: float | None = None
    free_tokens_per_s: float | None = None
    tax: float | None = None
    """Time of a token over that of a free one."""
    missing: str = ""
    """Why there are no numbers."""

    @property
    def slower(self) -> float:
        """What a speed-up over exact plain steps is to be divided by, to be one over the fastest
        plain steps that there are."""
        return max(1.0, self.tax or 1.0)


def measure_tax(
    load: Callable[[], Model | None],
    plain: Engine,
    prompts: Sequence[tuple[Prompt, SamplingParams]],
) -> Tax:
    """Play some prompts exact, free, free, exact, each warmed up.

    Args:
        load: Loads the model with free kernels; None where there are none.
        plain: Decodes without drafting.
        prompts: The first ones are played.
    """
    try:
        model = load()
        if model is None:
            return Tax(missing=f"the kernels of a {plain.model.device} are our own, all exact")
        engine = Engine(model, plain.config, costs={1: 1.0})
        exact, free = [0.0, 0.0], [0.0, 0.0]
        for prompt, params in prompts[:TAX_PROMPTS]:
            for on in (plain, engine):
                play(on, prompt, params)
            for on, sums in ((plain, exact), (engine, free), (engine, free), (plain, exact)):
                _add(sums, play(on, prompt, params))
    except (torch.OutOfMemoryError, ModelError) as error:
        return Tax(missing=f"the model does not fit a third time: {error}")
    if not exact[0] or not free[0]:
        return Tax(missing="every reply ended with its first token")
    rates = [1000 * tokens / ms for tokens, ms in (exact, free)]
    return Tax(rates[0], rates[1], rates[1] / rates[0])


def _add(sums: list[float], replies: Sequence[Reply]) -> None:
    sums[0] += sum(len(reply.ids) - 1 for reply in replies)
    sums[1] += sum(reply.decode_ms for reply in replies)
