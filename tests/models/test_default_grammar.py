"""The default model under a JSON schema: what it says parses, with guesses as without."""

from __future__ import annotations

import json

import pytest

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.sampling import Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_it_says_parses(default_model, temperature):
    tokenizer = default_model.tokenizer
    ids = tokenizer.head_ids() + tokenizer.user_ids("Ada is 36 and likes tea. As JSON?", first=True)
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=100,
            grammar=Grammar("json_schema", json.dumps(SCHEMA)),
        )
        for seed in range(3)
    ]
    replies = []
    for spec in ("none", "tree:5"):
        config = EngineConfig(spec=spec, drafters=("ngram", "random"), context_limit=512)
        on = Engine(default_model, config, costs={1: 1.0}, guard=False)
        seqs = [on.add(ids, [False] * len(ids), each) for each in params]
        on.generate(seqs)
        replies.append([seq.tokens[len(ids) :] for seq in seqs])
        for seq in seqs:
            assert seq.finish_reason == "stop"
            found = json.loads(tokenizer.decode(seq.tokens[len(ids) :]))
            assert found.keys() == {"name", "age", "likes"}
            assert len(found["name"]) <= 20
            assert 0 <= found["age"] <= 120
            assert set(found["likes"]) <= {"tea", "coffee"}
            on.finish(seq)
    assert replies[0] == replies[1]
