"""The controller on simulated machines: near the best fixed shape, never slower than plain."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest

from chatkv.errors import ConfigError
from chatkv.spec.calibration import Calibration
from chatkv.spec.control import Controller
from chatkv.spec.costs import STALE, CostTable
from chatkv.spec.guard import (
    CLEAR_STEPS,
    CONTROL_STEPS,
    GUARD_TOKENS,
    PAIRS,
    REST_TOKENS,
    WallClockGuard,
)
from chatkv.spec.plan import Shape
from chatkv.spec.stats import DraftStats, StepRecord, trials
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted, verify

SIZES = (1, 2, 3, 4, 6, 8)
FLAT = {rows: 7.2 + 0.01 * rows for rows in SIZES}
LINEAR = {1: 7.2, 2: 8.7, 3: 10.1, 4: 11.6, 6: 17.0, 8: 22.0}
CLIFF = {1: 7.2, 2: 36.0, 3: 36.0, 4: 36.0, 6: 36.0, 8: 36.0}
COSTS = {"flat": FLAT, "linear": LINEAR, "cliff": CLIFF}


class Machine:
    """Runs a controller against made-up costs and hit rates, on a clock of its own."""

    def __init__(
        self,
        controller: Controller,
        real: Mapping[int, float],
        chance: Callable[[int], float],
        *,
        draft_ms: float = 0.02,
        hidden_ms: float = 0.0,
        bins: bool = False,
        seed: int = 0,
    ) -> None:
        self.controller, self.real, self.chance = controller, real, chance
        self.draft_ms, self.hidden_ms = draft_ms, hidden_ms
        self.bins, self.run_of_hits = bins, 0
        self.rng = random.Random(seed)
        self.ms, self.tokens = 0.0, 0
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self.asked = 0

    def step(self) -> None:
        plan = self.controller.plan([0])
        tree = DraftTree.root(0)
        if plan.asks:
            self.asked += 1
            guesses = min(15, plan.rows[0] - 1)
            length = min(8, 1 + self.run_of_hits // 2) if self.bins else 1
            bins = [0] + [length] * guesses
            tree = DraftTree.of([0] + [1] * guesses, [0, *range(guesses)], None, bins, "s")
            (tree,) = self.controller.prune([tree], plan)
        chance = self.chance(self.tokens)
        accepted = verify(tree, lambda row, path: 1 if self.rng.random() < chance else 2)
        for token in accepted.tokens:
            self.run_of_hits = self.run_of_hits + 1 if token == 1 else 0
        size = min(size for size in self.real if size >= len(tree))
        step = StepRecord.of(
            [tree],
            [accepted],
            draft_ms=self.draft_ms if plan.asks else 0.0,
            verify_ms=self.real[size] * self.rng.uniform(0.98, 1.02),
            host_ms=0.2 + (self.hidden_ms if len(tree) > 1 else 0.0),
        )
        self.controller.observe(step, [accepted])
        self.ms += step.wall_ms
        self.tokens += step.tokens
        self.sizes.append(len(tree))
        self.kinds.append(plan.kind)

    def run(self, tokens: int) -> float:
        """Milliseconds a token."""
        while self.tokens < tokens:
            self.step()
        return self.ms / self.tokens


def machine(table, real, chance, mode="auto", *, guard=True, **options) -> Machine:
    steady = chance if callable(chance) else lambda _: chance
    return Machine(Controller(table, mode, guard=guard), real, steady, **options)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_auto_is_near_the_best_fixed_shape(name, chance):
    costs = COSTS[name]
    plain = machine(costs, costs, chance, "none").run(1000)
    fixed = [
        machine(costs, costs, chance, f"chain:{guesses}", guard=False).run(1000)
        for guesses in (1, 3, 7)
    ]
    auto = machine(costs, costs, chance).run(1000)
    assert auto <= 1.05 * min(plain, *fixed)
    assert auto <= 1.01 * plain


@pytest.mark.parametrize("name", COSTS)
def test_short_replies_without_hits_lose_nothing_to_probes(name):
    costs = COSTS[name]
    plain = machine(costs, costs, 0.0, "none").run(200)
    auto = machine(costs, costs, 0.0)
    learning = sum(costs[2] - costs[1] for _ in range(3))
    assert auto.run(200) * auto.tokens <= 1.01 * plain * 200 + learning


def test_slow_verification_ends_in_plain():
    real = {rows: 7.2 * (1 if rows == 1 else 2 * rows) for rows in SIZES}
    for seed in range(3):
        slow = machine(FLAT, real, 1.0, seed=seed)
        slow.run(2000)
        assert Counter(slow.sizes[-500:])[1] >= 495
        assert slow.ms <= 1.03 * 2000 * 7.4


def test_guard_sees_what_the_model_of_costs_does_not():
    """All guesses right, the forward pass cheap: but the rest of a drafted step takes ages."""
    slow = machine(FLAT, FLAT, 1.0, hidden_ms=80.0)
    slow.run(GUARD_TOKENS + PAIRS * (1 + max(SIZES)) + 20)
    assert slow.sizes[-1] == 1
    assert "Plain for" in slow.controller.explain()
    before = slow.tokens
    while slow.sizes[-1] == 1:
        slow.step()
    assert slow.tokens - before >= REST_TOKENS - 30
    plain_ms = 7.4
    slow.run(10_000)
    assert slow.ms <= 1.15 * 10_000 * plain_ms
    late = slow.ms, slow.tokens
    slow.run(30_000)
    assert slow.ms - late[0] <= 1.04 * (slow.tokens - late[1]) * plain_ms  # rests get longer


def test_a_step_that_something_else_held_up_is_no_reason_to_rest():
    """As the first of a size on a device, which is compiled and captured. Many are."""
    for every, rests in ((40, False), (5, True)):
        controller = Controller(FLAT)
        fast = Machine(controller, FLAT, lambda _: 0.9)
        for turn in range(200):
            fast.hidden_ms = 400.0 if turn % every == 3 else 0.0
            fast.step()
        assert (controller.guard.rest_tokens > 0) == rests


@pytest.mark.parametrize(("drafted_ms", "rests"), [(16.0, False), (25.0, True)])
def test_a_machine_that_slows_down_is_no_reason_to_rest(drafted_ms, rests):
    """The last plain step was before it did: drafted and plain steps take turns to find out."""
    guard = WallClockGuard()
    guard.observe(StepRecord(rows=1, tokens=1, verify_ms=10.0))
    for _ in range(GUARD_TOKENS // 2):
        guard.observe(StepRecord(rows=4, tokens=2, verify_ms=1.6 * drafted_ms))
    assert guard.measured is not None
    assert guard.measured < 1
    for turn in range(2 * PAIRS):
        assert guard.rest_tokens == 0
        assert guard.wants_control == (turn % 2 == 0)
        step = StepRecord(rows=4, tokens=2, verify_ms=1.6 * drafted_ms)
        guard.observe(StepRecord(rows=1, tokens=1, verify_ms=16.0) if turn % 2 == 0 else step)
    assert (guard.rest_tokens > 0) == rests
    assert not guard.wants_control


def test_guard_holds_for_pinned_shapes_too():
    slow = machine(LINEAR, LINEAR, 0.0, "chain:3")
    slow.run(1000)
    assert Counter(slow.sizes)[1] > 700
    forced = machine(LINEAR, LINEAR, 0.0, "chain:3", guard=False)
    forced.run(300)
    assert set(forced.sizes) == {4}


@pytest.mark.parametrize(("chance", "every"), [(0.15, CONTROL_STEPS), (0.9, CLEAR_STEPS)])
def test_a_step_is_plain_now_and_then(chance: float, every: int):
    """More rarely where drafting is clearly faster."""
    fast = machine(FLAT, FLAT, chance)
    fast.run(6000)
    controls = [at for at, kind in enumerate(fast.kinds) if kind == "control"]
    assert controls[0] == 0
    gaps = Counter(b - a for a, b in pairwise(controls[1:]))
    assert gaps.most_common(1)[0][0] == every + 1
    assert min(gaps) == every + 1
    assert all(fast.sizes[at] == 1 for at in controls)


def test_guesses_that_were_not_worth_asking_for_are_run_all_the_same():
    """And count as plain: three of them, and nobody is asked for a while."""
    tree = DraftTree.of([0, 1], [0, 0], [1.0, 0.5], source="s")
    controller = Controller(FLAT, guard=False)
    controller.drafts.observe(("s",), 40.0)
    for turn in range(4):
        plan = controller.plan([0])
        assert plan.kind == ("draft" if turn < 3 else "cheap")
        plan.asked = ("s",)
        (kept,) = controller.prune([tree], plan)
        assert len(kept) == 2
        accepted = Accepted((1, 2), (0, 1), (1, 2))
        step = StepRecord.of([tree], [accepted], draft_ms=40.0, verify_ms=FLAT[2])
        controller.observe(step, [accepted], plan)


def test_bursts_of_copying_are_found_and_left():
    """Prose with a copied passage now and then; the bin grows with the match, as with n-grams."""
    mixed = machine(LINEAR, LINEAR, lambda at: 0.95 if at % 400 < 100 else 0.02, bins=True)
    plain = machine(LINEAR, LINEAR, 0.0, "none").run(3000)
    assert mixed.run(3000) < 0.92 * plain


def test_plain_state_probes_expensive_drafters_only_now_and_then():
    idle = machine(LINEAR, LINEAR, 0.0, draft_ms=1.0)
    idle.run(2000)
    assert idle.asked < 25
    assert idle.ms <= 1.01 * 2000 * 7.4
    awake = machine(LINEAR, LINEAR, lambda tokens: 0.9 * (tokens > 1000), draft_ms=0.5)
    awake.run(3000)
    assert Counter(awake.sizes[-100:])[1] < 10


def test_pinned_shapes():
    tree = DraftTree.of([1, 2, 3, 4, 5], [0, 0, 0, 1, 3])
    for mode, tokens in (
        ("chain:2", [1, 2, 4]),
        ("tree:2", [1, 2, 3]),
        ("tree:62", [1, 2, 3, 4, 5]),
    ):
        controller = Controller(LINEAR, mode, guard=False)
        plan = controller.plan([7])
        assert plan.asks
        assert controller.prune([tree], plan)[0].tokens.tolist() == tokens
    off = Controller(LINEAR, "none")
    assert not off.plan([7]).asks
    assert off.explain() == "Drafting is off."


@pytest.mark.parametrize("mode", ["", "chain", "chain:0", "tree:63", "tree:x", "on", "chain:1 "])
def test_unknown_modes(mode):
    with pytest.raises(ConfigError, match="drafting mode"):
        Shape.parse(mode)


def test_several_sequences_share_the_rows():
    controller = Controller(FLAT, guard=False)
    sure = DraftTree.of([1, 2, 3], [0, 0, 1], source="sure")
    vague = DraftTree.of([1, 2, 3], [0, 0, 1], source="vague")
    controller.calibration.learn([("sure", 1, 1, True), ("sure", 2, 1, True)] * 50, False)
    controller.calibration.learn([("vague", 1, 1, False), ("vague", 2, 1, False)] * 500, False)
    plan = controller.plan([4, 9])
    kept = controller.prune([sure, vague], plan)
    assert len(kept[0]) == 3
    assert sum(map(len, kept)) in SIZES
    assert not controller.plan(list(range(8))).asks  # the largest measured step is full


def test_greedy_and_sampled_are_counted_apart():
    controller = Controller(FLAT, guard=False)
    tree = DraftTree.of([1, 2], [0, 0], source="s")
    for _ in range(40):
        controller.prune([tree, tree], controller.plan([0, 1], [True, False]))
        gained = [Accepted((2, 5), (0, 1), ()), Accepted((5,), (0,), ())]
        controller.observe(StepRecord.of([tree, tree], gained, verify_ms=7.3), gained)
    assert controller.calibration.rate("s", 1, 1, True) > 0.9
    assert controller.calibration.rate("s", 1, 1, False) < 0.1


def test_depths_that_never_ran_are_learnt():
    """One proposal is followed through later steps, though only its first guess was run."""
    controller = Controller(CLIFF, guard=False)
    chain = DraftTree.of([0, 1, 1, 1], [0, 0, 1, 2], source="s")
    for _ in range(30):
        (tree,) = controller.prune([chain], controller.plan([0]))
        assert len(tree) == 1
        gained = [Accepted((1,), (0,), (1,))]
        controller.observe(StepRecord.of([tree], gained, verify_ms=7.2), gained)
    assert controller.calibration.rate("s", 3, 1, False) > 0.7


def test_explain_is_one_sentence():
    fast = machine(LINEAR, LINEAR, 0.9)
    assert "nothing has been measured" in fast.controller.explain()
    fast.run(600)
    assert "tokens a drafted step" in fast.controller.explain()
    idle = machine(LINEAR, LINEAR, 0.0)
    idle.run(600)
    assert "not worth their time" in idle.controller.explain()
    silent = Controller(LINEAR)
    for _ in range(5):
        silent.prune([DraftTree.root(1)], silent.plan([0]))
        silent.observe(StepRecord(rows=1, tokens=1, verify_ms=7.0), [Accepted((1,), (0,), (1,))])
    assert silent.explain() == "Plain: no guess came up in 5 tokens."


def test_costs():
    costs = CostTable({1: 10.0, 4: 20.0, 2: 12.0})
    assert costs.sizes == (1, 2, 4)
    assert costs.ms(3) == 20.0  # never interpolated
    assert costs.ms(5) is None
    for _ in range(9):
        costs.observe(1, 20.0, plain=True)  # the context has grown
    assert costs.ms(1) == 20.0
    assert costs.ms(4) == 40.0
    costs.observe(4, 60.0, plain=False)
    assert costs.ms(4) == pytest.approx(60.0)
    assert costs.ms(2) == 24.0
    costs.observe(3, 1.0, plain=False)  # not in the table
    assert costs.ms(3) == pytest.approx(60.0)
    with pytest.raises(ValueError, match="one row"):
        CostTable({2: 1.0})


def test_a_size_that_was_held_up_is_tried_again_when_there_is_time_to_lose():
    costs = CostTable({1: 10.0, 4: 12.0})
    costs.observe(4, 36.0, plain=False)
    for _ in range(STALE + 1):
        assert costs.observe(1, 10.0, plain=True, spare_ms=20.0) == 0.0
    assert costs.ms(4) == 36.0  # it might lose 24 ms
    assert costs.observe(1, 10.0, plain=True, spare_ms=30.0) == 24.0
    assert costs.ms(4) == 12.0


def test_calibration_fades():
    calibration = Calibration()
    assert calibration.rate("s", 1, 1, False) == pytest.approx(1 / 3)
    calibration.learn([("s", 1, 1, True)] * 2000, False)
    calibration.learn([("s", 1, 1, False)] * 300, False)
    assert calibration.rate("s", 1, 1, False) == pytest.approx(0.5, abs=0.02)
    assert calibration.rate("s", 30, 2, False) == calibration.rate("s", 8, 2, False)


def test_calibrated_trusts_the_best_source():
    calibration = Calibration()
    calibration.learn([("a", 1, 1, True)] * 50 + [("b", 1, 1, False)] * 50, False)
    one, two = (DraftTree.of([1, 2], [0, 0], source=name) for name in "ab")
    merged = calibration.chances(DraftTree.merge([one, two]), False)
    assert merged == [1.0, calibration.rate("a", 1, 1, False, own=0.5)]
    unseen = DraftTree.of([1, 2, 3], [0, 0, 1], [1.0, 0.8, 0.2], source="c")
    assert calibration.chances(unseen, False) == pytest.approx([1.0, 0.8, 0.2])


def test_trials_count_children_of_right_rows_only():
    tree = DraftTree.of([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], bins=[0, 1, 2, 3, 4, 5], source="s")
    assert trials(tree, (1, 9)) == [("s", 1, 1, True), ("s", 1, 2, False), ("s", 2, 3, False)]
    assert trials(tree, (1, 3)) == [("s", 1, 1, True), ("s", 1, 2, False), ("s", 2, 3, True)]
    assert trials(tree, (7,)) == [("s", 1, 1, False), ("s", 1, 2, False)]


def test_stats_add_up():
    tree = DraftTree.of([0, 1, 2], [0, 0, 1], source="s")
    one = StepRecord.of(
        [tree], [Accepted((1, 7), (0, 1), ())], draft_ms=1, verify_ms=8, accept_ms=1, host_ms=2
    )
    two = StepRecord(rows=1, tokens=1, verify_ms=9.0)
    total = DraftStats()
    for step in (one, two, two):
        total.add(step)
    halves = DraftStats(), DraftStats()
    halves[0].add(one)
    halves[1].add(two)
    assert halves[0] + halves[1] + halves[1] == total
    assert total.tau == pytest.approx(4 / 3)
    assert total.speedup == pytest.approx((2 / 12) / (2 / 18))
    assert total.acceptance("s") == [1.0, 0.0]
    assert total.to_json() == {
        "steps": 3,
        "plain_steps": 2,
        "tokens": 4,
        "rows": 5,
        "tokens_per_step": pytest.approx(4 / 3),
        "speedup": pytest.approx(1.5),
        "draft_ms": 1.0,
        "verify_ms": 26.0,
        "accept_ms": 1.0,
        "host_ms": 2.0,
        "hidden_ms": 0.0,
        "offered": {"s": [1, 1]},
        "accepted": {"s": [1, 0]},
    }
    assert DraftStats().tau is None
