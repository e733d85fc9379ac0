"""Guesses that the conversation repeats itself. Knows ids; needs no model and no training.

Prompt lookup and suffix decoding: what followed the longest earlier occurrence of the newest tokens
is likely to follow again. All state is rebuilt from the ids, so it is complete after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.automaton import SuffixAutomaton
from chatkv.spec.tree import MAX_DEPTH, DraftTree
from chatkv.spec.verify import Accepted

SHORTEST_MATCH = 2
MAX_BRANCHES = 4


class NgramDrafter:
    """Longest match of two or more tokens; a match of m tokens earns a chain of up to 2 m.

    Up to four branches at the root, most frequent first, then newest; then the best one onward.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._automata: dict[int, SuffixAutomaton] = {}

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Index these ids. What is already indexed and unchanged is not done again."""
        ids = list(tokens)
        automaton = self._automata.get(seq_id)
        if automaton is None or automaton.ids != ids[: len(automaton.ids)]:
            automaton = self._automata[seq_id] = SuffixAutomaton()
        automaton.extend(ids[len(automaton.ids) :])

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """Index the new tokens."""
        automaton = self._automata.get(seq_id)
        if automaton is not None:
            automaton.extend(accepted.tokens)

    def drop(self, seq_id: int) -> None:
        """Free the index."""
        self._automata.pop(seq_id, None)

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        tokens, root = context.tokens, int(context.tokens[-1])
        automaton = self._automata.get(context.seq_id)
        if automaton is None or len(automaton.ids) != len(tokens) or automaton.ids[-1] != root:
            self.follow(context.seq_id, tokens)
            automaton = self._automata[context.seq_id]
        state = automaton.match()
        length = automaton.length[state]
        if length < SHORTEST_MATCH or max_rows < 2:
            return DraftTree.root(root)
        ids, parents, chance, bins = [root], [0], [1.0], [0]
        parent, trust, alone = 0, length / (length + 2), score_bin(length, 1.0)
        following, count = automaton.next, automaton.count
        for depth in range(min(2 * length, MAX_DEPTH)):
            while (
                not following[state] and automaton.length[automaton.link[state]] >= SHORTEST_MATCH
            ):
                # The end of the text, as in a loop: go on from a shorter match.
                state = automaton.link[state]
            if not following[state] or len(ids) >= max_rows:
                break
            row = len(ids)
            if len(following[state]) == 1:  # as most often, and this is asked at every step
                ((token, state),) = following[state].items()
                ids.append(token)
                parents.append(parent)
                chance.append(chance[parent] * trust)
                bins.append(alone)
            else:
                followers = automaton.followers(state)
                total = sum(count[below] for _, below in followers)
                for token, below in followers[: MAX_BRANCHES if depth == 0 else 1]:
                    share = count[below] / total
                    ids.append(token)
                    parents.append(parent)
                    chance.append(chance[parent] * share * trust)
                    bins.append(score_bin(length, share))
                state = followers[0][1]
            parent = row
        return DraftTree.of(ids, parents, chance, bins, self.name).best(max_rows)


def score_bin(match_length: int, share: float) -> int:
    """1..8 from the match length (2, 4, 8, 16 and more) and whether one branch dominates."""
    size = min(max(match_length, 2), 16).bit_length() - 2
    return 1 + 2 * size + (share >= 0.75)
