"""A tree that turns out to be none while it runs: the step runs again, and the text is the same."""

# The tiny model is a model for the tests.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from chatkv.spec.drafting import Drafting
from chatkv.spec.proposal import StaleTree

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}


def reply(engine: Engine) -> list[int]:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    seq = engine.add(prompt, [False] * len(prompt), params)
    seq.eos_ids = frozenset()
    engine.generate([seq])
    free = engine.pool.free
    engine.finish(seq)
    assert engine.pool.free >= free
    return seq.tokens


@pytest.mark.parametrize("spec", ["none", "tree:6"])
def test_the_step_runs_again(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(spec=spec, drafters=("ngram", "random"), context_limit=128)
    expected = reply(Engine(TinyModel(), config, costs=COSTS, guard=False))
    real, calls, raised = Drafting.behind, [0], [0]

    def behind(drafting: Drafting, seqs: list[Sequence], run_on: None) -> Callable[[], None]:
        work = real(drafting, seqs, run_on)

        def once_in_a_while() -> None:
            calls[0] += 1
            if calls[0] % 5 == 2:
                raised[0] += 1
                raise StaleTree("not this one")
            work()

        return once_in_a_while

    monkeypatch.setattr(Drafting, "behind", behind)
    assert reply(Engine(TinyModel(), config, costs=COSTS, guard=False)) == expected
    assert raised[0] > 3
