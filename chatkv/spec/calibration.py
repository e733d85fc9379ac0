"""How often guesses turn out right. Knows sources, depths and bins; no tokens, no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chatkv.spec.stats import Outcome
from chatkv.spec.tree import DraftTree

PRIOR_TRIALS = 3.0
"""What a source says of its own guess weighs as much as three trials."""
KEEP = 0.5 ** (1 / 300)
"""Half-life of 300 trials: what worked a page ago counts, what worked yesterday fades."""
DEEPEST = 8
"""Depths beyond this share one row."""
UNTRIED = (0.0, 0.0)


class Calibration:
    """Hits and trials by (source, depth, bin, greedy or not), fading."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, int, bool], tuple[float, float]] = {}

    def rate(self, source: str, depth: int, score: int, greedy: bool, own: float = 1 / 3) -> float:
        """Chance that such a guess is right, given that its parent is.

        Args:
            own: What the source says of it, which counts until it is known better.
        """
        key = (source, min(depth, DEEPEST), score, greedy)
        hits, tried = self._counts.get(key, UNTRIED)
        return (hits + PRIOR_TRIALS * own) / (tried + PRIOR_TRIALS)

    def share_right(self, source: str, depth: int, greedy: bool) -> float:
        """Share of a source's guesses at a depth that were right, whatever it said of them; near 1
        while little is known."""
        depth = min(depth, DEEPEST)
        hits = tried = PRIOR_TRIALS
        for (name, at, _, cool), (right, all_of_them) in self._counts.items():
            if (name, at, cool) == (source, depth, greedy):
                hits, tried = hits + right, tried + all_of_them
        return hits / tried

    def learn(self, outcomes: Iterable[Outcome], greedy: bool) -> None:
        """Count what `stats.trials` found."""
        for source, depth, score, right in outcomes:
            key = (source, min(depth, DEEPEST), score, greedy)
            hits, tried = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (hits * KEEP + right, tried * KEEP + 1)

    def to_json(self) -> list[list[object]]:
        """All counts."""
        return [[*key, *counts] for key, counts in sorted(self._counts.items())]

    def recall(self, known: Iterable[Sequence[Any]]) -> None:
        """Go on from the counts of an earlier run."""
        for source, depth, score, greedy, hits, tried in known:
            if 0 <= hits <= tried:
                key = (str(source), int(depth), int(score), bool(greedy))
                self._counts[key] = (float(hits), float(tried))

    def chances(self, tree: DraftTree, greedy: bool) -> list[float]:
        """[R] chance of each path from experience: of several sources, the most trusted counts."""
        chance = [1.0]
        parents: list[int] = tree.parents.tolist()
        bins: list[list[int]] = tree.bins.tolist()
        said: list[float] = tree.chance.tolist()
        sources, depths, counts = tree.sources, tree.depths, self._counts
        for row in range(1, len(parents)):
            best, parent, depth = 0.0, parents[row], min(depths[row], DEEPEST)
            own = PRIOR_TRIALS * said[row] / max(said[parent], 1e-9)
            for source, score in zip(sources, bins[row], strict=True):
                if score:  # as `rate` has it: this is done for all rows at every step
                    hits, tried = counts.get((source, depth, score, greedy), UNTRIED)
                    best = max(best, (hits + own) / (tried + PRIOR_TRIALS))
            chance.append(chance[parent] * best)
        return chance
