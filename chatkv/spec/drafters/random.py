"""Guesses at random, for `chatkv verify` and replays: it exercises every path and helps nobody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chatkv.spec.drafter import DraftContext
from chatkv.spec.tree import MAX_DEPTH, DraftTree
from chatkv.spec.verify import Accepted


class RandomDrafter:
    """Trees of random shape; half of the tokens come from the conversation, so that some are right.

    A tree is a function of (seed, sequence id, length), so a run can be repeated.

    Args:
        vocab_size: Ids to guess from.
        seed: Of the trees, not of the text.
    """

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Nothing to remember."""

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """Nothing to learn."""

    def drop(self, seq_id: int) -> None:
        """Nothing to free."""

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        known = context.tokens
        rng = np.random.default_rng([self.seed, context.seq_id, len(known)])
        ids, parents, depths = [int(known[-1])], [0], [0]
        taken: set[tuple[int, int]] = set()
        for _ in range(int(rng.integers(0, max_rows))):
            # The newest row half of the time: paths get long enough to be interesting.
            parent = len(ids) - 1 if rng.random() < 0.5 else int(rng.integers(0, len(ids)))
            if rng.random() < 0.5:
                token = int(known[int(rng.integers(0, len(known)))])
            else:
                token = int(rng.integers(0, self.vocab_size))
            if depths[parent] == MAX_DEPTH or (parent, token) in taken:
                continue
            taken.add((parent, token))
            depths.append(depths[parent] + 1)
            ids.append(token)
            parents.append(parent)
        return DraftTree.of(ids, parents, source=self.name)
