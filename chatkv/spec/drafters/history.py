"""Guesses that a conversation repeats an older one. Knows ids; needs no model and no training.

What followed the newest tokens in other stored conversations, user text included, is likely to
follow again. The log is shared and belongs to whoever stores the conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from chatkv.spec.drafter import DraftContext
from chatkv.spec.token_log import GIVEN, ID_MASK, TokenIndex, TokenLog
from chatkv.spec.tree import MAX_DEPTH, DraftTree
from chatkv.spec.verify import Accepted

Voter: TypeAlias = tuple[int, list[int]]

LONG_MATCH = 8
"""Tokens from which a match counts as long in the calibration."""


class HistoryDrafter:
    """Up to four places in the log with the longest matches of four tokens and more.

    They vote, each with the length of its match: the root gets a branch for each token that
    followed somewhere; below the best branch the longest match goes on, for twice its length.

    Args:
        log: Where to look; None is an empty log.
    """

    name = "history"

    def __init__(self, log: TokenLog | None) -> None:
        self.log = log

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Nothing to remember: the log grows by finished turns only."""

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """Nothing to learn."""

    def drop(self, seq_id: int) -> None:
        """Nothing to free."""

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        root = int(context.tokens[-1])
        index = None if self.log is None or max_rows < 2 else self.log.now()
        going = [] if index is None else _voters(index, context.tokens)
        if not going:
            return DraftTree.root(root)
        votes: dict[int, list[Voter]] = {}
        for voter in going:
            votes.setdefault(voter[1][0] & ID_MASK, []).append(voter)
        # Of equals the newest comes first: that is the order of the voters.
        ranked = sorted(votes.values(), key=_weight, reverse=True)
        ids, parents, chance, bins = [root], [0], [1.0], [0]
        total = _weight(going)
        for voters in ranked:
            length, words = max(voters, key=_length)
            share = _weight(voters) / total
            ids.append(words[0] & ID_MASK)
            parents.append(0)
            chance.append(share * length / (length + 2))
            bins.append(score_bin(length, share, words[0]))
        length, lead = max(ranked[0], key=_length)
        others = [voter for voter in ranked[0] if voter[1] != lead[: len(voter[1])]]
        sure, parent = _weight(ranked[0]) - _weight(others), 1
        for depth, word in enumerate(lead[1 : max_rows - 1], start=1):
            token, share = word & ID_MASK, 1.0
            if others:
                asked = [voter for voter in others if len(voter[1]) > depth]
                others = [voter for voter in asked if voter[1][depth] & ID_MASK == token]
                share = (sure + _weight(others)) / (sure + _weight(asked))
            chance.append(chance[parent] * share * length / (length + 2))
            parents.append(parent)
            parent = len(ids)
            ids.append(token)
            bins.append(score_bin(length, share, word))
        return DraftTree.of(ids, parents, chance, bins, self.name).best(max_rows)


def score_bin(length: int, share: float, word: int) -> int:
    """1..8 from the match length, whether one branch dominates, and who wrote the word."""
    return 1 + 4 * (length >= LONG_MATCH) + 2 * (share >= 0.75) + (word < GIVEN)


def _voters(index: TokenIndex, tokens: Sequence[int]) -> list[Voter]:
    """Each place that matches and goes on: (ids that match, the words behind them)."""
    found = [
        (length, index.following(place, min(2 * length, MAX_DEPTH)))
        for length, place in index.matches(tokens)
    ]
    return [voter for voter in found if voter[1]]


def _length(voter: Voter) -> int:
    return voter[0]


def _weight(voters: Sequence[Voter]) -> int:
    return sum(length for length, _ in voters)
