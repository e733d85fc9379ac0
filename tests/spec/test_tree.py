"""Tree algebra: what the constructor refuses, masks, best, merge, chain, sanitize."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.spec.tree import MAX_DEPTH, MAX_ROWS, DraftTree, sanitize


@st.composite
def trees(draw, max_rows: int = 12, source: str = "a", tokens: int = 6) -> DraftTree:
    ids, parents, chance = [1], [0], [1.0]
    seen = set()
    for _ in range(draw(st.integers(0, max_rows - 1))):
        parent, token = draw(st.integers(0, len(ids) - 1)), draw(st.integers(0, tokens - 1))
        if (parent, token) in seen:
            continue
        seen.add((parent, token))
        ids.append(token)
        parents.append(parent)
        chance.append(float(np.float32(chance[parent] * draw(st.sampled_from([1, 0.9, 0.5, 0.1])))))
    return DraftTree.of(ids, parents, chance, source=source)


@pytest.mark.parametrize(
    ("tokens", "parents", "chance", "match"),
    [
        ([1] * 64, [0] * 64, None, "1 to 63 rows"),
        ([], [], None, "1 to 63 rows"),
        ([1, 2], [0, 1], None, "parents come first"),
        ([1, 2], [0, -1], None, "parents come first"),
        ([1, 2, 2], [0, 0, 0], None, "guessed twice"),
        ([1, -2], [0, 0], None, "negative"),
        ([1, 2], [0, 0], [1.0, float("nan")], "chance"),
        ([1, 2, 3], [0, 0, 1], [1.0, 0.5, 0.6], "above that of its parent"),
        ([1, 2], [0, 0], [0.5, 0.5], "row 0"),
        (list(range(17)), [0, *range(16)], None, "deeper than 15"),
    ],
)
def test_constructor_refuses(tokens, parents, chance, match):
    with pytest.raises(ValueError, match=match):
        DraftTree.of(tokens, parents, chance or [1.0] * len(tokens))


def test_constructor_refuses_other_types_and_shapes():
    good = DraftTree.of([1, 2], [0, 0])
    for tokens in (good.tokens.astype(np.float32), good.tokens.reshape(1, 2), good.tokens[:1]):
        with pytest.raises(ValueError, match=r"shape|int32|bins"):
            DraftTree(tokens, good.parents, good.chance, good.bins, good.sources)
    with pytest.raises(ValueError, match="read-only"):
        good.tokens[0] = 5


def test_limits_are_reached():
    chain = DraftTree.of(list(range(16)), [0, *range(15)])
    assert max(chain.depths) == MAX_DEPTH
    wide = DraftTree.of(list(range(63)), [0] * 63)
    assert len(wide) == MAX_ROWS
    assert wide.ancestors().min() > 0


@given(trees(max_rows=40, tokens=40))
def test_masks_paths_and_children_match_the_parents(tree):
    masks = tree.ancestors()
    assert masks.dtype == np.int64
    for row in range(len(tree)):
        line, above = [row], row
        while above:
            above = int(tree.parents[above])
            line.append(above)
        assert int(masks[row]) == sum(1 << i for i in line)
        assert tree.depths[row] == len(line) - 1
        assert tree.path(row) == tuple(int(tree.tokens[i]) for i in line[-2::-1])
        below = [i for i in range(1, len(tree)) if tree.parents[i] == row]
        assert tree.children(row) == below
        for i in below:
            assert tree.child(row, int(tree.tokens[i])) == i
    assert tree.child(0, 999) is None


@given(trees(max_rows=10), st.integers(1, 10))
def test_best_equals_brute_force(tree, size):
    size = min(size, len(tree))
    most = max(
        sum(float(tree.chance[row]) for row in (0, *rows))
        for rows in combinations(range(1, len(tree)), size - 1)
        if all(int(tree.parents[row]) in (0, *rows) for row in rows)
    )
    best = tree.best(size)
    assert len(best) == size
    assert float(best.chance.astype(np.float64).sum()) == pytest.approx(most)


@given(trees(source="a"), trees(source="b"), trees(source="c"))
def test_merge_is_a_union(one, two, three):
    merged = DraftTree.merge([one, two])
    assert merged == DraftTree.merge([two, one])
    assert merged == DraftTree.merge([merged, one]) == DraftTree.merge([merged, merged])
    assert DraftTree.merge([merged, three]) == DraftTree.merge([one, DraftTree.merge([two, three])])

    def by_path(tree):
        return {tree.path(row): row for row in range(len(tree))}

    rows, mine, theirs = by_path(merged), by_path(one), by_path(two)
    assert rows.keys() == mine.keys() | theirs.keys()
    for path, row in rows.items():
        chances = [t.chance[m[path]] for t, m in ((one, mine), (two, theirs)) if path in m]
        assert merged.chance[row] == max(chances)
        if path:
            assert merged.bins[row].tolist() == [path in mine, path in theirs]


def test_merge_keeps_the_63_most_probable_rows():
    likely = DraftTree.of(list(range(1, 41)), [0] * 40, [1.0] + [0.5] * 39, source="a")
    others = DraftTree.of([1, *range(50, 90)], [0] * 41, [1.0] + [0.1] * 40, source="b")
    merged = DraftTree.merge([others, likely])
    assert len(merged) == 63
    assert (merged.chance == 0.5).sum() == 39


def test_merge_needs_one_root():
    with pytest.raises(ValueError, match="same root"):
        DraftTree.merge([DraftTree.root(1), DraftTree.root(2)])


def test_chain_takes_the_most_probable_child():
    tree = DraftTree.of([1, 2, 3, 4, 5], [0, 0, 0, 2, 2], [1, 0.3, 0.6, 0.1, 0.5])
    chain = tree.chain(3)
    assert chain.tokens.tolist() == [1, 3, 5]
    assert chain.parents.tolist() == [0, 0, 1]
    assert tree.chain(9).tokens.tolist() == [1, 3, 5]
    assert len(tree.chain(1)) == 1


def test_sanitize():
    tree = DraftTree.of([1, 9, 3, 4, 5], [0, 0, 1, 0, 3], [1, 0.9, 0.8, 0.3, 0.2])
    assert sanitize(tree, root=1, vocab_size=10, max_rows=63) is tree
    kept = sanitize(tree, root=1, vocab_size=9, max_rows=63)
    assert kept.tokens.tolist() == [1, 4, 5]
    assert sanitize(tree, root=1, vocab_size=10, max_rows=2).tokens.tolist() == [1, 9]
    assert len(sanitize(tree, root=1, vocab_size=10, max_rows=0)) == 1
    with pytest.raises(ValueError, match="not 2"):
        sanitize(tree, root=2, vocab_size=10, max_rows=63)
    with pytest.raises(ValueError, match="list"):
        sanitize([1, 2], root=1, vocab_size=10, max_rows=63)
