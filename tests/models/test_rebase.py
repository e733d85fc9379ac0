"""Positions that run out, on a model with rotary keys: stored keys are turned once, by the whole
way, and what holds without that holds with it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from talk import Talk, engine, prompts

from chatkv.attention.reference import dequantise
from chatkv.kv.ops import Op, next_position
from chatkv.kv.rebase import turn_page
from chatkv.models.decoder import Decoder
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from sessions.pages import SqlitePageStore


@pytest.fixture
def short(tiny: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A model that was trained for 112 positions."""
    monkeypatch.setattr(tiny, "spec", replace(tiny.spec, context_limit=112))
    return tiny


@pytest.mark.parametrize("policy", ["turns:low=0.6,keep_last=1", "window:window_tokens=64"])
def test_drafted_is_plain_and_resumed_never_quit(
    policy: str, short: Decoder, tmp_path: Path
) -> None:
    talks = []
    for kind in ("none", "tree:6", "resumed", "replayed"):
        talk, replies = Talk(policy), []
        on = engine(short, kind if kind[0] in "nt" else "none")
        for place, prompt in enumerate(prompts(7)):
            if kind[0] == "r":
                path = tmp_path / ("kv.db" if kind == "resumed" else f"{place}.db")
                identity = short.identity(16)
                with closing(SqlitePageStore(path, identity, limit_bytes=1 << 30)) as store:
                    on = engine(short, store=store, salt=store.salt)
                    replies.append(talk.say(on, prompt))
                    on.close()
                continue
            replies.append(talk.say(on, prompt))
        talks.append((replies, talk.ops, talk.images))
        assert sum(op.rebase for op in talk.ops) > 1
        assert next_position(talk.ops, len(talk.ids)) <= 112
        if kind == "resumed":
            assert any(report.verified for report in talk.reports)
            assert talk.reports[-1].computed < 60
    assert talks[0] == talks[1] == talks[2] == talks[3]


def test_keys_are_turned_from_what_was_stored(short: Decoder) -> None:
    """Ten rebases are one: each page in sight is its original, turned by the sum."""
    on = engine(short, context=160)
    ids = [5 + i % 90 for i in range(108)]
    ops = [Op(50 + 6 * i, ((16 + 2 * i, 18 + 2 * i),), rebase=True) for i in range(10)]
    seq = on.add(ids, [False] * 108, SamplingParams(max_tokens=1), ops=ops)
    for _ in on.prompts.fill(seq, PrefillReport()):
        pass
    turned = 0
    for entry, span in enumerate(seq.table.stage.spans):
        if entry in seq.table.originals:
            (page,) = on.pool.take()
            frequencies = short.spec.rope_frequencies
            source = seq.table.originals[entry]
            turn_page(on.pool, source, page, span.shift - span.own, frequencies)
            rows = [on.pool.image(one, span.hi) for one in (page, seq.table.pages[entry])]
            assert rows[0] == rows[1]
            on.pool.release(page)
            turned += 1
    assert turned > 3
    # Each page in sight, its original, and no more: the pool has room for two contexts.
    assert on.pool.num_pages - on.pool.free - on.prefix.stats().reclaimable <= 2 * len(
        seq.table.pages
    )


@pytest.mark.parametrize(("kv", "limit"), [("bf16", 6e-3), ("int8", 3e-2)])
def test_a_turned_key_is_the_key_of_that_position(short: Decoder, kv: str, limit: float) -> None:
    """In the first layer a key depends on its id and position alone."""
    on = engine(short, kv=kv)
    ids = list(range(20, 84))
    seq = on.add(ids, [False] * 64, SamplingParams(max_tokens=1))
    for _ in on.prompts.fill(seq, PrefillReport()):
        pass
    other = on.add(ids[48:], [False] * 16, SamplingParams(max_tokens=1))
    for _ in on.prompts.fill(other, PrefillReport()):
        pass
    (page,) = on.pool.take()
    turn_page(on.pool, seq.table.pages[3], page, 48, short.spec.rope_frequencies)
    rows, scales = on.pool.layers[0]
    places = (page, other.table.pages[0])
    found, expected = (
        dequantise(rows[at], None if scales is None else scales[at], torch.float32) for at in places
    )
    size = expected[0].norm(dim=-1)
    # Two roundings instead of one.
    assert ((found[0] - expected[0]).norm(dim=-1) / size).max() < limit
    assert torch.equal(found[1], expected[1])
