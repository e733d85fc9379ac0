"""What the controller learns outlives the process, and the plans that come of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import TinyModel

from chatkv import engine as engine_module
from chatkv import step_costs
from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.sampling import SamplingParams
from chatkv.spec.control import Controller
from chatkv.spec.guard import REST_TOKENS
from chatkv.spec.memory import DraftMemory
from chatkv.spec.stats import StepRecord
from chatkv.spec.token_log import TokenIndex
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted
from chatkv.step_costs import COST_ROWS

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]


def tiny() -> Any:
    return TinyModel()


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which everything takes the same time: drafting little, a pass most of it."""
    ticks = itertools.accumulate(itertools.cycle([1e-4, 1e-5, 1e-4, 1e-3, 1e-4]))
    monkeypatch.setattr(engine_module, "perf_counter", lambda: next(ticks))


def memory(folder: Path, **kind: object) -> DraftMemory:
    return DraftMemory(folder, {"model": "tiny", **kind})


def play(on: Engine, tokens: list[int], sampled: list[bool], seed: int, length: int = 40):
    """One reply; (ids, flags, the plan and the tree of each step)."""
    seq = on.add(tokens, sampled, SamplingParams(temperature=0, seed=seed, max_tokens=length))
    for _ in on.prefill(seq):
        pass
    plans = []
    real = on.drafting.controller.prune

    def watched(trees, plan):
        kept = real(trees, plan)
        plans.append((plan.kind, plan.reason, [tree.tokens.tolist() for tree in kept]))
        return kept

    on.drafting.controller.prune = watched  # type: ignore[method-assign]
    while not seq.finished:
        on.step([seq])
    on.drafting.controller.prune = real  # type: ignore[method-assign]
    on.finish(seq)
    return seq.tokens, seq.sampled, plans


@pytest.mark.parametrize("drafters", [("ngram",), ("history",), ("ngram", "history", "lookahead")])
def test_plans_after_a_resume_are_those_of_a_chat_that_never_quit(tmp_path, steady, drafters):
    log = TokenIndex()
    plain = Engine(tiny(), EngineConfig(spec="none"), costs=COSTS)
    log.add(PROMPT, play(plain, PROMPT, [False] * len(PROMPT), 3, 150)[0][len(PROMPT) :])
    config = EngineConfig(drafters=drafters)

    def engine(known: DraftMemory | None) -> Engine:
        return Engine(tiny(), config, costs=COSTS, token_log=log, memory=known)

    first = engine(memory(tmp_path))
    tokens, sampled, _ = play(first, PROMPT, [False] * len(PROMPT), 3, 80)
    first.close()
    tokens, sampled = [*tokens, 10, 257, *b"more", 258], [*sampled, *[False] * 7]
    resumed = play(engine(memory(tmp_path)), tokens, sampled, 5)
    never_quit = play(first, tokens, sampled, 5)
    assert resumed == never_quit
    assert any(len(trees[0]) > 1 for _, _, trees in resumed[2])
    forgetful = play(engine(None), tokens, sampled, 5)
    assert forgetful[0] == resumed[0]
    assert forgetful[2] != resumed[2]


def test_what_was_learnt_comes_back_whole():
    one = Controller(COSTS)
    tree = DraftTree.of([1, 2, 3], [0, 0, 1], bins=[0, 3, 2], source="s")
    for step in range(300):
        plan = one.plan([0])
        plan.asked = ("s",) if step % 2 else ()
        kept = one.prune([tree], plan)
        gained = [Accepted((2, 9) if step % 3 and len(kept[0]) > 1 else (2,), (0,), ())]
        ms = 1.2 + step % 5 / 10 + len(kept[0]) / 4
        one.observe(StepRecord.of(kept, gained, verify_ms=ms, draft_ms=0.1), gained)
    one.unseen.add(3, 1, 2)  # trees that ran unseen
    for _ in range(5):
        one._idle.plain(7)
    told = json.loads(json.dumps(one.to_json()))
    assert all(told[name] for name in told)
    other = Controller(COSTS)
    other.recall(told)
    assert other.to_json() == one.to_json()
    assert [other.costs.ms(rows) for rows in COSTS] == [one.costs.ms(rows) for rows in COSTS]
    assert other.plan([0]) == one.plan([0])
    # On a machine of another speed only what was guessed right counts.
    slower = Controller({rows: 2 * ms for rows, ms in COSTS.items()})
    slower.recall(told)
    assert slower.to_json()["calibration"] == told["calibration"]
    assert slower.costs.ms(4) == 2 * COSTS[4]
    assert slower.guard.wants_control


def test_a_rest_goes_on():
    one = Controller(COSTS)
    one.guard.rest_tokens = REST_TOKENS
    one.guard._in_a_row = 2
    other = Controller(COSTS)
    other.recall(one.to_json())
    assert not other.plan([0]).asks
    assert other.guard._in_a_row == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1", "2", 1),
        lambda text: text[:-10] + "x" + text[-9:],
        lambda text: "[]",
        lambda text: "00000000\n{}",
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path, damage):
    kept = memory(tmp_path)
    assert kept.load() == {}
    kept.save(Controller(COSTS).to_json, now=True)
    assert set(kept.load()) >= {"calibration", "costs"}
    kept.path.write_text(damage(kept.path.read_text()))
    assert kept.load() == {}
    engine = Engine(tiny(), EngineConfig(), costs=COSTS, memory=kept)
    assert engine.costs == COSTS


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"calibration": 5},
        {"calibration": [["s", 1, 1, False, 3, 2], ["s", "x"]]},
        {"calibration": [], "costs": {"base": [[1, "slow"]]}},
        {"calibration": [], "costs": {"base": list(COSTS.items()), "drift": ["x"], "own": []}},
    ],
)
def test_what_makes_no_sense_is_left_out(known):
    controller = Controller(COSTS)
    controller.recall(known)
    assert controller.plan([0]).asks is False  # a plain step first, as ever
    assert [controller.costs.ms(rows) for rows in COSTS] == list(COSTS.values())


def test_other_kinds_share_nothing_and_a_full_disk_is_no_error(tmp_path):
    one, other = memory(tmp_path), memory(tmp_path, threads=4)
    one.save(lambda: {"a": 1}, now=True)
    assert one.load() == {"a": 1}
    assert other.load() == {}
    one.save(lambda: {"a": 2})  # too soon
    assert one.load() == {"a": 1}
    (tmp_path / "file").write_text("")
    memory(tmp_path / "file").save(lambda: {}, now=True)


def test_costs_are_measured_again_where_a_step_takes_another_time(tmp_path, monkeypatch):
    took = {rows: 1.0 + rows / 10 for rows in COST_ROWS}
    asked: list[tuple[int, ...]] = []

    def measure(model, pool, repeats=3, rows=COST_ROWS):
        asked.append(tuple(rows))
        return {count: took[count] for count in rows}

    monkeypatch.setattr(step_costs, "measure", measure)
    kept = memory(tmp_path)
    Engine(tiny(), EngineConfig(), memory=kept).close()
    took[COST_ROWS[-1]] *= 1.1
    again = Engine(tiny(), EngineConfig(), memory=kept)
    assert again.costs[COST_ROWS[-1]] == pytest.approx(took[COST_ROWS[-1]] / 1.1)
    took[1] *= 2
    slower = Engine(tiny(), EngineConfig(), memory=kept)
    assert slower.costs[1] == took[1]
    assert asked == [COST_ROWS, (1, 16), (1, 16), COST_ROWS]
