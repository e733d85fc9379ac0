"""The draft model: its pages hold chosen ids only, and no pick of it changes the text."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ModelError
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.draft_model import DraftModelDrafter, expect_same_tokenizer
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.verify import Accepted

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]


def drafted_engine(seed: int) -> tuple[Engine, DraftModelDrafter]:
    engine = Engine(TinyModel(), EngineConfig(spec="tree:7"), costs=COSTS, guard=False)
    drafter = DraftModelDrafter(TinyModel(seed), engine.context_limit)
    engine.drafting.drafters = GuardedDrafters([drafter], vocab_size=engine.model.spec.vocab_size)
    return engine, drafter


def check_pages(drafter: DraftModelDrafter) -> None:
    """Each table holds a prefix of the chosen ids, with the K/V a fresh model has for it."""
    for held in drafter.held.values():
        assert held.ids == held.chosen[: len(held.ids)]
        assert held.table.length == len(held.ids) < len(held.chosen)
        if not held.ids:
            continue
        fresh = DraftModelDrafter(TinyModel(drafter.model.seed), drafter.limit)
        fresh.follow(1, held.ids)
        other = fresh.held[1]
        fresh._logits(other, held.ids)
        for slot, twin in zip(
            held.table.slots(0, len(held.ids)), other.table.slots(0, len(held.ids)), strict=True
        ):
            (page, offset), (page2, offset2) = divmod(slot, 16), divmod(twin, 16)
            ours = drafter.pool.data[:, page, :, :, offset]
            assert torch.allclose(ours, fresh.pool.data[:, page2, :, :, offset2], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", [0, 5])
def test_drafted_is_plain(temperature, seed):
    """The model as its own draft, and another one."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60)
    plain = Engine(TinyModel(), EngineConfig(spec="none"), costs=COSTS)
    engine, drafter = drafted_engine(seed)
    replies = []
    for on in (plain, engine):
        seq = on.add(PROMPT, [False] * len(PROMPT), params)
        for _ in on.prefill(seq):
            pass
        steps = 0
        while not seq.finished:
            on.step([seq])
            steps += 1
            check_pages(drafter)
        on.finish(seq)
        replies.append((seq.tokens, steps))
    (expected, _), (got, steps) = replies
    assert got == expected
    if seed == 0:
        assert steps <= 60 / 3
    assert not engine.drafting.drafters.failures
    assert drafter.pool.used == len(drafter.prefix)


@settings(max_examples=25)
@given(st.data())
def test_pages_hold_chosen_ids_whatever_is_accepted(data):
    drafter = DraftModelDrafter(TinyModel(2), 200)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    tokens = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=60))
    drafter.follow(1, tokens)
    for _ in range(4):
        rows = data.draw(st.integers(1, 9))
        (tree,) = drafter.propose([DraftContext(1, tokens, sampler)], [rows])
        assert len(tree) <= rows
        right = data.draw(st.integers(0, len(tree) - 1))
        gained = [int(token) for token in tree.tokens[1 : right + 1]]
        gained.append(data.draw(st.integers(0, 255)))
        if data.draw(st.booleans()):
            tokens = [*tokens, *gained]
            drafter.observe(1, Accepted(tuple(gained), tuple(range(len(gained))), ()))
        else:
            tokens = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=80))
        drafter.follow(1, tokens)
        check_pages(drafter)
    drafter.drop(1)
    assert drafter.pool.used == len(drafter.prefix)


def test_a_second_turn_finds_the_pages_of_the_first():
    drafter = DraftModelDrafter(TinyModel(), 500)
    sampler = Sampler(SamplingParams(temperature=0))
    first = list(range(100))
    drafter.follow(1, first)
    drafter.propose([DraftContext(1, first, sampler)], [4])
    drafter.drop(1)
    drafter.follow(2, [*first, 7, 8, 9])
    assert len(drafter.held[2].ids) == 96
    drafter.follow(3, [5, *first])
    assert drafter.held[3].ids == []


def test_nothing_is_proposed_behind_its_own_limit():
    drafter = DraftModelDrafter(TinyModel(), 20)
    tokens = list(range(20))
    context = DraftContext(1, tokens, Sampler(SamplingParams(temperature=0)))
    (tree,) = drafter.propose([context], [8])
    assert len(tree) == 1


def tokenizer(*words):
    return SimpleNamespace(
        tok_fp=lambda: repr(words).encode(),
        vocab_size=len(words),
        token_text=lambda token: words[token] if token < len(words) else None,
    )


def test_another_tokenizer_is_named_by_its_first_difference():
    expect_same_tokenizer(tokenizer("a", "b"), tokenizer("a", "b"))
    with pytest.raises(ModelError, match="id 1 is 'c' there and 'b' in the model"):
        expect_same_tokenizer(tokenizer("a", "b"), tokenizer("a", "c"))
    with pytest.raises(ModelError, match="id 2 is 'c' there and missing in the model"):
        expect_same_tokenizer(tokenizer("a", "b"), tokenizer("a", "b", "c"))


def test_rows_behind_the_last_token_are_no_difference():
    words = ("a", "b", "[PAD7]", "c")
    padded = tokenizer(*words, *(f"[PAD{i}]" for i in range(4, 9)))
    for other in (tokenizer(*words), tokenizer(*words, "[PAD4]"), padded):
        expect_same_tokenizer(padded, other)
        expect_same_tokenizer(other, padded)
    with pytest.raises(ModelError, match=r"id 2 is 'x' there and '\[PAD7\]' in the model"):
        expect_same_tokenizer(padded, tokenizer("a", "b", "x", "c"))
    with pytest.raises(ModelError, match="id 3 is missing there"):
        expect_same_tokenizer(padded, tokenizer("a", "b", "[PAD7]"))


def test_margins_are_binned_from_unsure_to_sure():
    drafter = DraftModelDrafter(TinyModel(), 100)
    tokens = list(b"the cat the cat the ")
    context = DraftContext(1, tokens, Sampler(SamplingParams(temperature=0)))
    (tree,) = drafter.propose([context], [8])
    assert 1 <= tree.bins[1:].min() <= tree.bins.max() <= 8
    assert np.all(np.diff(tree.chance) <= 0)
