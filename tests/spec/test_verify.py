"""The acceptance rule: the model's tokens only, and rows that match them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.spec.proposal import GrownTree, walked
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted, verify

TREE = DraftTree.of([9, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 3])


def test_walks_while_the_guess_is_right():
    asked = []

    def pick(row, path):
        asked.append((row, path))
        return {0: 1, 1: 3, 3: 8}[row]

    accepted = verify(TREE, pick)
    assert accepted == Accepted((1, 3, 8), (0, 1, 3), (1, 3, None, 8, None, None))
    assert asked == [(0, ()), (1, (1,)), (3, (1, 3))]


def test_a_plain_step_is_a_tree_of_one():
    assert verify(DraftTree.root(4), lambda row, path: 7) == Accepted((7,), (0,), (7,))


@given(st.lists(st.integers(0, 6), min_size=6, max_size=6))
def test_tokens_are_the_picks_of_the_rows(picks):
    accepted = verify(TREE, lambda row, path: picks[row])
    assert accepted.tokens == tuple(picks[row] for row in accepted.rows)
    assert accepted.rows[0] == 0
    assert list(accepted.rows) == sorted(accepted.rows)
    for token, row in zip(accepted.tokens, accepted.rows[1:], strict=False):
        assert int(TREE.tokens[row]) == token
    assert TREE.child(accepted.rows[-1], accepted.tokens[-1]) is None


def test_until_cuts_tokens_and_rows_together_and_asks_once_each():
    accepted = Accepted((1, 3, 5, 7), (0, 1, 3, 5), (1, 3, None, 5, None, 7))
    seen = []

    def is_last(token):
        seen.append(token)
        return token == 3

    cut = accepted.until(is_last)
    assert (cut.tokens, cut.rows) == ((1, 3), (0, 1))
    assert seen == [1, 3]
    assert accepted.until(lambda token: False) is accepted


@pytest.mark.parametrize(
    ("own", "others", "tokens", "rows"),
    [
        ([7, 1, 2], [7, 1, 5], (1, 2, 3), (0, 1, 2)),  # the unseen tree's path is longer
        ([7, 1, 5], [7, 1, 2, 3], (1, 2, 3, 4), (0, 3, 4, 5)),  # the path of the others is
        ([7, 1, 2], [7, 1, 2], (1, 2, 3), (0, 1, 2)),  # as long: those that need no moving
        ([7, 5], [7, 6], (1,), (0,)),
    ],
)
def test_of_two_trees_the_longer_path_counts(own, others, tokens, rows):
    def chain(ids):
        return DraftTree.of(ids, [0, *range(len(ids) - 1)])

    places = SimpleNamespace(tokens=own)
    grown = GrownTree(7, len(own) - 1, places, lambda: chain(own))  # type: ignore[arg-type]
    grown.beside, grown.runs_beside = chain(others), True
    ids = [*own, *others[1:]]
    asked = {}

    def pick(row, path):
        asked[row] = ids[row]
        return len(path) + 1

    found = walked(grown, pick)
    assert (found.tokens, found.rows) == (tokens, rows)
    assert len(found.picks) == len(grown) == len(ids)
    assert {row for row, picked in enumerate(found.picks) if picked is not None} == set(asked)
