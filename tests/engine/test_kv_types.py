"""Every way to hold keys and values: drafted = plain, batched = alone, resumed = never quit."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ConfigError
from chatkv.kv.format import KVFormat
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from sessions.pages import SqlitePageStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
KINDS = [("int8", ()), ("int4", ()), ("int4", (2,))]
PROMPT = [259, *b"the cat sat on the mat, the cat sat on the mat, the ", 258]


def engine(kind: tuple[str, tuple[int, ...]], spec: str = "none", **options) -> Engine:
    config = EngineConfig(
        spec=spec, drafters=("ngram", "random"), kv_dtype=kind[0], keep_layers=kind[1]
    )
    return Engine(TinyModel(), config, costs=COSTS, guard=False, **options)


def run(on: Engine, tokens: list[int], params: SamplingParams) -> tuple[Sequence, PrefillReport]:
    report = PrefillReport()
    seq = on.add(tokens, [False] * len(tokens), params)
    for _ in on.prefill(seq, report):
        pass
    while not seq.finished:
        on.step([seq])
    return seq, report


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_drafted_pages_are_plain_pages(kind):
    for seed in range(3):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=50)
        found = []
        for on in (engine(kind), engine(kind, "tree:9")):
            seq, _ = run(on, PROMPT, params)
            slots = seq.table.slots(0, seq.table.length)
            found.append((seq.tokens, [on.pool.row(slot).tolist() for slot in slots]))
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batched_is_alone(kind):
    prompts = [PROMPT, [259, *b"hello", 258], [259, *range(100), 258]]
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=20 + s) for s in range(3)]
    alone = [run(engine(kind), p, s)[0].tokens for p, s in zip(prompts, params, strict=True)]
    on = engine(kind, "tree:4")
    seqs = [on.add(p, [False] * len(p), s) for p, s in zip(prompts, params, strict=True)]
    on.generate(seqs)
    assert [seq.tokens for seq in seqs] == alone


class Program:
    """An engine over the kv.db of a folder; each `with` is a process of its own."""

    def __init__(self, kind: tuple[str, tuple[int, ...]], folder: Path) -> None:
        identity = TinyModel().identity(16, KVFormat(*kind))
        self.pages = SqlitePageStore(folder / "kv.db", identity, limit_bytes=1 << 30)
        self.engine = engine(kind, "tree:5", store=self.pages, salt=self.pages.salt)

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.pages.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_resumed_is_never_quit_and_formats_share_nothing(kind, tmp_path: Path):
    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=4, max_tokens=count)

    never, _ = run(engine(kind), PROMPT, params(45))
    with Program(("int8", (1,)), tmp_path) as on:
        on.finish(run(on, PROMPT, params(30))[0])
    with Program(kind, tmp_path) as on:
        half, report = run(on, PROMPT, params(20))
        assert (report.reused, report.restored_pages) == (0, 0)
        on.finish(half)
    with Program(kind, tmp_path) as on:
        report = PrefillReport()
        seq = on.add(half.tokens, half.sampled, params(25))
        for _ in on.prefill(seq, report):
            pass
        assert report.restored_pages == len(half.tokens) // 16 + 1
        assert report.verified is True
        while not seq.finished:
            on.step([seq])
        assert seq.tokens == never.tokens


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="int3"):
        engine(("int3", ()))
    with pytest.raises(ConfigError, match="layer 3 of 2"):
        engine(("int8", (3,)))
    with pytest.raises(ConfigError, match="nothing with bf16"):
        engine(("bf16", (1,)))
