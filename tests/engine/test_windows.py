"""Sliding windows through the engine: drafted = plain, batched = alone, resumed = never quit, and
what every window hides takes no page."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from fakes import TinyModel
from talk import COSTS, WORDS, Talk, engine, images, prompts

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ConfigError
from chatkv.forget import check_policy, parse_policy
from chatkv.kv.ops import Op
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from sessions.pages import SqlitePageStore

WINDOW = 24
KINDS: dict[str, tuple[int | None, ...]] = {
    "full": (),
    "all": (WINDOW, 17),
    "mixed": (None, WINDOW),
}
TURNS = 6


def tiny(kind: str, **spec: object) -> TinyModel:
    return TinyModel(
        windows=KINDS[kind], no_rebase="sliding-window layers" if KINDS[kind] else "", **spec
    )


@pytest.mark.parametrize(("kind", "spec"), [("all", "tree:7"), ("mixed", "chain:4")])
def test_drafted_is_plain(kind: str, spec: str) -> None:
    model, talks = tiny(kind), []
    for drafts in ("none", spec):
        on, talk = engine(model, drafts, context=512), Talk("error", tokens=20)
        talks.append(([talk.say(on, prompt) for prompt in prompts(TURNS)], talk.images))
    assert talks[0] == talks[1]
    assert max(model.rows) > 1
    assert sum(map(len, talks[0][0])) > 4 * WINDOW
    on, other = engine(tiny("full"), context=512), Talk("error", tokens=20)
    assert [other.say(on, prompt) for prompt in prompts(TURNS)] != talks[0][0]


@pytest.mark.parametrize(
    ("kind", "kept"), [*product(KINDS, ["pages"]), *product(["all"], ["half", "nothing"])]
)
def test_resumed_is_never_quit(kind: str, kept: str, tmp_path: Path) -> None:
    model = tiny(kind)
    on, talk = engine(model, context=512), Talk("error", tokens=20)
    never_quit = [talk.say(on, prompt) for prompt in prompts(TURNS)]
    again = Talk("error", tokens=20)
    for place, prompt in enumerate(prompts(TURNS)):
        path = tmp_path / (f"{place}.db" if kept == "nothing" else "kv.db")
        store = SqlitePageStore(path, model.identity(16), limit_bytes=1 << 30)
        if kept == "half" and place == 4:
            store.purge(again.ids, again.starts[3])
        on = engine(model, "tree:5", context=512, store=store, salt=store.salt)
        try:
            assert again.say(on, prompt) == never_quit[place]
        finally:
            on.close()
            store.close()
    assert again.images == talk.images
    if kept == "pages":
        last = again.reports[-1]
        assert last.reused > 4 * WINDOW, "more than was read"
        assert last.computed < 40
        assert last.verified is True
        assert all(report.restored_pages for report in again.reports[1:])
        read = 16 * last.restored_pages
        assert read < WINDOW + 32 if kind == "all" else read > last.reused - 16


@pytest.mark.parametrize(("kind", "disk"), [("all", True), ("all", False), ("mixed", True)])
def test_an_earlier_turn_is_found_on_disk_or_computed_again(
    kind: str, disk: bool, tmp_path: Path
) -> None:
    """Its pages left a small pool long ago."""
    model = tiny(kind)
    store = SqlitePageStore(tmp_path / "kv.db", model.identity(16), limit_bytes=1 << 30)
    config = EngineConfig(context_limit=512, pool_tokens=96 if kind == "all" else 512)
    on = Engine(model, config, costs=COSTS, store=store if disk else None, salt=store.salt)
    talk = Talk("error", tokens=20)
    for prompt in prompts(TURNS):
        talk.say(on, prompt)
    if kind == "mixed":
        on.prefix.clear()
    stop = talk.starts[4]
    texts = []
    for where in (on, engine(model, context=512)):
        ids = [*talk.ids[:stop], 257, *b"and now something else", 258]
        sampled = [*talk.sampled[:stop], *[False] * (len(ids) - stop)]
        seq = where.add(ids, sampled, SamplingParams(temperature=1.0, seed=3, max_tokens=20))
        report = PrefillReport()
        for _ in where.prefill(seq, report):
            pass
        while not seq.finished:
            where.step([seq])
        texts.append((seq.tokens, images(where, seq)))
        if where is on:
            assert (report.restored_pages > 0) == disk
            assert report.reused + report.computed == len(ids)
            assert report.reused > stop - 32 if disk else report.computed > WINDOW
        where.finish(seq)
    assert texts[0] == texts[1]
    on.close()
    store.close()


def test_a_long_conversation_holds_as_many_pages_as_its_window() -> None:
    """Ten windows long, in a pool of seven pages; while it is read, written, and taken up again."""
    model = tiny("all")
    config = EngineConfig(spec="tree:7", drafters=("ngram",), context_limit=512, pool_tokens=80)
    on = Engine(model, config, costs=COSTS, guard=False)
    most = WINDOW // 16 + 2  # and one that a tree begins
    ids = [259, *(WORDS * 10)[: 6 * WINDOW]]
    flags = [False] * len(ids)
    held: list[int] = []
    for turn in range(3):
        seq = on.add(ids, flags, SamplingParams(seed=turn, max_tokens=WINDOW + 9))
        report = PrefillReport()
        for _ in on.prefill(seq, report):
            held.append(len(seq.table.pages))
        assert not turn or report.reused > len(ids) - 32, "a turn goes on from what it sees"
        while not seq.finished:
            on.step([seq])
            held.append(len(seq.table.pages))
        on.finish(seq)
        ids, flags = [*seq.tokens, *b" go on"], [*seq.sampled, *[False] * 6]
    assert len(ids) > 10 * WINDOW
    assert max(held) <= most, held
    assert set(held[-WINDOW:]) <= {most - 2, most - 1, most}
    assert on.gauges().used_bytes == 0


def test_what_a_turn_would_cost_counts_what_its_window_holds(tmp_path: Path) -> None:
    model = tiny("all")
    store = SqlitePageStore(tmp_path / "kv.db", model.identity(16), limit_bytes=1 << 30)
    on = engine(model, context=512, store=store, salt=store.salt)
    talk = Talk("error", tokens=20)
    for prompt in prompts(TURNS):
        talk.say(on, prompt)
    most = WINDOW // 16 + 2
    for ops in ([], [Op(len(talk.ids) - 9, ((20, 40), (len(talk.ids) - 30, len(talk.ids) - 20)))]):
        seq = on.add(talk.ids, talk.sampled, SamplingParams(max_tokens=1), ops=ops)
        on.generate([seq])
        on.finish(seq)
        seen, price = (look(talk.ids, talk.sampled, ops=ops) for look in (on.preview, on.price))
        assert 0 < seen.pool_pages <= most + 1  # and the tail
        assert (seen.disk_pages, price.disk) == (0, 0)
        assert seen.computed_tokens <= 16
        assert 0 < price.pool <= 16 * most
        assert price.computed <= 1
    assert on.saver is not None
    on.saver.flush(5)
    on.prefix.clear()
    seen, price = on.preview(talk.ids, talk.sampled), on.price(talk.ids, talk.sampled)
    assert 0 < seen.disk_pages <= most
    assert seen.disk_bytes == on.pool.payload_bytes(price.disk)
    assert (price.pool, price.disk > WINDOW - 16, price.computed < 16) == (0, True, True)
    store.purge(talk.ids, 0)
    assert on.preview(talk.ids, talk.sampled).computed_tokens == len(talk.ids)
    assert on.price(talk.ids, talk.sampled).computed == len(talk.ids)
    on.close()
    store.close()


def test_where_a_layer_sees_all_no_page_goes() -> None:
    on = engine(tiny("mixed"), context=512)
    seq = on.add([259, *WORDS * 4], [False] * (1 + 4 * len(WORDS)), SamplingParams(max_tokens=5))
    on.generate([seq])
    assert seq.table.gone == 0
    assert len(seq.table.pages) == on.pool.pages_for(seq.table.length)


@pytest.mark.parametrize("kind", ["all", "mixed"])
def test_batched_is_alone(kind: str) -> None:
    """Behind, within and before the first window; one of them forgot."""
    model = tiny(kind)
    paths: list[tuple[list[int], list[Op]]] = [
        ([259, *b"hello", 258], []),
        ([259, *WORDS, *WORDS, 258], [Op(60, ((3, 21), (40, 48))), Op(100, ((90, 95),))]),
        ([259, *WORDS * 4, 258], []),
    ]

    def add(on: Engine, index: int):
        ids, ops = paths[index]
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=30 + index)
        return on.add(ids, [False] * len(ids), params, ops=ops)

    alone = []
    for index in range(3):
        on = engine(model, context=384)
        seq = add(on, index)
        on.generate([seq])
        alone.append((seq.tokens, images(on, seq)))
    for spec in ("none", "tree:4"):
        on = engine(model, spec, context=384)
        seqs = [add(on, index) for index in range(3)]
        on.generate(seqs)
        assert [(seq.tokens, images(on, seq)) for seq in seqs] == alone


@pytest.mark.parametrize("kind", ["all", "mixed"])
@pytest.mark.parametrize("policy", ["turns", "oldest:limit_tokens=100,drop_tokens=24,edge=token"])
def test_a_path_that_forgets_resumes_with_windows(kind: str, policy: str, tmp_path: Path) -> None:
    model = tiny(kind, context_limit=160)
    on, talk = engine(model), Talk(policy, tokens=20)
    never_quit = [talk.say(on, prompt) for prompt in prompts(TURNS)]
    assert any(op.restart for op in talk.ops), "positions never ran out"
    assert not any(op.rebase for op in talk.ops)
    again = Talk(policy, tokens=20)
    store = SqlitePageStore(tmp_path / "kv.db", model.identity(16), limit_bytes=1 << 30)
    for place, prompt in enumerate(prompts(TURNS)):
        on = engine(model, "tree:5", store=store, salt=store.salt)
        assert again.say(on, prompt) == never_quit[place]
        on.close()
    store.close()
    assert again.ops == talk.ops
    assert again.images == talk.images
    assert sum(report.reused > 0 for report in again.reports) > TURNS // 2


def test_positions_cannot_move_where_a_layer_has_a_window() -> None:
    for kind in ("all", "mixed"):
        on = engine(tiny(kind))
        with pytest.raises(ConfigError, match="has sliding-window layers, so positions cannot"):
            on.add([1] * 50, [False] * 50, SamplingParams(), ops=[Op(40, ((4, 20),), rebase=True)])
        with pytest.raises(ConfigError, match="but the model has sliding-window layers"):
            check_policy(parse_policy("window:window_tokens=64"), on.limits())
