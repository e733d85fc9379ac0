"""The drafters by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatkv.errors import ConfigError, HeadsMismatch
from chatkv.models.model import Model
from chatkv.spec.drafter import Drafter
from chatkv.spec.drafters.draft_model import DraftModelDrafter
from chatkv.spec.drafters.heads import find_heads, load_heads
from chatkv.spec.drafters.history import HistoryDrafter
from chatkv.spec.drafters.lookahead import LookaheadDrafter
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.drafters.random import RandomDrafter
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.token_log import TokenLog

logger = logging.getLogger(__name__)

AUTO = "auto"
"""May stand among the names: `ngram`, `history` where there are other conversations, and `heads`
where there are any for the model's very weights."""
MERGED = "merged"
"""May stand among the names, and adds nothing: the trees of several drafters are always merged."""


@dataclass(frozen=True, slots=True)
class DraftMeans:
    """What drafters are made from."""

    vocab_size: int
    log: TokenLog | None = None
    """Other conversations; None where there are none, or none may be read."""
    draft: Model | None = None
    """The smaller model of `draft_model`, which nobody else uses."""
    context_limit: int = 0
    """Tokens of the longest sequence."""
    target: Model | None = None
    """The model that is guessed for, which `heads` belong to."""


DRAFTERS: dict[str, Callable[[DraftMeans], Drafter]] = {
    "ngram": lambda means: NgramDrafter(),
    "history": lambda means: HistoryDrafter(means.log),
    "lookahead": lambda means: LookaheadDrafter(),
    "heads": lambda means: _heads(means),
    "draft_model": lambda means: _draft_model(means),
    "random": lambda means: RandomDrafter(means.vocab_size),
}


def _heads(means: DraftMeans) -> Drafter:
    assert means.target is not None, "an engine has a model"
    return load_heads(means.target)


def _draft_model(means: DraftMeans) -> Drafter:
    expect_draft_model(["draft_model"], means.draft)
    assert means.draft is not None
    return DraftModelDrafter(means.draft, means.context_limit)


def expect_draft_model(names: Sequence[str], model: object) -> None:
    """Raise ConfigError if the drafter `draft_model` is asked for without a model, or its name."""
    if "draft_model" in names and not model:
        raise ConfigError(
            "The drafter 'draft_model' has no model.", hint="Name one with --draft-model."
        )


def check_names(names: Sequence[str]) -> list[str]:
    """The drafters that are meant, each once. Raises ConfigError for a name that is unknown."""
    chosen = [name for name in dict.fromkeys(names) if name != MERGED]
    for name in chosen:
        if name != AUTO and name not in DRAFTERS:
            raise ConfigError(
                f"Unknown drafter {name!r}.",
                hint=f"Use {AUTO}, or some of: {', '.join(sorted(DRAFTERS))}.",
            )
    if names and not chosen:
        raise ConfigError(
            "The drafter 'merged' joins the guesses of others, and none is named.",
            hint="Name them too: ngram,history,merged.",
        )
    return chosen


def drafters_for(names: Sequence[str], model: Model | None, *, history: bool) -> list[str]:
    """The drafters that `names` mean for a model, each once.

    Args:
        history: Whether there are other conversations, for `auto`.

    Raises:
        ConfigError: A name is unknown.
    """
    meant: list[str] = []
    for name in check_names(names):
        if name != AUTO:
            meant.append(name)
            continue
        heads = model is not None and find_heads(model) is not None
        meant += ["ngram", *["history"] * history, *["heads"] * heads]
    return list(dict.fromkeys(meant))


def create_drafters(names: Sequence[str], means: DraftMeans) -> GuardedDrafters:
    """The named drafters behind one guard.

    Raises:
        ConfigError: A name is unknown.
        HeadsMismatch: Heads were asked for by name, and none fit.
    """
    made: list[Drafter] = []
    left_out: list[str] = []
    for name in drafters_for(names, means.target, history=means.log is not None):
        try:
            made.append(DRAFTERS[name](means))
        except HeadsMismatch as error:
            if name in names:
                raise
            left_out.append(f"{name} is left out: {error}")
            logger.warning(left_out[-1])
    guarded = GuardedDrafters(made, vocab_size=means.vocab_size)
    guarded.failures += left_out
    return guarded
