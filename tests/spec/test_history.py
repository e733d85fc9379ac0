"""The token index against brute force, trees out of it, and the window of lookahead."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.errors import ModelError
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec import token_log
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.history import HistoryDrafter, score_bin
from chatkv.spec.drafters.lookahead import SEEN, SETTLED, LookaheadDrafter
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.token_log import BARRIER, GIVEN, KEY, LONGEST, PLACES, TokenIndex
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import verify

SAMPLER = Sampler(SamplingParams())
TURNS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=40)),
    max_size=8,
)
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=50)


def context(ids, seq_id: int = 0) -> DraftContext:
    return DraftContext(seq_id, tuple(ids), SAMPLER)


def index_of(turns) -> TokenIndex:
    index = TokenIndex()
    for prompt, reply in turns:
        index.add(prompt, reply)
    return index


def plain(turns) -> list[int | None]:
    """The words of the log; None for a barrier."""
    words: list[int | None] = []
    for prompt, reply in turns:
        words += [None, *prompt, *reply]
    return words


def expected_matches(words, ids) -> list[tuple[int, int]]:
    found = []
    for place in range(len(words) - 1, 0, -1):
        if words[place] is None:
            continue
        length = 0
        while length < min(LONGEST, place, len(ids)) and words[place - 1 - length] is not None:
            if words[place - 1 - length] != ids[-1 - length]:
                break
            length += 1
        if length >= KEY:
            found.append((length, place))
    return found[:PLACES]


def test_small_ids_have_rows_of_their_own():
    rows = [token_log._row(ids) for ids in itertools.product(range(3), repeat=KEY)]
    assert len(set(rows)) == len(rows)


@given(TURNS, IDS)
def test_matches_equal_brute_force(turns, ids):
    index = index_of(turns)
    assert index.matches(ids) == expected_matches(plain(turns), ids)
    for _, place in index.matches(ids):
        going = itertools.takewhile(lambda word: word is not None, plain(turns)[place:])
        words = index.following(place, 7)
        assert [word & ~GIVEN for word in words] == list(going)[:7]


@given(TURNS, IDS)
def test_growing_equals_reading_all_at_once(turns, ids):
    grown = index_of(turns)
    words = grown._words[: len(grown)].copy()
    whole = TokenIndex()
    whole.extend(words)
    assert whole.matches(ids) == grown.matches(ids)
    assert (whole._table == grown._table).all()


@given(st.lists(st.integers(0, BARRIER), max_size=60), IDS, st.integers(1, 63))
def test_any_words_give_a_tree_within_the_limits(words, ids, max_rows):
    index = TokenIndex()
    some = [GIVEN | token for token in ids] + ids + [BARRIER] + words
    index.extend(np.array(some, np.uint32))
    guard = GuardedDrafters([HistoryDrafter(index)], vocab_size=3)
    (tree,) = guard.propose([context(ids)], [max_rows])
    assert guard.failures == []
    assert len(tree) <= max_rows
    assert max(tree.tokens.tolist()[1:], default=0) < 3


@given(TURNS, IDS, st.integers(1, 63))
def test_trees_are_copies_of_what_followed(turns, ids, max_rows):
    (tree,) = HistoryDrafter(index_of(turns)).propose([context(ids)], [max_rows])
    assert len(tree) <= max_rows
    assert ((tree.bins[1:] >= 1) & (tree.bins[1:] <= 8)).all()
    words = plain(turns)
    for row in range(1, len(tree)):
        wanted = [*ids[-KEY:], *tree.path(row)]
        size = len(wanted)
        assert any(words[at : at + size] == wanted for at in range(len(words)))


def test_nothing_is_guessed_without_a_log_or_over_a_barrier():
    for log in (None, TokenIndex(), index_of([([], [1, 2, 3, 4]), ([], [5, 6])])):
        (tree,) = HistoryDrafter(log).propose([context([1, 2, 3, 4])], [16])
        assert len(tree) == 1


def test_the_longest_match_and_agreement_come_first():
    turns = [
        ([], [9, 1, 2, 3, 4, 60, 61, 62]),  # newest last
        ([], [8, 1, 2, 3, 4, 70, 71, 72]),
        ([], [7, 1, 2, 3, 4, 70, 81, 82]),
        ([], [5, 6, 1, 2, 3, 4, 90, 91, 92]),
    ]
    (tree,) = HistoryDrafter(index_of(turns)).propose([context([1, 2, 3, 4])], [16])
    assert [int(tree.tokens[row]) for row in tree.children(0)] == [70, 90, 60]
    best = tree.child(0, 70)
    assert best is not None
    assert tree.child(best, 81) is not None  # of the two that agree the newer goes on
    (tree,) = HistoryDrafter(index_of(turns)).propose([context([5, 6, 1, 2, 3, 4])], [16])
    assert [int(tree.tokens[row]) for row in tree.children(0)] == [70, 90, 60]  # 4 + 4 > 6
    (tree,) = HistoryDrafter(index_of(turns[2:])).propose([context([5, 6, 1, 2, 3, 4])], [16])
    assert tree.tokens.tolist() == [4, 90, 70, 91, 92]


def test_user_text_has_bins_of_its_own():
    text = [1, 2, 3, 4, 5, 6]
    bins = []
    for turn in ((text, []), ([], text)):
        (tree,) = HistoryDrafter(index_of([turn])).propose([context(text[:4])], [16])
        assert tree.tokens.tolist() == [4, 5, 6]
        bins.append(tree.bins[1:].tolist())
    assert bins == [[[3], [3]], [[4], [4]]]
    assert {
        score_bin(length, share, word)
        for length in (4, 8)
        for share in (0.5, 1)
        for word in (5, 5 | GIVEN)
    } == set(range(1, 9))


def test_only_lookahead_wants_all_picks():
    assert not GuardedDrafters([NgramDrafter(), HistoryDrafter(None)], vocab_size=9).wants_picks
    assert GuardedDrafters([NgramDrafter(), LookaheadDrafter()], vocab_size=9).wants_picks


def test_all_picks_change_nothing_else():
    tree = DraftTree.of([9, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 3])
    asked = []

    def pick(row, path):
        asked.append((row, path))
        if row == 4:
            raise ModelError("a row that nobody needs")
        return {0: 1, 1: 3, 2: 7, 3: 8, 5: 6}[row]

    accepted = verify(tree, pick)
    more = accepted.with_all_picks(tree, pick)
    assert (more.tokens, more.rows) == (accepted.tokens, accepted.rows)
    assert more.picks == (1, 3, 7, 8, None, 6)
    assert asked[3:] == [(2, (2,)), (4, (1, 4)), (5, (1, 3, 5))]
    assert more.tree is tree
    assert more.until(lambda token: True).tree is tree


def test_the_next_chain_is_the_picks_behind_what_was_accepted():
    drafter = LookaheadDrafter()
    ids = [1, 2, 3]
    drafter.follow(0, ids)
    window = drafter._windows[0]
    window.chain, window.bins = [10, 11, 12, 13], [SEEN] * 4
    tree = DraftTree.of([3, 10, 11, 12, 13], [0, 0, 1, 2, 3])
    picks = {0: 10, 1: 21, 2: 12, 3: 23, 4: 24}  # 10 is right; 11 is not
    accepted = verify(tree, lambda row, path: picks[row])
    assert accepted.tokens == (10, 21)
    drafter.observe(0, accepted.with_all_picks(tree, lambda row, path: picks[row]))
    assert window.chain == [12, 23, 24]
    assert window.bins == [SETTLED, SEEN, SEEN]
    assert (21, 12, 23) in window.pool[10]
    (tree,) = drafter.propose([context([*ids, 10, 21])], [16])
    assert tree.tokens[:4].tolist() == [21, 12, 23, 24]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 63), st.data())
def test_lookahead_keeps_the_limits_whatever_is_picked(ids, max_rows, data):
    drafter = LookaheadDrafter()
    for _ in range(4):
        (tree,) = drafter.propose([context(ids)], [max_rows])
        assert len(tree) <= max_rows
        assert int(tree.tokens[0]) == ids[-1]
        assert ((tree.bins[1:] >= 1) & (tree.bins[1:] <= 8)).all()
        run = tree.best(data.draw(st.integers(1, 9)))  # the controller takes a part
        picks = data.draw(st.lists(st.integers(0, 3), min_size=len(run), max_size=len(run)))
        accepted = verify(run, lambda row, path, picks=picks: picks[row])
        ids = [*ids, *accepted.tokens]
        drafter.observe(0, accepted.with_all_picks(run, lambda row, path, picks=picks: picks[row]))
    drafter.drop(0)
    assert drafter._windows == {}


@pytest.mark.parametrize("places", [1, 2, 3, 9])
def test_the_newest_places_are_kept(places):
    index = TokenIndex()
    for number in range(places):
        index.add([], [1, 2, 3, 4, 100 + number])
    found = [index.following(place, 1)[0] for _, place in index.matches([1, 2, 3, 4])]
    assert found == [100 + number for number in reversed(range(places))][:PLACES]
