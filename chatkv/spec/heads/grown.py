"""From what a head grew to a tree with score bins. Knows no tensor."""

from __future__ import annotations

from bisect import bisect_right

from chatkv.spec.tree import DraftTree

SOURCE = "heads"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
"""Upper edges of the score bins: what the head gives a guess, its parent being right."""


def tree_of(tokens: list[int], parents: list[int], chance: list[float]) -> DraftTree:
    """A tree, its root first."""
    # Rounding may lift a guess that is nearly certain above its parent.
    chance = list(chance)
    for row, parent in enumerate(parents):
        chance[row] = min(chance[row], chance[parent])
    shares = [c / max(chance[p], 1e-9) for c, p in zip(chance, parents, strict=True)]
    bins = [0, *(1 + bisect_right(SHARES, share) for share in shares[1:])]
    return DraftTree.of(tokens, parents, chance, bins, SOURCE)
