"""Which token comes next. Knows logits, ids and settings; no tree, no drafter.

Sample and match: the token at a position is a pure function of (logits, settings, seed, position),
so nothing that only makes the model faster can change it. Importing this module loads no numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from chatkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from chatkv.noise import FloatArray

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
GRAMMARS = ("json_schema", "regex", "lark")

Bias: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form a reply must have; `chatkv.grammar` compiles it."""

    kind: str
    """`json_schema`, `regex` or `lark`."""
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise ConfigError(
                f"There is no grammar of kind {self.kind!r}.", hint=f"Use {', '.join(GRAMMARS)}."
            )
        if not self.text.strip():
            raise ConfigError("The grammar is empty.", hint="Leave it out.")
        if self.kind == "json_schema":
            try:
                schema = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                deep = isinstance(error, RecursionError)
                raise ConfigError(
                    f"The JSON schema is not JSON: {'too deeply nested' if deep else error}.",
                    hint="Correct it there.",
                ) from None
            if not isinstance(schema, dict):
                raise ConfigError(
                    "The JSON schema is not an object.", hint="Write {} for any JSON at all."
                )

    @staticmethod
    def parse(spelled: object) -> Grammar | None:
        """A grammar from `KIND:TEXT`; none from `none` or None. Raises ConfigError."""
        if spelled is None or spelled == "none":
            return None
        if isinstance(spelled, Grammar):
            return spelled
        kind, _, text = str(spelled).partition(":")
        return Grammar(kind, text)

    def __str__(self) -> str:
        return f"{self.kind}:{self.text}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one reply, checked when built.

    They apply in this order: bias, penalties, grammar, temperature, top-k, top-p, min-p. A bias may
    be given as a mapping, a grammar as text: that is how they are stored.
    """

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
    repetition_penalty: float = 1.0
    """Tokens that occur before, prompt included: a logit above 0 is divided by this, one below is
    multiplied; 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the reply holds; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token once for each time the reply holds it; 0 is off."""
    logit_bias: Bias = ()
    """(token, what is added to its logit), by token; -100 as good as forbids it."""
    logprobs: int | None = None
    """Tell the log probability of each token, and so many of the likeliest beside it."""
    grammar: Grammar | None = None
    """The form the whole reply must have."""

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
        if isinstance(self.stop, str):  # its letters would be taken for texts
            raise ConfigError("stop is one text.", hint=f"Write ({self.stop!r},).")
        if "" in self.stop:
            raise ConfigError("A stop text is empty.", hint="Leave it out.")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}.",
                hint="Use 0.01 to 100; 1 is off.",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name} is {getattr(self, name)}.", hint="Use -2 to 2.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs is {self.logprobs}.", hint=f"Use 0 to {MAX_LOGPROBS}.")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "grammar", Grammar.parse(self.grammar))

    @property
    def edits_rows(self) -> bool:
        """Whether logits are changed before the choice, by what came before or by a bias."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.grammar is not None
        )


def _bias(raw: Any) -> Bias:
    pairs = raw.items() if isinstance(raw, Mapping) else raw
    try:
        found = {int(token): float(bias) for token, bias in pairs}
    except (TypeError, ValueError):
        raise ConfigError(
            "logit_bias is not a number for each token id.", hint='Write {"1234": -100}.'
        ) from None
    for token, bias in found.items():
        if token < 0 or not -100 <= bias <= 100:
            raise ConfigError(
                f"logit_bias adds {bias:g} to token {token}.",
                hint="Use token ids of 0 or more, and -100 to 100.",
            )
    return tuple(sorted(found.items()))


class Constraint(Protocol):
    """Which tokens may follow the ids of a reply. A pure function of those ids; `Matcher` of
    `chatkv.grammar` is one."""

    def mask(self, reply: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """[V] True where a token may follow; None behind the end, where everything may."""
        ...

    def fitting(self, reply: Sequence[int], path: Sequence[int]) -> int:
        """How many ids of `path` may follow the reply, one after the other."""
        ...

    def accepts(self, reply: Sequence[int]) -> bool:
        """Whether the reply is whole and may end here."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token."""

    token: int
    margin: float
    """Best score minus second best, noise included; inf when the filters left one token."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs of the model's own probabilities: before bias, penalties and what follows."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first, the lower id first among equals."""


class Sampler:
    """Picks tokens for one reply. What it keeps between picks is memory and memos, no state.

    One sampler belongs to one thread at a time.

    Args:
        params: Settings of the reply.
        prompt: All ids before the reply.
        grammar: `params.grammar`, compiled.
        plain: Use the numpy definition instead of the compiled one. Same tokens, slower.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        grammar: Constraint | None = None,
        *,
        plain: bool = False,
    ) -> None:
        from chatkv.sampling_cpu import Scratch, pick_fast
        from chatkv.sampling_edits import RowEdits
        from chatkv.sampling_plain import pick_plain

        assert (params.grammar is None) == (grammar is None), "a grammar must be compiled"
        self.params = params
        self.grammar = grammar
        self.prompt_tokens = len(prompt)
        self.edits_rows = params.edits_rows
        """Whether `pick` reads the history."""
        self._edits = RowEdits(params, prompt, grammar) if self.edits_rows else None
        self._pick = pick_plain if plain else partial(pick_fast, scratch=Scratch())

    def pick(self, logits: FloatArray, history: Sequence[int], position: int) -> Choice:
        """The token that comes at `position`. Pure.

        Args:
            logits: [V] float32 of the row before `position`, contiguous. Not modified.
            history: All ids before `position`, prompt included; not read unless `edits_rows`.
            position: Absolute index of the token being chosen, template and prompt included.

        Raises:
            ModelError: A logit is NaN, or the best one is infinite.
        """
        params = self.params
        if self._edits is not None:
            logits = self._edits.apply(logits, history[self.prompt_tokens :])
        token, margin = self._pick(
            logits,
            position,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        return Choice(token, margin)

    def fitting(self, history: Sequence[int], path: Sequence[int]) -> int:
        """How many ids of `path` the grammar lets follow; all of them without one."""
        if self.grammar is None:
            return len(path)
        return self.grammar.fitting(history[self.prompt_tokens :], path)

    def may_end(self, history: Sequence[int]) -> bool:
        """Whether the grammar lets the reply end here."""
        return self.grammar is None or self.grammar.accepts(history[self.prompt_tokens :])

    def noise(self, position: int, token_ids: npt.ArrayLike) -> FloatArray:
        """[K] float32: the noise these tokens get at `position`; zeros at temperature 0."""
        import numpy as np

        from chatkv.noise import gumbel

        if self.params.temperature == 0:
            return np.zeros(np.size(token_ids), dtype=np.float32)
        return gumbel(self.params.seed, position, token_ids)


def logprobs(logits: FloatArray, token: int, top: int) -> Logprobs:
    """log softmax of the raw logits at `token` and at the `top` likeliest tokens.

    float64 steps of a fixed order, so that equal logits give equal numbers.
    """
    import numpy as np

    best = logits.max()
    total = float(np.exp(logits - best).sum(dtype=np.float64))
    shift = float(best) + math.log(total)
    count = min(top, len(logits))
    among = np.flatnonzero(logits >= np.partition(logits, -count)[-count]) if count else []
    found = sorted((-float(logits[i]), int(i)) for i in among if logits[i] > -np.inf)[:count]
    return Logprobs(
        token, float(logits[token]) - shift, tuple((i, -value - shift) for value, i in found)
    )
