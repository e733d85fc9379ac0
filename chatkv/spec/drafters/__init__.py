"""The drafters by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatkv.errors import ConfigError
from chatkv.spec.drafter import Drafter, GuardedDrafters
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.drafters.random import RandomDrafter

DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda vocab_size: NgramDrafter(),
    "random": lambda vocab_size: RandomDrafter(vocab_size),
}
"""Name -> maker, which is given the size of the vocabulary."""


def create_drafters(names: Sequence[str], *, vocab_size: int) -> GuardedDrafters:
    """The named drafters behind one guard.

    Raises:
        ConfigError: A name is unknown.
    """
    for name in names:
        if name not in DRAFTERS:
            raise ConfigError(
                f"Unknown drafter {name!r}.", hint=f"Use one of: {', '.join(sorted(DRAFTERS))}."
            )
    return GuardedDrafters([DRAFTERS[name](vocab_size) for name in names], vocab_size=vocab_size)
