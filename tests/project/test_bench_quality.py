"""`bench quality` on the tiny model: what it says, and that it can say no."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import TinyModel

from chatkv.forget import Limits
from chatkv.kv.format import KVFormat
from chatkv.models.logits import HostLogits
from sessions.bench import quality, quality_forget
from sessions.bench.quality import Request, measure
from sessions.bench.quality_forget import measure_policy
from sessions.bench.quality_texts import needles


class Leaky(TinyModel):
    """Its rows depend on how many there are."""

    def step(self, batch: Any, pool: Any) -> HostLogits:
        result = super().step(batch, pool)
        result.logits = result.logits + 1e-3 * (len(batch.tokens) > 1)
        return result


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    def report(model: TinyModel, **options: Any) -> quality.Report:
        monkeypatch.setattr(quality, "load_model", lambda *_, **__: (model, ""))
        request = Request(("int8", "int4"), needle_lengths=(256,), needles=2, **options)
        return measure(None, request)  # type: ignore[arg-type]

    return report


def test_fewer_bits_lose_more_and_company_changes_nothing(run):
    report = run(TinyModel(), tokens=96)
    plain, int8, int4 = report.rows
    assert (plain.kl, plain.top1, plain.tokens_per_byte) == (0, 1, 1)
    assert 0 < int8.kl < int4.kl
    assert int8.tokens_per_byte > 3.5  # the tiny model's own rows are float32
    assert report.differing == 0
    assert report.tokens == 288
    assert set(plain.needles) == {"256"}


def test_bits_that_depend_on_company_are_found(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, " * 4)
    report = run(Leaky(), texts=(text,), tokens=64)
    assert report.differing > 0
    assert report.policies == []


def test_what_a_policy_forgets_is_compared_with_all_in_sight(monkeypatch):
    monkeypatch.setattr(quality_forget, "SCORED", 20)
    model: Any = TinyModel()
    reader = quality.Reader(model, KVFormat(), 600)
    limits = Limits(context=150, reserve=20, trained=512, page_tokens=16)
    talks = [([(7 * i) % 250 for i in range(300)], [10, 50, 90, 130, 170, 210, 250])]
    for policy in ("turns", "oldest:limit_tokens=150,drop_tokens=40", "window"):
        row = measure_policy(
            policy, talks, limits, reader.read, reader.store, lambda: reader.tables(1)[0]
        )
        assert row is not None
        assert row.forgotten > 0
        assert 0 < row.in_sight <= 150
        assert row.kl > 0
    assert reader.pool.used == 0


def test_needles_lie_in_a_text_of_that_length():
    tokenizer: Any = TinyModel().tokenizer
    text = needles(tokenizer, 1000, 5)
    assert 1000 <= len(text.ids) < 1100
    shown = tokenizer.decode(text.ids)
    for question, answer in text.asked:
        assert tokenizer.decode([*question, *answer]) in shown
