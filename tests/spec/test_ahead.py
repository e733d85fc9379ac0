"""Trees that are begun, and run, before the host has seen them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.control import Controller
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.heads import HeadsDrafter
from chatkv.spec.drafting import Drafting
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.heads.grown import tree_of
from chatkv.spec.plan import Plan
from chatkv.spec.proposal import GrownTree, Proposal, StaleTree, settled
from chatkv.spec.stats import StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.unseen import TRIES
from chatkv.spec.verify import Accepted

ROWS: Any = SimpleNamespace(tokens=range(16))
FLAT = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.02}
PARENTS = [0] * 9 + [1] * 7
CHANCE = [1.0] + [0.1] * 8 + [0.01] * 7


class Grower:
    """A head that grows by itself: each launch replaces the tree, as a device's buffer does."""

    depth, rows = 2, ROWS

    def __init__(self) -> None:
        self.next_root = 5
        self.there: list[int] = []

    def launch(self) -> None:
        self.there = [self.next_root, *range(100, 115)]

    def read(self) -> tuple[list[int], list[int], list[float]]:
        return self.there, PARENTS, CHANCE

    def grow(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[float]]:
        raise AssertionError("no features were read")


class Others:
    """A drafter with one guess of its own, or none."""

    name = "others"

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None: ...
    def observe(self, seq_id: int, accepted: Accepted) -> None: ...
    def drop(self, seq_id: int) -> None: ...

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        root = contexts[0].tokens[-1]
        tokens = [root, *range(7, 7 + self.guesses)]
        return [DraftTree.of(tokens, [max(0, row - 1) for row in range(len(tokens))])]


def made(*others: Any) -> tuple[GuardedDrafters, Grower]:
    grower = Grower()
    heads = HeadsDrafter(grower, (1, 2), grower)
    return GuardedDrafters([*others, heads], vocab_size=200), grower


def context(root: int = 5, seq_id: int = 1) -> DraftContext:
    return DraftContext(seq_id, [1, 2, root], Sampler(SamplingParams()))


def begun(drafters: GuardedDrafters, seq_id: int = 1) -> None:
    begin = drafters.ahead(seq_id)
    assert begin is not None
    begin()
    drafters.observe(seq_id, Accepted((5,), (0,), (5,)))


def proposed(drafters: GuardedDrafters, **about: Any) -> Proposal:
    (tree,) = drafters.propose([context(**about)], [63])
    return tree


def test_it_comes_unseen_once():
    drafters, _ = made()
    begun(drafters)
    tree = proposed(drafters)
    assert isinstance(tree, GrownTree)
    assert len(tree) == 16
    assert settled(tree).tokens.tolist() == [5, *range(100, 115)]
    assert len(proposed(drafters)) == 1
    assert not drafters.failures


@pytest.mark.parametrize(
    "void", ["not observed", "followed", "of another", "too small", "dropped", "void"]
)
def test_one_that_does_not_fit_is_not_run(void):
    drafters, _ = made()
    begin = drafters.ahead(1)
    assert begin is not None
    begin()
    if void != "not observed":
        drafters.observe(1, Accepted((5,), (0,), (5,)))
    if void == "followed":
        drafters.follow(1, [1, 2, 5])
    if void == "of another":
        begun(drafters, seq_id=2)
    if void == "void":
        drafters.void(1)
    if void == "dropped":
        drafters.drop(1)
    (tree,) = drafters.propose([context()], [15 if void == "too small" else 63])
    assert isinstance(tree, DraftTree)
    assert len(tree) == 1


def test_a_tree_below_another_token_or_none_at_all_is_said_and_given_up():
    drafters, grower = made()
    begun(drafters)
    with pytest.raises(StaleTree, match="grown below 5, not 6") as raised:
        settled(proposed(drafters, root=6))
    begun(drafters, seq_id=2)
    grower.there = [5, *[100] * 15]
    with pytest.raises(StaleTree, match="guessed twice"):
        settled(proposed(drafters, seq_id=2))
    drafters.give_up(1, raised.value)
    assert drafters.ahead(1) is None
    assert drafters.ahead(2) is not None
    assert "grown below 5" in drafters.failures[0]


def test_a_step_that_begins_nothing_voids_what_was_begun_before_it():
    drafters, _ = made()
    begun(drafters)
    drafters.observe(1, Accepted((9,), (0,), (9,)))  # a plain step, whose plan asked nobody
    assert len(proposed(drafters, root=9)) == 1


def test_rounding_lifts_no_guess_above_its_parent():
    tree = tree_of([1, 2, 3], [0, 0, 1], [1.0, 0.25, 0.25000003])
    assert tree.chance.tolist() == [1.0, 0.25, 0.25]


def test_guesses_of_others_are_joined_unless_it_is_kept_whole():
    for stays, rows in ((None, 18), (lambda tree: False, 18), (lambda tree: True, 16)):
        drafters, _ = made(Others(2))
        begun(drafters)
        (tree,) = drafters.propose([context()], [63], stays)
        assert len(tree) == rows
        if rows == 16:
            assert isinstance(tree, GrownTree)
            assert tree.beside is not None
            assert tree.beside.tokens.tolist() == [5, 7, 8]


def test_a_begin_that_raises_switches_the_drafter_off():
    drafters, grower = made()
    grower.launch = lambda: 1 / 0  # type: ignore[method-assign]
    begun(drafters)
    assert len(proposed(drafters)) == 1
    assert drafters.ahead(1) is None
    assert drafters.ahead(2) is not None
    assert len(drafters.failures) == 1


def grown(root: int = 5) -> GrownTree:
    read: Callable[[], DraftTree] = lambda: DraftTree.of(  # noqa: E731
        [root, *range(100, 115)], PARENTS, CHANCE, source="heads"
    )
    return GrownTree(root, 2, ROWS, read)


def play(controller: Controller, tokens: int, steps: int, beside: DraftTree | None = None) -> int:
    """Steps whose tree gains so many tokens when it is run; how many were."""
    ran = 0
    for _ in range(steps):
        plan = controller.plan([1])
        kept: list[Proposal] = [DraftTree.root(5)]
        if plan.asks:
            tree = grown()
            tree.beside = beside
            kept = controller.prune([tree], plan)
        ran += len(kept[0]) > 1
        gained = tuple([100, 109][: tokens - 1]) if len(kept[0]) > 1 else ()
        accepted = Accepted((*gained, 3), (0, 1, 9)[: len(gained) + 1], (None,) * 16)
        record = StepRecord.of(
            [settled(kept[0])], [accepted], draft_ms=0.01, verify_ms=FLAT[len(kept[0])]
        )
        controller.observe(record, [accepted], plan)
    return ran


@pytest.mark.parametrize("guard", [True, False])
def test_trees_that_gain_are_run_and_those_that_do_not_are_not(guard):
    assert play(Controller(FLAT, guard=guard), 2, 300) > 280
    few = Controller(FLAT, guard=guard)
    assert play(few, 1, 300) < 40
    assert "plain" in few.explain().lower()
    # What they gain may change: they are tried again.
    assert play(few, 3, 3000) > 2000


def test_trees_that_run_unseen_are_tried_again_after_a_probe_that_was_worth_it():
    """In the plain state nothing is begun ahead, so a probe sees its tree first."""
    controller = Controller(FLAT, guard=False)
    play(controller, 1, 300)
    assert controller.unseen.is_known
    ran, begun = 0, False
    for _ in range(600):
        plan = controller.plan([1])
        kept: list[Proposal] = [DraftTree.root(5)]
        if plan.asks and plan.kind != "cheap":
            plan.asked = ("heads",)
            kept = controller.prune([grown() if begun else settled(grown())], plan)
        begun = plan.kind not in ("plain", "cheap")
        rows = len(kept[0])
        ran += rows > 1
        accepted = Accepted(
            (100, 109, 3) if rows > 1 else (3,), (0, 1, 9)[: 1 + 2 * (rows > 1)], ()
        )
        record = StepRecord.of([settled(kept[0])], [accepted], draft_ms=0.01, verify_ms=FLAT[rows])
        controller.observe(record, [accepted], plan)
    assert ran > 300


def test_in_the_plain_state_nothing_is_begun_ahead():
    """And nobody who takes time is asked, as the plan tells."""
    drafters, grower = made(Others(0))
    drafting = Drafting(drafters, FLAT, "auto", guard=False)
    sampler = SimpleNamespace(edits_rows=False, params=SamplingParams(), grammar=None)
    seq: Any = SimpleNamespace(id=1, tokens=[1, 2, 5], sampler=sampler, max_depth=9)
    drafting.follow(seq)
    controller = drafting.controller
    controller.guard.observe(StepRecord(rows=1, tokens=1, verify_ms=1.0))  # no control step is due
    drafting.propose([seq])
    assert controller._plan is not None
    assert (controller._plan.kind, controller._plan.asked) == ("draft", ("heads",))
    drafting.behind([seq])()
    assert grower.there
    grower.there = []
    for _ in range(4):
        controller._idle.plain(1)
    drafting.propose([seq])
    assert (controller._plan.kind, controller._plan.asked) == ("cheap", ())
    drafting.behind([seq])()
    assert not grower.there


def test_a_mode_that_wants_fewer_rows_sees_it_first():
    for mode, rows in (
        ("tree:15", 16),
        ("tree:20", 16),
        ("tree:4", 5),
        ("chain:3", 3),
        ("none", 1),
    ):
        controller = Controller(FLAT, mode, guard=False)
        plan = controller.plan([1])
        (tree,) = controller.prune([grown()], plan)
        assert len(tree) == rows
        assert isinstance(tree, GrownTree) == (rows == 16)


@pytest.mark.parametrize(
    ("left", "free", "rows", "unseen"),
    [(2, 9, 16, True), (1, 2, 16, True), (1, 1, 9, False), (0, 9, 1, False), (0, 0, 1, False)],
)
def test_near_the_end_it_is_waited_for_only_where_it_has_no_place(left, free, rows, unseen):
    drafters, _ = made()
    drafting = Drafting(drafters, FLAT, "tree:15", guard=False)
    sampler = SimpleNamespace(edits_rows=False, params=SamplingParams(), grammar=None)
    seq: Any = SimpleNamespace(
        id=1, tokens=[1, 2, 5], sampler=sampler, max_depth=left, free_depth=free
    )
    begun(drafters)
    (tree,) = drafting.propose([seq])
    assert (len(tree), isinstance(tree, GrownTree)) == (rows, unseen)


class Patient(Grower):
    """One that can be waited for."""

    waited = 0

    def grow(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[float]]:
        self.waited += 1
        return self.read()


def test_a_tree_that_is_not_there_is_begun_behind_a_step_rather_than_waited_for_long():
    for wait_ms, waits in ((None, True), (0.2, True), (2.0, False)):
        grower = Patient()
        heads = HeadsDrafter(grower, (1, 2), grower)
        drafters = GuardedDrafters([Others(0), heads], vocab_size=200)
        drafting = Drafting(drafters, FLAT, "auto", guard=False)
        controller = drafting.controller
        controller.guard.observe(StepRecord(rows=1, tokens=1, verify_ms=1.0))
        controller.unseen.add(3, 3)
        if wait_ms is not None:
            controller.drafts.observe(("heads",), wait_ms)
        grower.there = [5, *range(100, 115)]
        sampler = SimpleNamespace(edits_rows=False, params=SamplingParams(), grammar=None)
        seq: Any = SimpleNamespace(id=1, tokens=[1, 2, 5], sampler=sampler, max_depth=9)
        drafting.follow(seq)
        drafters.read(1, 0, [0, 0])  # type: ignore[arg-type]
        (tree,) = drafting.propose([seq])
        assert (grower.waited > 0) == waits
        assert (len(tree) > 1) == waits
        drafting.behind([seq])()
        drafters.observe(1, Accepted((5,), (0,), (5,)))
        (tree,) = drafting.propose([seq])
        assert isinstance(tree, GrownTree)
    for mode in ("tree:15", "none"):
        controller = Controller(FLAT, mode, guard=False)
        controller.drafts.observe(("heads",), 2.0)
        controller.plan([1])
        assert controller.waits("heads")


def test_surer_guesses_of_others_are_joined():
    chain = DraftTree.of([5, 7, 8, 9], [0, 0, 1, 2], [1, 0.9, 0.9, 0.9], source="others")
    controller = Controller(FLAT, guard=False)
    play(controller, 2, TRIES)
    controller.plan([1])
    assert not controller.stays_unseen(beside(chain))
    # They were wrong often enough: what is not joined teaches too.
    play(controller, 2, 200, chain)
    controller.plan([1])
    tree = beside(chain)
    assert controller.stays_unseen(tree)
    assert not tree.runs_beside
    assert not Controller(FLAT, "tree:15").stays_unseen(beside(chain))


def beside(others: DraftTree) -> GrownTree:
    tree = grown()
    tree.beside = others
    return tree


def test_guesses_of_others_run_beside_it_where_there_are_rows_for_them():
    chain = DraftTree.of([5, *range(7, 25)], [0, *range(15), 0, 0, 0], source="others")
    for more, runs in ((1.05, True), (3.0, False)):
        controller = Controller({**FLAT, 32: more}, guard=False)
        play(controller, 2, TRIES)
        controller.plan([1])
        tree = beside(chain)
        assert controller.stays_unseen(tree)
        assert tree.runs_beside == runs
        assert len(tree) == (32 if runs else 16)
        # They were wrong often enough.
        play(controller, 2, 300, chain)
        controller.plan([1])
        assert controller.stays_unseen(tree := beside(chain))
        assert not tree.runs_beside
    for mode, rows in (("tree:33", 34), ("tree:31", None), ("chain:31", None)):
        controller = Controller({**FLAT, 32: 1.05}, mode, guard=False)
        controller.plan([1])
        tree = beside(chain)
        assert controller.stays_unseen(tree) == (rows is not None)
        assert len(tree) == (rows or 16)


def test_the_tree_is_read_before_the_next_one_takes_its_place():
    drafters, grower = made()
    drafting = Drafting(drafters, FLAT, "tree:15", guard=False)
    sampler = SimpleNamespace(edits_rows=False, params=SamplingParams(), grammar=None)
    seq: Any = SimpleNamespace(id=1, tokens=[1, 2, 5], sampler=sampler, max_depth=9)
    drafting.follow(seq)
    learnt: list[Plan | None] = []
    watched = drafting.controller.observe
    drafting.controller.observe = (  # type: ignore[method-assign]
        lambda step, accepted, plan=None: learnt.append(plan) or watched(step, accepted, plan)
    )
    for turn in range(3):
        (tree,) = drafting.propose([seq])
        assert isinstance(tree, GrownTree) == (turn > 0)
        seq.tokens.append(50 + turn)
        grower.next_root = seq.tokens[-1]
        drafting.behind([seq])()
        assert len(learnt) == turn
        gained = Accepted((seq.tokens[-1],), (0,), (None,) * len(tree))
        record = StepRecord.of([settled(tree)], [gained], verify_ms=1.0)
        drafting.observe([seq], [gained], lambda record=record: record)
    stats = drafting.drop(seq)
    assert stats.steps == 3
    assert len(learnt) == 3
    assert not drafters.failures
