"""Drafters that cost something are asked last, and not at all where others are enough."""

from __future__ import annotations

from typing import Any

from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.control import ASKED_TRIES, Controller
from chatkv.spec.drafter import DraftContext, GuardedDrafters
from chatkv.spec.stats import StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

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
