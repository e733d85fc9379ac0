"""The only acceptance rule. Knows a tree and what the model picks; no noise, no logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from chatkv.errors import ModelError
from chatkv.spec.tree import DraftTree

Pick: TypeAlias = Callable[[int, tuple[int, ...]], int]
"""(row, tokens picked so far in this step) -> the token the model picks after that row."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one step gained. `rows[i]` is the row whose logits chose `tokens[i]`."""

    tokens: tuple[int, ...]
    """One or more, all chosen by the model. The last one has no K/V yet: it is the next root."""

    rows: tuple[int, ...]
    """Rows whose K/V stay: ascending, the root first, as many as tokens."""

    picks: tuple[int | None, ...]
    """[R] the model's pick at each row, None where it was not asked for."""

    tree: DraftTree | None = None
    """What was run, where a drafter wants to learn from all picks."""

    def until(self, is_last: Callable[[int], bool]) -> Accepted:
        """Cut after the first token that ends the reply; tokens and rows are cut together.

        `is_last` sees each kept token once, in order, so it may be a stop machine with state.
        """
        for count, token in enumerate(self.tokens, start=1):
            if is_last(token):
                return replace(self, tokens=self.tokens[:count], rows=self.rows[:count])
        return self

    def with_all_picks(self, tree: DraftTree, pick: Pick) -> Accepted:
        """Ask at the rows off the path too. That changes nothing but what drafters learn."""
        picks = list(self.picks)
        for row, found in enumerate(picks):
            if found is None:
                with suppress(ModelError):  # logits that nobody needs may be broken
                    picks[row] = pick(row, tree.path(row))
        return replace(self, picks=tuple(picks), tree=tree)


def verify(tree: DraftTree, pick: Pick) -> Accepted:
    """Walk down the tree for as long as it guessed what the model picks.

    A row at depth d picks the token at position `root + 1 + d`. Only rows on the path are asked.
    """
    tokens: list[int] = []
    picks: list[int | None] = [None] * len(tree)
    rows, row = [0], 0
    while True:
        token = pick(row, tuple(tokens))
        picks[row] = token
        tokens.append(token)
        child = tree.child(row, token)
        if child is None:
            return Accepted(tuple(tokens), tuple(rows), tuple(picks))
        rows.append(child)
        row = child
