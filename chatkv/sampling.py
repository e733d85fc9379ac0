"""Which token comes next. Knows logits, ids and settings; no tree, no drafter.

Sample and match: the token at a position is a pure function of (logits, settings, seed, position),
so nothing that only makes the model faster can change it. Importing this module loads no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from chatkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from chatkv.noise import FloatArray

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one reply, checked when built."""

    temperature: float = 0.7
    """0 takes the most probable token; otherwise 0.01 to 100."""
    top_p: float = 0.95
    """Keep the most probable tokens that together reach this share; 1 is off."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 is off."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the best one; 0 is off."""
    seed: int = 0
    """63 bits. The same seed, settings and history give the same reply."""
    max_tokens: int | None = None
    """Longest reply in tokens; None is as far as the context goes."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply."""

    def __post_init__(self) -> None:
        temperature = self.temperature
        if not (temperature == 0 or 0.01 <= temperature <= 100):
            raise ConfigError(f"temperature is {temperature}.", hint="Use 0, or 0.01 to 100.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}.", hint="Use above 0, up to 1 (off).")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}.", hint="Use 1 or more, or 0 (off).")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}.", hint="Use 0 (off) to 1.")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed is {self.seed}.", hint=f"Use 0 to {MAX_SEED}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}.", hint="Use 1 or more.")
        if "" in self.stop:
            raise ConfigError("A stop text is empty.", hint="Leave it out.")


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token."""

    token: int
    logprob: float | None
    """Natural log of the model's own probability, before temperature and filters; None if
    not asked for."""
    margin: float
    """Best score minus second best, noise included; inf when the filters left one token."""


class Sampler:
    """Picks tokens for one reply. Keeps no state between picks, only scratch memory.

    One sampler belongs to one thread at a time.

    Args:
        params: Settings of the reply.
        logprobs: Compute `Choice.logprob`: one more pass over the vocabulary a token.
        plain: Use the numpy definition instead of the compiled one. Same tokens, slower.
    """

    def __init__(
        self, params: SamplingParams, *, logprobs: bool = False, plain: bool = False
    ) -> None:
        from chatkv.sampling_cpu import Scratch, pick_fast
        from chatkv.sampling_plain import pick_plain

        self.params = params
        self.logprobs = logprobs
        self._pick = pick_plain if plain else partial(pick_fast, scratch=Scratch())

    def pick(self, logits: FloatArray, history: Sequence[int], position: int) -> Choice:
        """The token that comes at `position`. Pure.

        Args:
            logits: [V] float32 of the row before `position`, contiguous. Not modified.
            history: Ids before `position`, for settings that look back. None does yet.
            position: Absolute index of the token being chosen, template and prompt included.

        Raises:
            ModelError: A logit is NaN, or the best one is infinite.
        """
        del history
        params = self.params
        token, margin = self._pick(
            logits,
            position,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        logprob = self.logprob(logits, token) if self.logprobs else None
        return Choice(token, logprob, margin)

    def noise(self, position: int, token_ids: npt.ArrayLike) -> FloatArray:
        """[K] float32: the noise these tokens get at `position`; zeros at temperature 0."""
        import numpy as np

        from chatkv.noise import gumbel

        if self.params.temperature == 0:
            return np.zeros(np.size(token_ids), dtype=np.float32)
        return gumbel(self.params.seed, position, token_ids)

    @staticmethod
    def logprob(logits: FloatArray, token: int) -> float:
        """log softmax of the raw logits at `token`, in float64 steps of a fixed order."""
        import numpy as np

        best = logits.max()
        total = float(np.exp(logits - best).sum(dtype=np.float64))
        return float(logits[token]) - float(best) - math.log(total)
