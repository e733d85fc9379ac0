"""Bias and penalties do what they say, in their order, on a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.errors import ModelError
from chatkv.sampling import Constraint, Grammar, Sampler, SamplingParams
from chatkv.sampling_edits import RowEdits

SIZE = 50
IDS = st.lists(st.integers(0, SIZE - 1), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.1, 1.3, 5.0]),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=5),
)


def row_of(seed: int, size: int = SIZE) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=size)).astype(np.float32)


class Even:
    """Allows even tokens."""

    def mask(self, reply) -> np.ndarray:
        return np.arange(SIZE) % 2 == 0

    def fitting(self, reply, path) -> int:
        return 0

    def accepts(self, reply) -> bool:
        return True


def by_hand(
    row: np.ndarray, params: SamplingParams, prompt: list[int], reply: list[int]
) -> np.ndarray:
    """One token after the other, one operation after the other."""
    f = np.float32
    found = row.copy()
    for token in range(len(row)):
        value = row[token]
        for biased, bias in params.logit_bias:
            value = value + f(bias) if token == biased else value
        if token in prompt or token in reply:
            factor = f(params.repetition_penalty)
            value = value * factor if value < 0 else value / factor
        if token in reply:
            value = value - f(params.frequency_penalty) * f(reply.count(token))
            value = value - f(params.presence_penalty)
        found[token] = value
    return found


@given(PARAMS, IDS, IDS, st.integers(0, 99))
def test_edits_are_the_definition_bit_for_bit(params, prompt, reply, seed):
    row = row_of(seed)
    before = row.copy()
    found = RowEdits(params, prompt, None).apply(row, reply)
    np.testing.assert_array_equal(found, by_hand(row, params, prompt, reply))
    np.testing.assert_array_equal(row, before)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.1, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    torch = pytest.importorskip("torch")
    processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    for seed in range(20):
        row, rng = row_of(seed, 1000), np.random.default_rng(seed)
        prompt, reply = rng.integers(0, 1000, 40).tolist(), rng.integers(0, 1000, 30).tolist()
        expected = processor(torch.tensor([prompt + reply]), torch.from_numpy(row[None].copy()))
        params = SamplingParams(repetition_penalty=penalty)
        found = RowEdits(params, prompt, None).apply(row, reply)
        np.testing.assert_allclose(found, expected[0].numpy(), rtol=3e-7)


def test_presence_and_frequency_count_the_reply_alone():
    row = np.zeros(5, np.float32)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = RowEdits(params, [0, 1, 1], None).apply(row, [1, 2, 2, 2])
    assert found.tolist() == [0, -0.75, -1.25, 0, 0]


def test_edits_come_before_temperature_and_filters():
    row = np.array([5, 4, 3, 2], np.float32)
    banned = SamplingParams(temperature=1, top_k=1, logit_bias=((0, -100.0),))
    assert Sampler(banned).pick(row, (), 0).token == 1
    even = SamplingParams(temperature=1, top_p=0.01, grammar=Grammar("regex", "a"))
    masked = np.arange(SIZE, dtype=np.float32)
    assert Sampler(even, (), Even()).pick(masked, (), 0).token == SIZE - 2


def test_the_grammar_comes_after_the_penalties():
    """A forbidden token stays forbidden, whatever its bias."""
    params = SamplingParams(logit_bias=((1, 100.0),), grammar=Grammar("regex", "a"))
    found = RowEdits(params, [], Even()).apply(row_of(0), [])
    assert np.isneginf(found[1::2]).all()
    assert np.isfinite(found[::2]).all()


@pytest.mark.parametrize("size", [SIZE - 7, SIZE + 7])
def test_a_row_of_another_size_than_the_mask(size):
    """As a draft model may have, whose vocabulary is padded to another size."""
    grammar: Constraint = Even()
    params = SamplingParams(grammar=Grammar("regex", "a"))
    found = RowEdits(params, [], grammar).apply(row_of(1, size), [])
    assert np.flatnonzero(np.isfinite(found)).tolist() == list(range(0, min(size, SIZE), 2))


def test_a_nan_does_not_hide_behind_the_grammar():
    row = row_of(0)
    row[1] = np.nan
    params = SamplingParams(grammar=Grammar("regex", "a"))
    with pytest.raises(ModelError, match="not numbers"):
        Sampler(params, (), Even()).pick(row, (), 0)


def test_plain_settings_edit_nothing():
    assert not SamplingParams(temperature=0, top_k=3, stop=("a",), logprobs=2).edits_rows
    for name, value in {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {3: 1},
        "grammar": Grammar("regex", "a"),
    }.items():
        assert SamplingParams(**{name: value}).edits_rows  # type: ignore[arg-type]
