"""What trees gained that nobody had seen, and what others would add to them."""

from __future__ import annotations

import pytest

from chatkv.spec.costs import CostTable
from chatkv.spec.unseen import AGES, KEPT, TIMED, TRIES, UNKNOWN, UnseenTrees


def test_others_add_what_is_right_behind_the_end_of_the_path():
    trees = UnseenTrees()
    assert trees.tokens == UNKNOWN
    assert trees.gains([0.5], [1]) == 1 + 0.5 / UNKNOWN
    trees.add(1, 2, 3, 4)
    assert trees.tokens == 2.5
    # One of four ended at once, two before the second guess, three before the third.
    expected = 1 + (0.8 * 0.25 + 0.4 * 0.5 + 0.2 * 0.75 + 0.1) / 2.5
    assert trees.gains([0.8, 0.4, 0.2, 0.1], [1, 2, 3, 4]) == pytest.approx(expected)
    trees.clear()
    assert trees.gains([0.5], [1]) == 1 + 0.5 / UNKNOWN


def test_the_newest_are_remembered():
    trees = UnseenTrees()
    trees.add(*[1] * KEPT)
    assert trees.is_known
    trees.add(*[3] * KEPT)
    assert trees.tokens == 3
    other = UnseenTrees()
    other.recall(trees.to_json())
    assert (other.tokens, other.to_json()) == (3, [3] * KEPT)
    few = UnseenTrees()
    few.add(*[1] * (TRIES - 1))
    assert not few.is_known


def test_the_size_that_holds_so_many_rows():
    costs = CostTable({1: 1.0, 4: 1.5, 16: 2.0})
    assert [costs.size_for(rows) for rows in (1, 2, 4, 5, 16, 17)] == [1, 4, 4, 16, 16, 0]
    assert [costs.ms(rows) for rows in (1, 2, 5, 17)] == [1.0, 1.5, 2.0, None]


def test_the_clock_tells_what_others_beside_it_take():
    trees = UnseenTrees()
    for ms in (1.0, 1.1, 9.0):
        trees.took(ms, beside=False)
        assert trees.slower is None
    for ms in (650.0, 1.2, 1.32):
        assert trees.slower is None
        trees.took(ms, beside=True)
    assert trees.slower == pytest.approx(1.2 / 1.0)


def test_what_was_slow_beside_it_is_tried_again():
    trees = UnseenTrees()
    for _ in range(TIMED):
        trees.took(50.0, beside=True)
        trees.took(1.0, beside=False)
    assert trees.slower == 50
    for _ in range(AGES - 1):
        trees.took(1.0, beside=False)
    assert trees.slower is None  # one more of these steps is let run, and says what it takes now
    trees.took(1.2, beside=True)
    assert trees.slower == pytest.approx(1.2)
