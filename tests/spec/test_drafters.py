"""The automaton against brute force, n-gram trees, random trees, and the guard around them."""

from __future__ import annotations

import logging

import pytest
from fakes import TinyModel
from hypothesis import given
from hypothesis import strategies as st

from chatkv.errors import ConfigError
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters import DRAFTERS, DraftMeans, create_drafters
from chatkv.spec.drafters.automaton import COUNTED_SUFFIXES, SuffixAutomaton
from chatkv.spec.drafters.ngram import NgramDrafter, score_bin
from chatkv.spec.drafters.random import RandomDrafter
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

SAMPLER = Sampler(SamplingParams())
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def context(ids, seq_id: int = 0) -> DraftContext:
    return DraftContext(seq_id, tuple(ids), SAMPLER)


def places(ids: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `ids`."""
    size = len(part)
    return [end for end in range(size, len(ids) + 1) if ids[end - size : end] == part]


@given(TEXTS)
def test_automaton_equals_brute_force(ids):
    automaton = SuffixAutomaton()
    automaton.extend(ids)
    state = automaton.match()
    length = automaton.length[state]
    repeated = (size for size in range(1, len(ids)) if len(places(ids, ids[-size:])) > 1)
    longest = max(repeated, default=0)
    assert length == longest
    chain, suffix = 0, state
    while suffix > 0:
        chain, suffix = chain + 1, automaton.link[suffix]
    if not length or chain > COUNTED_SUFFIXES:
        return
    match = ids[-length:]
    assert automaton.count[state] == len(places(ids, match))
    followers = automaton.followers(state)
    expected = {}
    for end in places(ids, match):
        if end < len(ids):
            found = places(ids, [*match, ids[end]])
            expected[ids[end]] = (len(found), found[-1])
    assert {token for token, _ in followers} == expected.keys()
    order = sorted(expected, key=lambda token: (-expected[token][0], -expected[token][1]))
    assert [token for token, _ in followers] == order


@given(TEXTS, st.lists(st.integers(1, 7), min_size=1))
def test_growing_equals_rebuilding(ids, pieces):
    grown, rebuilt = NgramDrafter(), NgramDrafter()
    grown.follow(0, ids[:1])
    at = 1
    for index, size in enumerate(pieces):
        piece = tuple(ids[at : at + size])
        at += len(piece)
        if index % 2:
            grown.follow(0, ids[:at])
        elif piece:
            grown.observe(0, Accepted(piece, tuple(range(len(piece))), ()))
    rebuilt.follow(0, ids[:at])
    ask = [context(ids[:at])], [16]
    assert grown.propose(*ask) == rebuilt.propose(*ask)


@given(TEXTS, st.integers(1, 63))
def test_trees_keep_the_limits(ids, max_rows):
    for drafter in (NgramDrafter(), RandomDrafter(4)):
        (tree,) = drafter.propose([context(ids)], [max_rows])
        assert len(tree) <= max_rows
        assert int(tree.tokens[0]) == ids[-1]
        assert set(tree.sources) <= {drafter.name, ""}
        assert ((tree.bins[1:] >= 1) & (tree.bins[1:] <= 8)).all()


def test_ngram_copies_what_followed():
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 1, 2, 3, 4]
    (tree,) = NgramDrafter().propose([context(ids)], [16])
    assert tree.tokens.tolist() == [4, 5, 6, 7, 8, 9, 10, 20, 1]  # twice the match of four
    assert tree.parents.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    (short,) = NgramDrafter().propose([context(ids)], [4])
    assert short.tokens.tolist() == [4, 5, 6, 7]


def test_ngram_branches_by_count_then_newest():
    ids = []
    for follower in (11, 12, 12, 13, 14, 15):
        ids += [1, 2, follower, 100 + follower, 30 + len(ids)]
    ids += [1, 2]
    (tree,) = NgramDrafter().propose([context(ids)], [16])
    assert [int(tree.tokens[row]) for row in tree.children(0)] == [12, 15, 14, 13]
    best = tree.child(0, 12)
    assert best is not None
    assert tree.child(best, 112) is not None


def test_ngram_goes_on_in_a_loop():
    (tree,) = NgramDrafter().propose([context([1, 2, 3] * 10)], [16])
    assert tree.tokens.tolist() == [3, *[1, 2, 3] * 5]


@pytest.mark.parametrize("ids", [[5], [5, 5], [1, 2, 3, 4], [1, 2, 3, 9, 3]])
def test_ngram_is_silent_without_a_match_of_two(ids):
    (tree,) = NgramDrafter().propose([context(ids)], [16])
    assert len(tree) == 1


def test_ngram_follows_a_changed_conversation():
    drafter = NgramDrafter()
    drafter.follow(0, [1, 2, 3, 1, 2])
    changed = [1, 2, 9, 1, 2]
    drafter.follow(0, changed)
    (tree,) = drafter.propose([context(changed)], [3])
    assert tree.tokens.tolist() == [2, 9, 1]
    drafter.drop(0)
    assert drafter._automata == {}


def test_ngram_catches_up_when_it_was_not_told():
    drafter = NgramDrafter()
    drafter.follow(0, [1, 2])
    (tree,) = drafter.propose([context([1, 2, 7, 1, 2])], [2])
    assert tree.tokens.tolist() == [2, 7]


def test_bins():
    assert [score_bin(m, 1.0) for m in (2, 3, 4, 7, 8, 15, 16, 1000)] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert [score_bin(m, 0.5) for m in (2, 4, 8, 16)] == [1, 3, 5, 7]


def test_registry():
    means = DraftMeans(vocab_size=9, draft=TinyModel(), context_limit=99)
    names = [name for name in DRAFTERS if name != "heads"]
    assert create_drafters(names, means).names == tuple(names)
    with pytest.raises(ConfigError, match="has no model"):
        create_drafters(["draft_model"], DraftMeans(vocab_size=9))
    assert create_drafters(["random", "merged", "ngram"], means).names == ("random", "ngram")
    assert create_drafters(["ngram", "ngram"], means).names == ("ngram",)
    for names, words in ((["nope"], "nope"), (["merged"], "joins the guesses of others")):
        with pytest.raises(ConfigError, match=words):
            create_drafters(names, means)


class Broken(RandomDrafter):
    """Raises where it is told to."""

    name = "broken"

    def __init__(self, where: str) -> None:
        super().__init__(9)
        self.where, self.asked = where, 0

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError(f"a bug in {where}")

    def follow(self, seq_id, tokens):
        self._maybe("follow")

    def propose(self, contexts, max_rows):
        self.asked += 1
        self._maybe("propose")
        return [DraftTree.root(c.tokens[-1]) for c in contexts]

    def observe(self, seq_id, accepted):
        self._maybe("observe")

    def drop(self, seq_id):
        self._maybe("drop")


@pytest.mark.parametrize("where", ["follow", "propose", "observe", "drop"])
def test_a_drafter_that_raises_is_off_for_the_conversation(where, caplog):
    broken = Broken(where)
    guard = GuardedDrafters([broken, NgramDrafter()], vocab_size=50)
    ids = [1, 2, 3, 1, 2]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            guard.follow(0, ids)
            (tree,) = guard.propose([context(ids)], [4])
            assert len(tree) == 4  # the other one goes on
            guard.observe(0, Accepted((3,), (0,), (3,)))
            ids += [3, 1, 2]
        if where != "drop":
            assert guard.is_off("broken", 0)
        assert broken.asked == {"follow": 0, "propose": 1, "observe": 1, "drop": 3}[where]
        guard.drop(0)
    assert len(guard.failures) == len(caplog.records) == 1
    assert "broken is off" in guard.failures[0]
    assert not guard.is_off("broken", 0)


def test_guard_merges_and_limits():
    class Fixed(RandomDrafter):
        def __init__(self, name, tokens):
            super().__init__(9)
            self.name, self.tokens = name, tokens

        def propose(self, contexts, max_rows):
            parents = [0] * (1 + len(self.tokens))
            return [DraftTree.of([1, *self.tokens], parents, source=self.name) for _ in contexts]

    guard = GuardedDrafters([Fixed("a", [2, 3]), Fixed("b", [3, 4, 99])], vocab_size=9)
    one, two = guard.propose([context([0, 1]), context([5, 1], 1)], [63, 2])
    assert one.tokens.tolist() == [1, 2, 3, 4]
    assert one.sources == ("a", "b")
    assert one.bins[1:].tolist() == [[1, 0], [1, 1], [0, 1]]
    assert len(two) == 2
