"""Penalties, bias, grammar and log probabilities on a CUDA device: exact in any company."""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    if os.environ.get("CHATKV_REQUIRE") == "gpu":
        pytest.fail("CHATKV_REQUIRE=gpu, and torch sees no CUDA device", pytrace=False)
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.models import catalog
from chatkv.models.devices import load_model
from chatkv.models.model import Model
from chatkv.sampling import Grammar, SamplingParams
from chatkv.sequence import Sequence

DEFAULT = next((row for row in catalog.list_models() if row.path), None)
MODELS = ("random:tiny", *([DEFAULT.name] if DEFAULT else []))
WORDS = Grammar("regex", "((the|cat|sat|on|mat) ){3,9}end")
FORM = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "logprobs": 3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"65": 3}},
    {"temperature": 0.0, "logprobs": 1},
    {"grammar": WORDS},
    {"grammar": Grammar("json_schema", json.dumps(FORM)), "repetition_penalty": 1.1},
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    pytest.importorskip("llguidance")
    return load_model(catalog.find(request.param), "cuda")[0]


def play(model: Model, spec: str, settings: tuple[dict[str, Any], ...]) -> list[Sequence]:
    config = EngineConfig(spec=spec, drafters=("ngram", "random"), context_limit=512)
    on = Engine(model, config, costs={1: 1.0}, guard=False)
    tokenizer, seqs = model.tokenizer, []
    for given in settings:
        seed = MIXED.index(given)
        ids = tokenizer.head_ids() + tokenizer.user_ids("the cat sat on the mat " * seed, True)
        params = SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 48, **given})
        seqs.append(on.add(ids, [False] * len(ids), params))
    on.generate(seqs)
    return seqs


def told(seqs: list[Sequence]) -> list[Any]:
    return [(seq.tokens[seq.prompt_tokens :], seq.finish_reason, seq.logprobs) for seq in seqs]


def test_drafted_is_plain_and_mixed_is_alone(model: Model) -> None:
    alone = [told(play(model, "none", (given,)))[0] for given in MIXED]
    for spec in ("none", "tree:6"):
        assert told(play(model, spec, MIXED)) == alone
    for given, expected in zip(MIXED, alone, strict=True):
        assert told(play(model, "tree:6", (given,))) == [expected]
    for (ids, _, found), given in zip(alone, MIXED, strict=True):
        assert [one.token for one in found] == (ids if "logprobs" in given else [])
