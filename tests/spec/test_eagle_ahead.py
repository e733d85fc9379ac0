"""An eagle head whose trees are begun before the host knows what a step kept: its memory holds the
rows of chosen ids all the same, whoever stored them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.drafter import AheadReader, DraftContext
from chatkv.spec.drafters.eagle import EagleDrafter, Held
from chatkv.spec.proposal import GrownTree, settled
from chatkv.spec.verify import Accepted

WINDOW, SPARE = 6, 4


class Memory:
    """The id behind each row, in a ring as on a device."""

    def __init__(self, slots: dict[int, tuple[int, int]] | None = None) -> None:
        self.slots = dict(slots or {})

    def put(self, place: int, token: int) -> None:
        self.slots[place % (WINDOW + SPARE)] = (place, token)

    def copy(self) -> Memory:
        return Memory(self.slots)


class Grower:
    """Stores what it is told, and what the walk behind a step keeps; its trees are a root alone."""

    window, depth, reads_again = WINDOW, 1, True
    rows: Any = None

    def __init__(self) -> None:
        self.rows = type("Rows", (), {"tokens": range(2)})
        self.walked: list[int] = []
        self.stored: list[int] = []
        self.root = -1

    def new_memory(self) -> Memory:
        return Memory()

    def store(self, memory: Memory, start: int, features: Any, tokens: Sequence[int]) -> None:
        assert len(features) == len(tokens)
        self.stored += range(start, start + len(tokens))
        for place, token in enumerate(tokens, start):
            memory.put(place, token)

    def launch(self, memory: Memory, rows: tuple[int, int]) -> None:
        for place, token in enumerate(self.walked, rows[1]):
            memory.put(place, token)
        self.root = self.walked[-1]

    def read(self) -> tuple[list[int], list[int], list[float]]:
        return [self.root, self.root + 1], [0, 0], [1.0, 0.5]

    def grow(self, memory: Memory, rows: Any, root: int, **about: Any) -> Any:
        self.root = root
        return self.read()


def check(held: Held, ids: list[int]) -> None:
    assert held.end == len(ids) - 1
    for place in range(max(held.first, held.stop - WINDOW), held.stop):
        assert held.memory.slots[place % (WINDOW + SPARE)] == (place, ids[place + 1])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ahead", "plain", "cut", "void", "followed", "not observed"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=SPARE),
    ),
    max_size=12,
)


@given(STEPS, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_what_is_stored_is_what_was_chosen(steps: list[tuple[str, list[int]]], prompt: int):
    grower = Grower()
    drafter = EagleDrafter(grower, (1,), grower)
    assert isinstance(drafter, AheadReader)
    ids = list(range(prompt + 1))
    drafter.read(1, 0, [0] * prompt)  # type: ignore[arg-type]
    drafter.follow(1, ids)
    for how, gained in steps:
        start, context = len(ids) - 1, DraftContext(1, ids, Sampler(SamplingParams()))
        begin = None if how == "plain" else drafter.ahead(1)
        assert (begin is None) == (how == "plain")
        if begin is not None:
            grower.walked = gained
            begin()
        kept = gained[:1] if how == "cut" else gained
        ids += kept
        assert drafter.has_read(1) == (begin is not None)
        if how == "not observed" or not drafter.has_read(1):
            drafter.read(1, start, [0] * len(kept))  # type: ignore[arg-type]
        if how != "not observed":
            drafter.observe(1, Accepted(tuple(kept), tuple(range(len(kept))), ()))
        if how == "void":
            drafter.void(1)
        if how in ("cut", "followed"):  # a reply that ends, and what goes on from it
            drafter.follow(1, ids)
        check(drafter.held[1], ids)
        grown = drafter.grown(context, 63)
        assert (grown is not None) == (how == "ahead")
        if isinstance(grown, GrownTree):
            assert settled(grown).tokens[0] == ids[-1]
            assert not drafter.held[1].waiting
            assert set(range(start, start + len(gained))).isdisjoint(grower.stored)
        else:
            (tree,) = drafter.propose([context], [63])
            assert len(tree) == 2
            assert tree.tokens[0] == ids[-1]
        check(drafter.held[1], ids)
