"""Paths that forget on a CUDA device: captured steps and prompt chunks over tables with holes."""

# ruff: noqa: E402

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    if os.environ.get("CHATKV_REQUIRE") == "gpu":
        pytest.fail("CHATKV_REQUIRE=gpu, and torch sees no CUDA device", pytrace=False)
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from talk import COSTS, WORDS, Talk, images

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.kv.ops import Op
from chatkv.models import catalog, devices
from chatkv.sampling import SamplingParams

DEFAULT = next((row for row in catalog.list_models() if row.path), None)
MODELS = ("random:tiny", *([DEFAULT.name] if DEFAULT else []))
PROMPTS = [list(WORDS[i : i + 9 + 7 * i % 30]) for i in range(9)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return devices.load_model(catalog.find(request.param), "cuda")[0]


def engine(model: Any, spec: str, kv_dtype: str = "auto") -> Engine:
    more = {} if kv_dtype == "auto" else {"kv_dtype": kv_dtype}
    config = EngineConfig(
        spec=spec,
        drafters=("ngram", "random"),
        context_limit=448,
        pool_tokens=4 * 448,
        **more,  # type: ignore[arg-type]
    )
    return Engine(model, config, costs=COSTS, guard=False)


def talk_of(policy: str) -> Talk:
    talk = Talk(policy, tokens=70)
    talk.ids, talk.sampled = [1, *WORDS[:8]], [False] * 9
    return talk


def play(model: Any, policy: str, spec: str, *, quits: bool = False, kv: str = "auto") -> Any:
    talk, on, replies = talk_of(policy), engine(model, spec, kv), []
    for prompt in PROMPTS:
        if quits:
            on = engine(model, spec, kv)
        replies.append(talk.say(on, [token % 200 for token in prompt]))
    return replies, talk.ops, talk.images


@pytest.mark.parametrize("trained", [448, 4096])
@pytest.mark.parametrize(
    "policy", ["turns", "oldest:limit_tokens=400,drop_tokens=99,edge=token", "window"]
)
def test_drafted_is_plain_and_replayed_never_quit(
    model: Any, policy: str, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = min(trained, model.spec.context_limit)
    monkeypatch.setattr(model, "spec", replace(model.spec, context_limit=limit))
    plain = play(model, policy, "none")
    assert len(plain[1]) > 1
    assert any(op.rebase for op in plain[1]) == (limit == 448)
    assert play(model, policy, "tree:6") == plain
    assert play(model, policy, "none", quits=True) == plain


@pytest.mark.parametrize("kv", ["int8", "int4", "fp8"])
def test_quantised_pages_forget_too(model: Any, kv: str) -> None:
    if kv == "int4" and model.spec.head_dim % 64:
        pytest.skip("int4 needs heads of 64 n")
    plain = play(model, "turns", "none", kv=kv)
    assert play(model, "turns", "tree:6", kv=kv) == plain


def test_batched_is_alone(model: Any) -> None:
    ids = [1 + token % 200 for token in WORDS * 4]
    paths: list[list[Op]] = [[], [Op(90, ((3, 80),))], [Op(70, ((0, 1),)), Op(190, ((64, 150),))]]

    def add(on: Engine, index: int) -> Any:
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=60 + index)
        return on.add(ids, [False] * len(ids), params, ops=paths[index])

    alone = []
    for index in range(3):
        on = engine(model, "none")
        seq = add(on, index)
        on.generate([seq])
        alone.append((seq.tokens, images(on, seq)))
    assert alone[0][0] != alone[1][0]
    for spec in ("none", "tree:4"):
        on = engine(model, spec)
        seqs = [add(on, index) for index in range(3)]
        on.generate(seqs)
        assert [(seq.tokens, images(on, seq)) for seq in seqs] == alone
