"""The compiled pick equals the plain one, and the plain one does what the settings say."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatkv.errors import ConfigError, ModelError
from chatkv.sampling import Grammar, Sampler, SamplingParams, logprobs
from chatkv.sampling_plain import weights

SIZES = [1, 2, 3, 63, 64, 65, 130, 1000]
KINDS = ["normal", "narrow", "wide", "ties", "flat", "zeros", "masked", "peak", "sorted", "huge"]
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0, 2.0, 100.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 0, 1, 2, 40, 63, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def make_logits(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size)
    values = {
        "normal": 3 * x,
        "narrow": 0.01 * x,
        "wide": 1000 * x,
        "ties": np.round(x),
        "flat": np.full(size, -2.5),
        "zeros": np.where(x > 0, 0.0, -0.0),
        "masked": np.where((x > 0) & (np.arange(size) > 0), -np.inf, 2 * x),
        "peak": np.where(np.arange(size) == size // 2, 30.0, x),
        "sorted": np.sort(3 * x),
        "huge": 1e9 + 64 * np.round(x),  # noise is rounded away: scores tie
    }[kind]
    return values.astype(np.float32)


@given(PARAMS, st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 999))
@example(SamplingParams(temperature=1, top_p=1), "masked", 130, 0)
@example(SamplingParams(temperature=100, top_p=0.9), "huge", 1000, 0)
@example(SamplingParams(temperature=100, top_p=0.9), "huge", 1000, 1)
@settings(max_examples=400)
def test_compiled_equals_plain(params, kind, size, seed):
    logits = make_logits(kind, size, seed)
    fast, plain = Sampler(params), Sampler(params, plain=True)
    for position in range(5):
        assert fast.pick(logits, (), position) == plain.pick(logits, (), position)


@pytest.mark.parametrize("kind", ["normal", "narrow", "ties", "peak"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, top_p=1, seed=2),
        SamplingParams(top_k=50, min_p=0.02, seed=3),
    ],
    ids=["default", "greedy", "unfiltered", "top_k"],
)
def test_compiled_equals_plain_on_a_real_vocabulary(params, kind):
    logits = make_logits(kind, 49_152, 7)
    fast, plain = Sampler(params), Sampler(params, plain=True)
    for position in range(4):
        assert fast.pick(logits, (), position) == plain.pick(logits, (), position)


def test_scratch_follows_the_size():
    sampler = Sampler(SamplingParams(seed=9))
    for size in (1000, 3, 64, 2000):
        logits = make_logits("normal", size, size)
        plain = Sampler(SamplingParams(seed=9), plain=True)
        assert sampler.pick(logits, (), 1) == plain.pick(logits, (), 1)


@pytest.mark.parametrize("plain", [True, False])
def test_ties_go_to_the_lowest_id(plain):
    logits = np.array([1, 3, 3, 2, 3], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0), plain=plain).pick(logits, (), 0).token == 1
    top = Sampler(SamplingParams(top_k=1, seed=5), plain=plain)
    assert {top.pick(logits, (), position).token for position in range(20)} == {1}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_broken_logits_raise(plain, temperature, bad):
    logits = np.zeros(200, dtype=np.float32)
    logits[150] = np.copysign(np.float32(abs(bad)), np.float32(-1 if bad is not np.inf else 1))
    with pytest.raises(ModelError, match="not numbers"):
        Sampler(SamplingParams(temperature=temperature), plain=plain).pick(logits, (), 0)
    logits[150] = bad
    with pytest.raises(ModelError, match="not numbers"):
        Sampler(SamplingParams(temperature=temperature), plain=plain).pick(logits, (), 0)
    logits[:] = -np.inf
    with pytest.raises(ModelError, match="not numbers"):
        Sampler(SamplingParams(temperature=temperature), plain=plain).pick(logits, (), 0)


def survivors(logits: np.ndarray, **filters: float) -> set[int]:
    """Tokens that come up at a temperature that makes all survivors likely."""
    sampler = Sampler(SamplingParams(seed=1, **filters))
    return {sampler.pick(logits, (), position).token for position in range(3000)}


def test_filters_keep_what_they_say():
    chance = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = np.log(chance).astype(np.float32)
    assert survivors(logits, temperature=1, top_p=1) == {0, 1, 2, 3, 4}
    assert survivors(logits, temperature=1, top_p=0.69) == {0, 1}
    assert survivors(logits, temperature=1, top_p=0.71) == {0, 1, 2}
    assert survivors(logits, temperature=1, top_p=1, top_k=3) == {0, 1, 2}
    assert survivors(logits, temperature=1, top_p=1, min_p=0.3) == {0, 1, 2}
    # Top-p counts what top-k left: 0.4 of 0.7 is 57 %.
    assert survivors(logits, temperature=1, top_k=2, top_p=0.5) == {0}
    # Temperature comes first: at T = 0.5 the first token holds 0.16 / 0.2850 = 56 %.
    assert survivors(logits, temperature=0.5, top_p=0.5) == {0}


def test_weights_are_exponentials():
    distance = -np.linspace(0, 25, 100_001, dtype=np.float32)
    exact = np.exp(distance.astype(np.float64))
    assert np.abs(weights(distance) / 2**30 - exact).max() < 3e-7
    assert weights(np.array([0, -22, -np.inf], dtype=np.float32)).tolist() == [2**30, 0, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = make_logits("normal", 500, 1)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    found = logprobs(logits, 7, 3)
    best = np.argsort(-logits, kind="stable")[:3]
    assert (found.token, found.logprob) == (7, pytest.approx(exact[7], abs=1e-5))
    assert [token for token, _ in found.top] == best.tolist()
    assert [value for _, value in found.top] == pytest.approx(exact[best], abs=1e-5)
    assert logprobs(logits, 7, 0).top == ()


def test_equal_logprobs_are_told_by_id_and_impossible_ones_are_not():
    logits = np.array([1, 3, -np.inf, 3, 3], np.float32)
    assert [token for token, _ in logprobs(logits, 0, 2).top] == [1, 3]
    assert [token for token, _ in logprobs(logits, 0, 20).top] == [1, 3, 4, 0]


def test_margin():
    logits = np.array([1.0, 4.0, 2.5], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0)).pick(logits, (), 0).margin == 1.5
    assert Sampler(SamplingParams(top_k=1)).pick(logits, (), 0).margin == math.inf


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": 0},
        {"stop": ("",)},
        {"stop": "abc"},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {5: 101}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": 3},
        {"logprobs": 21},
        {"logprobs": -1},
        {"grammar": "yaml:a"},
        {"grammar": "regex:"},
        {"grammar": "regex"},
    ],
)
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_a_schema_that_is_no_json_is_refused_with_the_place():
    with pytest.raises(ConfigError, match="line 2 column 1"):
        Grammar("json_schema", '{"type":\n}')
    with pytest.raises(ConfigError, match="not an object"):
        Grammar("json_schema", "false")
    for deep in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ConfigError, match="too deeply nested"):
            Grammar("json_schema", deep)


def test_settings_are_taken_as_they_are_stored():
    stored = {"logit_bias": {"7": -1, "3": 2.5}, "grammar": "regex:a:+"}
    params = SamplingParams(**stored)  # type: ignore[arg-type]
    assert params == SamplingParams(
        logit_bias=((3, 2.5), (7, -1.0)), grammar=Grammar("regex", "a:+")
    )
    assert replace(params, seed=1).logit_bias == params.logit_bias
    assert str(params.grammar) == stored["grammar"]
    assert SamplingParams(grammar="none") == SamplingParams()  # type: ignore[arg-type]


def test_settings_load_no_numpy():
    code = "import sys, chatkv.sampling; sys.exit('numpy' in sys.modules or 'numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
