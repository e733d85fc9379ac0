"""Drafted = plain, for every drafter; the law of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lossless import (
    EDITS,
    Nonsense,
    Raising,
    check_edits,
    check_identity,
    check_law,
    check_ties,
    history_of,
)

from chatkv.sampling import SamplingParams
from chatkv.spec.drafters.lookahead import LookaheadDrafter
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.drafters.random import RandomDrafter


def test_identity(toy):
    check_identity(toy)


def test_identity_with_edits(toy):
    check_edits(toy)


def test_ties(toy):
    check_ties(toy)


@given(
    seed=st.integers(0, 2**63 - 1),
    trees=st.integers(0, 1000),
    temperature=st.sampled_from([0, 0.3, 0.7, 1, 2]),
    filters=st.fixed_dictionaries(
        {
            "top_p": st.sampled_from([1, 0.95, 0.5]),
            "top_k": st.sampled_from([0, 1, 4]),
            "min_p": st.sampled_from([0, 0.1]),
        }
    ),
    edits=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.5, 1.1, 3]),
            "presence_penalty": st.floats(-2, 2, width=32),
            "frequency_penalty": st.floats(-2, 2, width=32),
            "logit_bias": st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=4),
            "grammar": st.sampled_from([e["grammar"] for e in EDITS if "grammar" in e]),
        },
    ),
    tokens=st.integers(1, 40),
    ends=st.sampled_from([(), (5,), (0, 3)]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_drafted_equals_plain(toy, seed, trees, temperature, filters, edits, tokens, ends, right):
    model = toy.Model()
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, **filters, **edits
    )
    expected = toy.plain(model, params, ends)
    actual = toy.drafted(model, params, [toy.TreeDrafter(model, trees, right)], ends)
    assert actual.ids == expected.ids
    assert actual.cache == expected.cache


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
@pytest.mark.parametrize(
    "make",
    [
        lambda toy, model: [NgramDrafter()],
        lambda toy, model: [history_of(toy, model)],
        lambda toy, model: [LookaheadDrafter()],
        lambda toy, model: [RandomDrafter(model.vocab_size)],
        lambda toy, model: [toy.ChainDrafter(model, 5)],
        lambda toy, model: [toy.ChainDrafter(model, 5, offset=1)],
        lambda toy, model: [Raising()],
        lambda toy, model: [Nonsense()],
        lambda toy, model: [
            NgramDrafter(),
            history_of(toy, model),
            LookaheadDrafter(),
            RandomDrafter(12),
            Nonsense(),
            toy.TreeDrafter(model, 3),
        ],
        lambda toy, model: [],
    ],
    ids=[
        "ngram",
        "history",
        "lookahead",
        "random",
        "oracle",
        "adversarial",
        "raising",
        "nonsense",
        "merged",
        "none",
    ],
)
def test_any_drafter_leaves_the_text_alone(toy, make, temperature):
    model = toy.Model(scale=4.0)
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=150)
    assert toy.drafted(model, params, make(toy, model)).ids == toy.plain(model, params).ids


def test_oracle_and_adversary_gain_what_they_must(toy):
    model = toy.Model()
    params = SamplingParams(seed=3, max_tokens=1 + 6 * 20)
    assert toy.drafted(model, params, [toy.ChainDrafter(model, 5)]).tau == 6
    assert toy.drafted(model, params, [toy.ChainDrafter(model, 5, offset=1)]).tau == 1


def test_ngram_gains_in_a_loop(toy):
    model = toy.Model()
    params = SamplingParams(temperature=0, max_tokens=400)  # the toy soon repeats itself
    run = toy.drafted(model, params, [NgramDrafter()])
    assert run.ids == toy.plain(model, params).ids
    assert [step.tokens for step in run.steps[-11:-1]] == [16] * 10


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_history_gains_on_a_text_that_was_there(toy, temperature):
    model = toy.Model(scale=1.0)
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=150)
    run = toy.drafted(model, params, [history_of(toy, model, temperature=temperature)])
    assert run.ids == toy.plain(model, params).ids
    assert run.tau > 4


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_lookahead_gains_where_few_tokens_decide(toy, temperature):
    model = toy.Model(scale=4.0)
    model.table[:] = model.table[0, 0]  # the last id alone decides, so wrong paths soon agree
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=150)
    run = toy.drafted(model, params, [LookaheadDrafter()])
    assert run.ids == toy.plain(model, params).ids
    assert run.tau > 1.5


@pytest.mark.parametrize("mode", ["plain", "drafted"])
def test_law(toy, mode):
    check_law(toy, mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "drafted"])
def test_law_of_200_000_runs(toy, mode):
    check_law(toy, runs=200_000, mode=mode)
