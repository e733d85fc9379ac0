"""Drafters that cost something are asked last, and not at all where others are enough."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.calibration import Calibration
from chatkv.spec.control import ASKED_TRIES, Controller
from chatkv.spec.costs import DraftCosts
from chatkv.spec.drafter import DraftContext
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.stats import StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted, verify

LINEAR = {1: 7.2, 2: 8.7, 3: 10.1, 4: 11.6, 6: 17.0, 8: 22.0}


def test_the_costly_drafter_is_spared_where_the_cheap_one_is_enough():
    """Copied passages come from the cheap one alone; elsewhere both are asked."""
    asked: list[str] = []

    class Fixed:
        def __init__(self, name: str, taps: tuple[int, ...] = ()) -> None:
            self.name, self.taps, self.sure = name, taps, True

        def propose(self, contexts, max_rows):
            asked.append(self.name)
            score = 8 if self.sure else 1
            tree = DraftTree.of([7, 1, 1, 1], [0, 0, 1, 2], None, [0] + [score] * 3, self.name)
            return [tree for _ in contexts]

    costly: Any = Fixed("costly", (1,))
    cheap: Any = Fixed("cheap")
    drafters = GuardedDrafters([costly, cheap], vocab_size=9)
    controller = Controller(LINEAR, guard=False)
    controller.calibration.learn([("cheap", depth, 8, True) for depth in (1, 2, 3)] * 90, False)
    controller.calibration.learn([("cheap", depth, 1, False) for depth in (1, 2, 3)] * 90, False)
    controller.calibration.learn([("costly", 1, 8, True), ("costly", 2, 8, False)] * 90, False)
    ask = DraftContext(0, [3, 7], Sampler(SamplingParams()))

    def step(sure: bool) -> list[str]:
        asked.clear()
        cheap.sure = sure
        plan = controller.plan([0])
        trees = drafters.propose([ask], [16], None, controller.enough, controller.affordable)
        plan.asked = drafters.asked
        kept: Any
        (kept,) = controller.prune(trees, plan)
        right = (1, 1, 1, 2) if sure else (1, 2)
        gained = [Accepted(right[: len(kept)], (0, 1, 2, 3)[: len(right[: len(kept)])], ())]
        spent = {"draft_ms": 1.0 if "costly" in asked else 0.02, "verify_ms": LINEAR[len(kept)]}
        controller.observe(StepRecord.of([kept], gained, **spent), gained)
        return list(asked)

    assert step(True) == ["cheap", "costly"]  # nothing to compare with yet
    for _ in range(ASKED_TRIES):
        assert step(False) == ["cheap", "costly"]
    assert step(True) == ["cheap"]
    assert step(False) == ["cheap", "costly"]


class Says:
    """Guesses a chain of ones below the root, or nothing."""

    def __init__(self, name: str, guess_ms: float | None = None) -> None:
        self.name, self.guess_ms = name, guess_ms
        self.score, self.rows = 8, list[int]()
        self.taps: tuple[int, ...] = ()

    def propose(self, contexts, max_rows):
        self.rows += max_rows
        guesses = min(max_rows[0] - 1, 8)
        if not self.score:
            return [DraftTree.root(7) for _ in contexts]
        bins = [0] + [self.score] * guesses
        chain = DraftTree.of([7] + [1] * guesses, [0, *range(guesses)], None, bins, self.name)
        return [chain for _ in contexts]


class Talk:
    """Steps of one reply on a clock of its own; a guess is right with a given chance."""

    def __init__(self, *drafters: Says) -> None:
        made: Any = drafters
        self.drafters = GuardedDrafters(made, vocab_size=9)
        self.controller = Controller(LINEAR, guard=False)
        self.rng = Random(1)
        self.ms, self.tokens = 0.0, 0

    def step(self, chance: float) -> int:
        """Rows that were run."""
        plan = self.controller.plan([0])
        tree: Any = DraftTree.root(7)
        draft_ms, before = 0.0, [len(drafter.rows) for drafter in self.drafters.drafters]
        if plan.asks:
            ask = DraftContext(0, [3, 7], Sampler(SamplingParams()))
            controller = self.controller
            (tree,) = self.drafters.propose(
                [ask], [16], None, controller.enough, controller.affordable
            )
            plan.asked = self.drafters.asked
        for drafter, count in zip(self.drafters.drafters, before, strict=True):
            if len(drafter.rows) > count:
                guesses = (drafter.rows[-1] - 1) * (drafter.guess_ms or 0.0)
                draft_ms += max(guesses, 0.5 if drafter.taps else 0.01)
        (tree,) = self.controller.prune([tree], plan)
        gained = verify(tree, lambda row, path: 1 if self.rng.random() < chance else 2)
        record = StepRecord.of([tree], [gained], draft_ms=draft_ms, verify_ms=LINEAR[len(tree)])
        self.controller.observe(record, [gained])
        self.ms += record.wall_ms
        self.tokens += record.tokens
        return len(tree)


def test_a_draft_model_that_could_not_pay_is_never_asked():
    """Its guesses all right, one of them and a row more take longer than two plain steps."""
    dear = Says("draft_model", guess_ms=7.2)
    talk = Talk(dear)
    for _ in range(300):
        talk.step(1.0)
    assert not dear.rows
    assert talk.ms == pytest.approx(300 * 7.2)
    pinned = Talk(dear)
    pinned.controller.set_mode("chain:3")
    pinned.step(1.0)
    assert dear.rows


def test_a_draft_model_is_asked_for_what_pays_and_left_alone_while_it_is_wrong():
    good = Talk(Says("draft_model", guess_ms=1.0))
    while good.tokens < 600:
        good.step(0.95)
    assert good.ms < 0.75 * 600 * 7.2
    rows = good.drafters.drafters[0].rows
    assert {count for count in rows[-20:]} <= set(range(3, 9))
    bad = Talk(Says("draft_model", guess_ms=1.0))
    while bad.tokens < 600:
        bad.step(0.0)
    assert bad.ms < 1.03 * 600 * 7.2
    asked = len(bad.drafters.drafters[0].rows)
    assert 3 <= asked < 15
    # A probe may ask for one guess, and for more only out of what it may lose.
    assert bad.drafters.drafters[0].rows[4:6] == [2, 2]
    while bad.tokens < 5000:
        bad.step(0.95)
    assert len(bad.drafters.drafters[0].rows) > asked + 100


@pytest.mark.parametrize("reads", [True, False])
def test_the_plain_state_asks_cheap_drafters_alone(reads):
    """A copied passage is noticed at once although a costly drafter is there."""
    cheap, costly = Says("cheap"), Says("costly", guess_ms=None if reads else 0.5)
    costly.taps = (1,) if reads else ()
    cheap.score = costly.score = 0
    talk = Talk(costly, cheap)
    for _ in range(200):
        talk.step(0.0)
    before = len(costly.rows), len(cheap.rows)
    for _ in range(30):
        talk.step(0.0)
    assert len(costly.rows) - before[0] <= 1
    assert len(cheap.rows) - before[1] == 30
    assert talk.controller.plan([0]).kind == "cheap"
    talk.controller.calibration.learn([("cheap", d, 8, True) for d in (1, 2, 3)] * 30, False)
    cheap.score = 8
    assert talk.step(1.0) > 1
    assert talk.controller.plan([0]).kind == "draft"


def test_the_share_of_right_guesses_whatever_was_said_of_them():
    calibration = Calibration()
    assert calibration.share_right("s", 1, False) == 1
    calibration.learn([("s", 1, 1, False), ("s", 1, 8, True)] * 100, False)
    calibration.learn([("s", 1, 8, False), ("other", 1, 8, True)] * 100, True)
    assert calibration.share_right("s", 1, False) == pytest.approx(0.5, abs=0.02)
    assert calibration.share_right("s", 1, True) < 0.05
    assert calibration.share_right("s", 2, False) == 1


def test_costs_of_drafting_come_back():
    costs = DraftCosts()
    assert (costs.cheap_ms, costs.ms(("a",))) == (0, 0)
    costs.observe((), 2.0)
    assert costs.cheap_ms == 0, "one alone may have been slow by chance"
    costs.observe((), 3.0)
    costs.observe((), 100.0)
    costs.observe(("a",), 0.5, ahead=True)
    assert (costs.ms(()), costs.cheap_ms, costs.ms(("a",))) == (3, 3, 0.5)
    costs.observe(("a",), 7.0)
    assert (costs.ms(("a",)), costs.ms(("a",), ahead=True)) == (7, 0.5)
    again = DraftCosts()
    again.recall(json.loads(json.dumps(costs.to_json())))
    assert again.to_json() == costs.to_json()
