"""What `chatkv bench spec` makes of its runs. Knows numbers; plays nothing."""

from __future__ import annotations

import pytest

from chatkv.spec import control
from chatkv.spec.stats import DraftStats, StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted
from sessions.bench import spec_play
from sessions.bench.spec_play import Pair
from sessions.bench.spec_row import Row
from tui.commands import bench_spec


def pair(prompt, plain_ms, drafted_ms, *, tokens=10, repeats=False, steps=5):
    stats = DraftStats(steps=steps, tokens=tokens, verify_ms=drafted_ms * 0.8)
    stats.draft_ms = drafted_ms * 0.2
    stats.offered, stats.accepted = {("ngram", 1): 5, ("ngram", 2): 4}, {("ngram", 1): 4}
    return Pair(prompt, tokens, repeats, 20, plain_ms, drafted_ms, 2.0, 4.0, stats)


def test_a_speed_up_that_guesses_cannot_explain_is_marked():
    controller = spec_play.WatchedController({1: 1.0}, "auto")
    noisy = Row.of(0, controller, [pair("a", 300, 100)], {})
    assert any("something else ran here" in line for line in bench_spec.row_lines(noisy))
    honest = Row.of(0, controller, [pair("a", 150, 100)], {})
    assert not any("something else ran here" in line for line in bench_spec.row_lines(honest))


def test_the_sums():
    controller = spec_play.WatchedController({1: 1.0}, "tree:4")
    pairs = [
        pair("a", 100, 50),
        pair("a", 100, 50, repeats=True, steps=2),
        pair("b", 90, 100),
        pair("c", 1, 1, tokens=0, steps=0),
    ]
    row = Row.of(0.7, controller, pairs, {"a": "x", "b": "y"})
    assert row.all.speedup == pytest.approx(291 / 201)
    assert row.all.tokens_per_step == pytest.approx(30 / 12)
    assert row.without_repeats.tokens_per_step == pytest.approx(20 / 10)
    assert row.categories["x"].speedup == 2
    assert row.categories["y"].speedup == 0.9
    assert row.share_below_1 == 0.5
    assert (row.speedup_median, row.speedup_p10, row.speedup_p90) == (1.45, 0.9, 2)
    assert row.overhead_share == pytest.approx(0.2)
    assert row.all.sources[0].offered == [20, 16]
    assert row.all.sources[0].acceptance == [0.8, 0.0]
    assert row.categories["y"].sources[0].offered == [5, 4]
    assert row.shares == pytest.approx({"draft": 0.2, "verify": 0.8, "accept": 0, "host": 0})
    assert row.plain_prefill_tokens_per_s == 10_000
    assert Row.of(0.7, controller, pairs[3:], {}) is None


def test_watching_changes_no_decision():
    watched = spec_play.WatchedController({1: 1.0, 4: 1.0, 8: 1.0}, "auto")
    plain = control.Controller({1: 1.0, 4: 1.0, 8: 1.0}, "auto")
    tree = DraftTree.of([5, 6, 7], [0, 0, 1], source="toy")
    sizes = []
    for gained in [(6, 7, 1)] * 40 + [(1,)] * 40:
        decided = []
        for controller in (plain, watched):
            plan = controller.plan([1], [False])
            (kept,) = controller.prune([tree], plan)
            rows = len(kept)
            tokens = gained[:rows] if rows > 1 else gained[:1]
            accepted = Accepted(tokens, tuple(range(len(tokens))), ())
            step = StepRecord.of([kept], [accepted], draft_ms=0.1, verify_ms=1.0)
            controller.observe(step, [accepted])
            decided.append((plan, rows))
        assert decided[0] == decided[1]
        sizes.append(rows)
    assert watched.expected_rate is None
    watched.settle()
    assert watched.expected_rate is not None
    assert sum(watched.reasons.values()) == sizes.count(1) == watched.stats.plain_steps > 0
    assert plain.stats == watched.stats
    assert plain.explain() == watched.explain()
    watched.forget()
    assert (watched.expected_rate, watched.reasons) == (None, {})
