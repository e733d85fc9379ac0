"""A drafter that takes as long as a step, on a clock of its own: asked often enough to find out,
and too rarely to lose."""

from __future__ import annotations

import pytest

from chatkv.spec.control import Controller
from chatkv.spec.stats import StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import verify

PLAIN, HOST = 0.55, 0.05
"""Milliseconds of a step on a device, where rows are next to free, and of the host's share."""
COSTS = {rows: PLAIN * (1.0 if rows == 1 else 1.02) for rows in (1, 2, 3, 4, 6, 8, 12, 16, 32)}
DEPTH = 4


def rate(draft_ms: float, gains: tuple[int, ...], tokens: int = 400, warm: int = 0) -> float:
    """Tokens a millisecond over those of plain decoding.

    Args:
        draft_ms: Of asking once.
        gains: Guesses that are right, one ask after another, over and over.
        warm: Tokens before the clock starts.
    """
    controller = Controller(COSTS)
    asks = made = 0
    spent = 0.0
    while made < warm + tokens:
        plan = controller.plan([0])
        tree, right, took = DraftTree.root(0), 0, 0.0
        if plan.asks and controller.affordable("heads", None) > 1:
            plan.asked, took, right = ("heads",), draft_ms, gains[asks % len(gains)]
            asks += 1
            chances = [0.4**depth for depth in range(DEPTH + 1)]
            bins = [0] + [4] * DEPTH
            tree = DraftTree.of(
                [0] + [1] * DEPTH, [0, *range(DEPTH)], chances, bins, source="heads"
            )
        if plan.asks:
            (tree,) = controller.prune([tree], plan)
        accepted = verify(tree, lambda row, path, right=right: 1 if len(path) < right else 2)
        verify_ms = next(ms for rows, ms in COSTS.items() if rows >= len(tree))
        step = StepRecord.of([tree], [accepted], draft_ms=took, verify_ms=verify_ms, host_ms=HOST)
        controller.observe(step, [accepted], plan)
        spent += step.wall_ms if made >= warm else 0.0
        made += step.tokens
    return (PLAIN + HOST) * tokens / spent


@pytest.mark.parametrize("gains", [(0, 1), (0, 0, 0, 2), (1, 0, 1, 0, 0, 0, 0, 2)])
def test_what_takes_a_step_and_gains_half_a_token_is_hardly_asked(gains):
    assert rate(PLAIN + HOST, gains) >= 0.98
    assert rate(PLAIN + HOST, gains, warm=400, tokens=2000) >= 0.995


def test_what_takes_two_steps_loses_what_it_takes_to_find_out():
    assert rate(2 * (PLAIN + HOST), (0, 1)) >= 0.96
    assert rate(2 * (PLAIN + HOST), (0, 1), warm=400, tokens=2000) >= 0.99


def test_what_gains_more_than_it_takes_is_asked():
    assert rate((PLAIN + HOST) / 4, (1,)) > 1.3
