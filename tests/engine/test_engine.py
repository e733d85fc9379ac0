"""The equalities that hold the design, on the tiny model: drafted = plain, batched = alone,
resumed = never quit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ContextFull, UsageError
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.tree import DraftTree

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}


def engine(model: TinyModel, spec: str = "none", drafters: tuple[str, ...] = ("ngram",)) -> Engine:
    config = EngineConfig(spec=spec, drafters=drafters)
    return Engine(model, config, costs=COSTS, guard=False)


def run(on: Engine, tokens: list[int], params: SamplingParams) -> Sequence:
    seq = on.add(tokens, [False] * len(tokens), params)
    for _ in on.prefill(seq):
        pass
    while not seq.finished:
        on.step([seq])
    return seq


def reply(on: Engine, tokens: list[int], params: SamplingParams) -> list[int]:
    seq = run(on, tokens, params)
    on.finish(seq)
    return seq.tokens[seq.prompt_tokens :]


PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize(
    ("spec", "drafters"),
    [
        ("tree:7", ("random",)),
        ("chain:4", ("ngram",)),
        ("tree:12", ("ngram", "random")),
        ("tree:6", ("auto",)),
    ],
)
def test_drafted_is_plain(temperature: float, spec: str, drafters: tuple[str, ...]) -> None:
    model = TinyModel()
    for seed in range(4):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=60)
        plain = engine(model)
        drafted = engine(model, spec, drafters)
        assert reply(drafted, PROMPT, params) == reply(plain, PROMPT, params)
        assert max(model.rows) > 1


@settings(max_examples=20)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=70), st.integers(0, 2**63 - 1))
def test_drafted_pages_are_plain_pages(prompt: list[int], seed: int) -> None:
    """Not only the ids: the K/V bits of every page are those of plain decoding."""
    model = TinyModel()
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40)
    images = []
    for on in (engine(model), engine(model, "tree:9", ("random", "ngram"))):
        seq = run(on, prompt, params)
        size = on.pool.page_size
        rows = [min(size, seq.table.length - i * size) for i in range(len(seq.table.pages))]
        images.append([on.pool.image(p, n) for p, n in zip(seq.table.pages, rows, strict=True)])
        on.finish(seq)
    assert images[0] == images[1]


def test_batched_is_alone() -> None:
    model = TinyModel()
    prompts = [PROMPT, [259, *b"hello", 258], [259, *range(100), 258]]
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=30 + s) for s in range(3)]
    alone = [reply(engine(model), p, s) for p, s in zip(prompts, params, strict=True)]
    for spec in ("none", "tree:4"):
        together = engine(model, spec, ("random",))
        seqs = [together.add(p, [False] * len(p), s) for p, s in zip(prompts, params, strict=True)]
        together.generate(seqs)
        assert [seq.tokens[seq.prompt_tokens :] for seq in seqs] == alone
        for seq in seqs:
            together.finish(seq)


def test_going_on_reuses_and_changes_nothing() -> None:
    """A second turn computes the new ids alone, and gives what one long prompt gives."""
    model = TinyModel()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    warm = engine(model)
    seq = run(warm, PROMPT, params)
    warm.finish(seq)
    tokens = [*seq.tokens, 10, 257, *b"more", 258]
    sampled = [*seq.sampled, *[False] * 7]
    replies = []
    for on, reused in ((warm, len(seq.tokens) - 1), (engine(model), 0)):
        from chatkv.prefill import PrefillReport

        report = PrefillReport()
        again = on.add(tokens, sampled, params)
        for _ in on.prefill(again, report):
            pass
        assert report.reused == reused
        assert report.reused + report.computed == len(tokens)
        while not again.finished:
            on.step([again])
        replies.append(again.tokens)
        on.finish(again)
    assert replies[0] == replies[1]


def test_pages_come_back() -> None:
    model = TinyModel()
    on = engine(model, "tree:6", ("random",))
    for seed in range(5):
        reply(on, PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=25))
    assert on.pool.used == on.prefix.stats().pages
    on.prefix.clear()
    assert on.pool.used == 0


def test_eviction_changes_no_text() -> None:
    """A pool with hardly more room than one conversation evicts all the time."""
    model = TinyModel()
    small = Engine(model, EngineConfig(spec="none", pool_tokens=128), costs=COSTS)
    large = engine(model)
    for seed in range(6):
        prompt = [259, *np.random.default_rng(seed % 2).integers(0, 255, 40).tolist(), 258]
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30)
        assert reply(small, prompt, params) == reply(large, prompt, params)
    assert small.prefix.stats().evicted > 0


def test_stops() -> None:
    model = TinyModel()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=1)
    seq = run(engine(model), PROMPT, params)
    assert (seq.finish_reason, seq.num_generated) == ("length", 1)
    full = run(
        Engine(
            model, EngineConfig(spec="tree:5", drafters=("random",), context_limit=70), costs=COSTS
        ),
        PROMPT,
        SamplingParams(temperature=1.0, seed=1),
    )
    assert full.finish_reason in ("context_full", "stop")
    assert len(full.tokens) <= 70


def test_what_does_not_fit_is_said_before_anything_runs() -> None:
    on = engine(TinyModel())
    with pytest.raises(ContextFull, match="512"):
        on.add([1] * 512, [False] * 512, SamplingParams())
    with pytest.raises(UsageError):
        on.add([], [], SamplingParams())
    assert on.pool.used == 0


class Knows:
    """Guesses what is known to come."""

    name = "knows"

    def __init__(self, known: list[int]) -> None:
        self.known = known

    def follow(self, seq_id, tokens): ...
    def observe(self, seq_id, accepted): ...
    def drop(self, seq_id): ...

    def propose(self, contexts, max_rows):
        ((tokens, ahead),) = [(c.tokens, self.known[len(c.tokens) :][:5]) for c in contexts]
        parents = [0, *range(len(ahead))]
        return [DraftTree.of([tokens[-1], *ahead], parents, source=self.name)]


def test_a_reply_that_ends_inside_a_path_ends_there() -> None:
    """Nothing behind the end is kept, and what comes next is that of the last token."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40)
    known = run(engine(TinyModel()), PROMPT, params).tokens
    ends = [place for place in range(len(PROMPT) + 3, len(known)) if known[place] not in
            known[len(PROMPT) : place]]  # fmt: skip
    assert len(ends) > 3
    ends = ends[:4]
    for place in ends:
        found = []
        for spec in ("none", "tree:6"):
            on = engine(TinyModel(), spec)
            knows: Any = Knows(known)
            on.drafting.drafters = GuardedDrafters([knows], vocab_size=on.model.spec.vocab_size)
            seq = on.add(PROMPT, [False] * len(PROMPT), params)
            seq.eos_ids = frozenset({known[place]})
            for _ in on.prefill(seq):
                pass
            while not seq.finished:
                on.step([seq])
            found.append((seq.tokens, np.asarray(seq.last_logits).tobytes()))
            on.finish(seq)
            assert spec == "none" or (on.drafting.controller.stats.tau or 0) > 1.4
        assert found[0] == found[1]
        assert found[0][0] == known[: place + 1]
