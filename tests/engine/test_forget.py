"""A path that forgets: drafted = plain, batched = alone, resumed = never quit, recalled = never
forgotten; and what the model does not see is what was said, no more and no less."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fakes import TinyModel
from talk import WORDS, Talk, engine, images, prompts

from chatkv.engine import Engine
from chatkv.errors import ConfigError, ContextFull, UsageError
from chatkv.kv.ops import Op, live_ranges, num_live
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence as Seq
from sessions.pages import SqlitePageStore

POLICIES = [
    "turns",
    "turns:low=0.5,keep_last=0",
    "oldest:limit_tokens=100,drop_tokens=24,edge=token,keep_last=1",
    "window:window_tokens=64",
]


def tiny(policy: str) -> TinyModel:
    """Where positions run out it begins anew, which a window cannot."""
    return TinyModel(context_limit=4096 if policy.startswith("window") else 256)


@pytest.mark.parametrize(
    ("policy", "spec"), [*product(POLICIES, ["tree:7"]), (POLICIES[-1], "chain:4")]
)
def test_drafted_is_plain(policy: str, spec: str) -> None:
    model = tiny(policy)
    talks = []
    for kind in ("none", spec):
        on, talk = engine(model, kind), Talk(policy, tokens=28)
        replies = [talk.say(on, prompt) for prompt in prompts(7)]
        talks.append((replies, talk.ops, talk.images))
    assert talks[0] == talks[1]
    assert len(talks[0][1]) > 1
    assert max(model.rows) > 1


@pytest.mark.parametrize(
    ("policy", "kept"),
    [*product(POLICIES[1:], ["pages", "nothing"]), (POLICIES[0], "half"), (POLICIES[-1], "half")],
)
def test_resumed_is_never_quit(policy: str, kept: str, tmp_path: Path) -> None:
    model = tiny(policy)
    on, talk = engine(model), Talk(policy)
    never_quit = [talk.say(on, prompt) for prompt in prompts(7)]
    again = Talk(policy)
    for place, prompt in enumerate(prompts(7)):
        path = tmp_path / (f"{place}.db" if kept == "nothing" else "kv.db")
        store = SqlitePageStore(path, model.identity(16), limit_bytes=1 << 30)
        if kept == "half" and place == 4:
            store.purge(again.ids[: again.starts[-1]], again.starts[2])
        on = engine(model, "tree:5", store=store, salt=store.salt)
        try:
            assert again.say(on, prompt) == never_quit[place]
        finally:
            on.close()
            store.close()
    assert again.ops == talk.ops
    assert again.images == talk.images
    if kept == "pages":
        assert all(report.restored_pages for report in again.reports[1:])
        assert any(report.verified for report in again.reports)
        assert not any(report.verified is False for report in again.reports)
        # What is not in sight any more is not fetched, nor computed.
        assert again.reports[-1].restored_pages * 16 < len(again.ids)
        assert again.reports[-1].computed < 60


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recalled_is_never_forgotten(temperature: float) -> None:
    model = TinyModel()
    on, talk = engine(model, context=400), Talk("error", temperature=temperature)
    for prompt in prompts(3):
        talk.say(on, prompt)
    talk.ops = [Op(len(talk.ids), ((talk.starts[1], talk.starts[3]),))]
    forgetful = talk.say(on, prompts(4)[3])
    talk.ops = []
    recalled = talk.say(on, b"go on")
    other = Talk("error", temperature=temperature)
    other.ids, other.sampled = talk.ids[: talk.starts[-1]], talk.sampled[: talk.starts[-1]]
    other.starts = talk.starts[:-1]
    assert other.say(engine(model, context=400), b"go on") == recalled
    assert other.images == talk.images
    never = Talk("error", temperature=temperature)
    replies = [never.say(engine(model, context=400), prompt) for prompt in prompts(4)]
    assert replies[3] != forgetful, "forgetting changed nothing: the test shows nothing"


def test_batched_is_alone() -> None:
    model = TinyModel()
    paths: list[tuple[list[int], list[Op]]] = [
        ([259, *b"hello", 258], []),
        ([259, *WORDS, 258], [Op(40, ((3, 21),))]),
        ([259, *WORDS, *WORDS, 258], [Op(17, ((0, 1),)), Op(100, ((20, 80), (90, 95)))]),
    ]

    def add(on: Engine, index: int) -> Seq:
        ids, ops = paths[index]
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=30 + index)
        return on.add(ids, [False] * len(ids), params, ops=ops)

    alone = []
    for index in range(3):
        on = engine(model, context=192)
        seq = add(on, index)
        on.generate([seq])
        alone.append((seq.tokens, images(on, seq)))
    for spec in ("none", "tree:4"):
        on = engine(model, spec, context=192)
        seqs = [add(on, index) for index in range(3)]
        on.generate(seqs)
        assert [(seq.tokens, images(on, seq)) for seq in seqs] == alone
        for seq in seqs:
            on.finish(seq)


EDGES = [1, 15, 16, 17, 31, 32, 33]


@pytest.mark.parametrize("start", [0, *EDGES])
@pytest.mark.parametrize("stop", EDGES)
def test_logits_are_those_of_an_explicit_mask(start: int, stop: int) -> None:
    if not start < stop:
        return
    model = TinyModel()
    ids = [259, *WORDS]
    for at in {stop, stop + 1, 40, 48}:
        ops = [Op(at, ((start, stop),)), Op(at + 3, ((stop, stop + 2),) if at > stop + 1 else ())]
        on = engine(model)
        seq = on.add(ids, [False] * len(ids), SamplingParams(), ops=ops)
        parts = [part for part in on.prompts.fill(seq, PrefillReport()) if part is not None]
        expected = masked_logits(model, ids, ops)
        np.testing.assert_allclose(parts[-1], expected, rtol=2e-4, atol=2e-4)
        whole = masked_logits(model, ids, [])
        assert not np.allclose(parts[-1], whole, rtol=1e-2, atol=1e-2)


def masked_logits(model: TinyModel, ids: Sequence[int], ops: Sequence[Op]) -> np.ndarray:
    """[V] logits of the last id, without pages: every row attends under a mask written out."""
    spec, count = model.spec, len(ids)
    mask = np.full((count, count), -np.inf)
    for place in range(count):
        for start, stop in [*live_ranges(ops, place), (place, place + 1)]:
            mask[place, start:stop] = 0
    x = (model.embed[list(ids)] + model._where(np.arange(count))).astype(np.float64)
    for layer in range(spec.num_layers):
        q, k, v = model._split((x @ model.qkv[layer].T).astype(np.float64))
        k, v = k.repeat(spec.num_heads, 1), v.repeat(spec.num_heads, 1)
        scores = np.einsum("thd,lhd->htl", q, k) * spec.head_dim**-0.5 + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("htl,lhd->thd", weights, v).reshape(count, -1)
        x = x + np.tanh(out @ model.out[layer].T)
    return x[-1] @ model.head.T


def test_pages_are_given_back() -> None:
    on = engine(TinyModel(), context=192)
    ids = [259, *(WORDS + WORDS)]
    seq = on.add(ids, [False] * len(ids), SamplingParams(max_tokens=4), ops=[Op(100, ((16, 96),))])
    on.generate([seq])
    assert on.pool.used - on.prefix.stats().reclaimable == len(seq.table.pages)
    on.prefix.clear()
    # Page 0, what is left of page 6, and one page for what came since.
    assert on.pool.used == len(seq.table.pages) == 3
    on.finish(seq)
    on.prefix.clear()
    assert on.pool.used == 0


def test_a_long_window_is_bounded_and_keeps_its_pins() -> None:
    on, talk = engine(tiny("window")), Talk("window:window_tokens=64", tokens=20)
    talk.pins = {1}
    for prompt in prompts(25):
        talk.say(on, prompt)
        live = live_ranges(talk.ops, len(talk.ids))
        assert num_live(talk.ops, len(talk.ids)) <= 80
        assert live[0][0] == 0
        pinned = range(talk.starts[1], talk.starts[2] if len(talk.starts) > 2 else len(talk.ids))
        if len(talk.starts) > 2:
            assert all(any(a <= place < b for a, b in live) for place in pinned)
    assert len(talk.ids) > 7 * 80
    assert on.pool.used <= on.pool.num_pages


def test_a_preview_counts_what_is_in_sight() -> None:
    on, talk = engine(tiny("turns")), Talk("turns")
    for prompt in prompts(6):
        talk.say(on, prompt)
    assert talk.ops
    seen = on.preview(talk.ids, talk.sampled, ops=talk.ops)
    assert seen.computed_tokens <= 2
    assert seen.tokens == num_live(talk.ops, len(talk.ids)) < len(talk.ids)
    on.prefix.clear()
    assert on.preview(talk.ids, talk.sampled, ops=talk.ops).computed_tokens == len(talk.ids)


def test_what_does_not_fit_is_said() -> None:
    on = engine(TinyModel(), context=192)
    ids, flags = [1] * 150, [False] * 150
    with pytest.raises(UsageError, match="dropped twice"):
        on.add(ids, flags, SamplingParams(), ops=[Op(50, ((0, 9),)), Op(60, ((8, 12),))])
    with pytest.raises(UsageError, match="150"):
        on.add(ids, flags, SamplingParams(), ops=[Op(150, ((0, 9),))])
    with pytest.raises(ConfigError, match="learned positions"):
        on.add(ids, flags, SamplingParams(), ops=[Op(50, ((0, 9),), rebase=True)])
    with pytest.raises(ContextFull, match="192"):
        on.add([1] * 300, [False] * 300, SamplingParams(), ops=[Op(200, ((0, 50),))])
    with pytest.raises(ContextFull, match="512"):
        on.add([1] * 600, [False] * 600, SamplingParams(), ops=[Op(500, ((0, 490),))])
    assert on.pool.used == 0


def test_the_engine_sees_that_nothing_is_dropped_in_silence() -> None:
    on = engine(TinyModel())
    ids = [259, *WORDS]
    seq = on.add(ids, [False] * len(ids), SamplingParams())
    for _ in on.prefill(seq):
        pass
    seq.table.forget(Op(len(ids), ((1, 20),)))
    with pytest.raises(AssertionError, match="37 are seen and 0 forgotten"):
        on.step([seq])
