"""Steps that begin while the tokens of the one in front are not here yet: the text is the same."""

# The tiny model is a model for the tests.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.kv.ops import Op
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence as Path
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.ahead import Ahead
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.drafting import Drafting
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree

pytest.importorskip("triton")
from chatkv.models.graphs import Bucket
from chatkv.models.step_graphs import Flight

ROWS, DEPTH = 16, 3
COSTS = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.02, 32: 1.1}
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6] * 3


class Grower:
    """Where a tree lies; what it is, whoever takes it says."""

    depth = DEPTH

    def __init__(self) -> None:
        self.rows: Any = SimpleNamespace(tokens=np.zeros(ROWS, np.int32), depths=[], words=None)
        self.tree = DraftTree.root(0)

    def read(self) -> tuple[list[int], list[int], list[float]]:
        return self.tree.tokens.tolist(), self.tree.parents.tolist(), self.tree.chance.tolist()


class Copier:
    """A head that copies what came behind its token before, begun behind each step."""

    name, taps, tap_rows, reads_late = "heads", (1,), 1, False

    def __init__(self) -> None:
        self.grower = Grower()
        self._ahead = Ahead(self.grower)

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.void(seq_id)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.root(context.tokens[-1]) for context in contexts]

    def read(self, seq_id: int, start: int, features: Any) -> None: ...
    def catch_up(self, seq_id: int, tokens: Sequence[int]) -> None: ...
    def missing(self, seq_id: int) -> None: ...
    def owed(self, seq_id: int, first: int, stop: int) -> None: ...

    def ahead(self, seq_id: int) -> Callable[[], None]:
        return lambda: self._ahead.begin(seq_id, lambda: None)

    def pass_by(self, seq_id: int, *, soon: bool) -> None: ...
    def clear(self) -> None: ...

    def begun(self, seq_id: int) -> Any:
        return self._ahead.begun(seq_id)

    def grown(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        tree = self._ahead.take(context, max_rows)
        if tree is not None:
            ids = list(context.tokens)
            place = next((i for i in range(len(ids) - 2, -1, -1) if ids[i] == ids[-1]), None)
            path = [] if place is None else ids[place + 1 : place + 1 + DEPTH]
            rest = [token for token in range(40) if token not in path][: ROWS - 1 - len(path)]
            parents = [*range(len(path)), *[0] * len(rest)]
            grown = DraftTree.of([ids[-1], *path, *rest], [0, *parents])
            self.grower.tree, rows = grown, self.grower.rows
            rows.tokens, rows.depths, rows.words = grown.tokens, grown.depths, grown.ancestors()
        return tree

    def void(self, seq_id: int) -> None:
        self._ahead.void(seq_id)

    def has_read(self, seq_id: int) -> bool:
        return self._ahead.is_launched(seq_id)

    def observe(self, seq_id: int, accepted: Any) -> None:
        self._ahead.observe(seq_id)

    def drop(self, seq_id: int) -> None:
        self.void(seq_id)


class Runner(TinyModel):
    """Runs a step that was begun as it was begun: with its own slots, pages and length."""

    max_step_rows = 64

    def __init__(self) -> None:
        super().__init__()
        self.flight: Flight | None = None
        self.was_begun = False
        self.wanted: list[bool] = []

    def run_on(self, batch: Any, pool: Any) -> None:
        assert len(batch.slots) == ROWS + DEPTH + 1
        step: Any = SimpleNamespace(bucket=Bucket.of(batch))
        self.flight = Flight(step, batch, pool.page_size)

    def step(self, batch: Any, pool: Any) -> Any:
        flight, self.flight = self.flight, None
        self.was_begun = flight is not None and flight.is_for(batch)
        if flight is not None:
            self.wanted.append(self.was_begun)
        if flight is not None and self.was_begun:
            mine, kept = flight.batch, batch.call.kv_len_host[0] - flight.batch.call.kv_len_host[0]
            call = replace(mine.call, kv_len=mine.call.kv_len + kept, kv_len_host=(
                mine.call.kv_len_host[0] + kept,))  # fmt: skip
            batch = replace(mine, slots=mine.slots[kept : kept + ROWS], call=call)
        if batch.grown is not None:
            batch = self._seen(batch)
        return super().step(batch, pool)

    def _seen(self, batch: Any) -> Any:
        """With the tree that lies on the device in place of zeros."""
        rows, size = batch.grown, len(batch.grown.tokens)
        first = batch.call.kv_len_host[0] - len(batch.tokens)
        tokens, positions = batch.tokens.copy(), batch.positions.copy()
        tokens[:size] = rows.tokens
        positions[:size] = np.array(rows.depths) + first - self._hidden
        words = np.zeros(len(tokens), np.int64)
        if batch.call.ancestors is not None:
            words[:] = batch.call.ancestors.numpy()[:, 0]
        words[:size] = rows.words
        call = replace(batch.call, ancestors=torch.from_numpy(words[:, None]))
        return replace(batch, tokens=tokens, positions=positions, call=call)

    _hidden = 0
    """Slots before a row over its position: of the sequence that runs."""


def drafting(model: Runner, mode: str = "tree:15", ngram: bool = False, **config: Any) -> Engine:
    settings = EngineConfig(spec=mode, drafters=("ngram",), **{"context_limit": 192, **config})
    engine = Engine(model, settings, costs=COSTS, guard=False)
    own = [NgramDrafter()] if ngram else []
    drafters = GuardedDrafters([*own, Copier()], vocab_size=model.spec.vocab_size)
    engine.drafting = Drafting(drafters, engine.costs, mode, guard=False)
    return engine


def plain(**config: Any) -> Engine:
    settings = EngineConfig(spec="none", drafters=(), **{"context_limit": 192, **config})
    return Engine(TinyModel(), settings, costs=COSTS, guard=False)


def reply(
    engine: Engine,
    temperature: float = 0.7,
    each: Callable[[Engine, Path], None] = lambda *_: None,
    max_tokens: int = 60,
    held: int = 0,
    **about: Any,
) -> list[int]:
    """Its ids. So many pages are held by others."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=max_tokens)
    seq = engine.add(PROMPT, [False] * len(PROMPT), params, **about)
    seq.eos_ids = frozenset()
    for _ in engine.prefill(seq):
        pass
    while not seq.finished:
        each(engine, seq)
        if isinstance(engine.model, Runner):
            engine.model._hidden = seq.table.length - seq.table.position
        engine.step([seq])
    engine.finish(seq)
    assert not engine.drafting.drafters.failures
    assert engine.pool.used == len(engine.prefix) + held
    return seq.tokens


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("mode", ["tree:15", "tree:40", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_reply_is_the_plain_one(temperature: float, mode: str, ngram: bool) -> None:
    model = Runner()
    assert reply(drafting(model, mode, ngram), temperature) == reply(plain(), temperature)
    if not ngram and mode != "auto":  # which goes by the clock
        assert all(model.wanted)
        assert len(model.wanted) > 5


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 23])
def test_nothing_is_begun_that_the_end_may_cut(max_tokens: int) -> None:
    model = Runner()
    ids = reply(drafting(model), max_tokens=max_tokens)
    assert ids == reply(plain(), max_tokens=max_tokens)
    assert all(model.wanted)
    assert model.flight is None


def test_behind_what_was_forgotten() -> None:
    model, ops = Runner(), (Op(20, ((4, 12),)),)
    assert reply(drafting(model), ops=ops) == reply(plain(), ops=ops)
    assert sum(model.wanted) > 5


def test_a_step_that_is_not_wanted_is_dropped() -> None:
    """Another sequence in between, a step with no guess, and pages that others took."""
    turns = [0]

    def meddle(engine: Engine, seq: Path) -> None:
        turns[0] += 1
        if turns[0] % 3 == 0:
            other = engine.add([9, 9, 4], [False] * 3, SamplingParams(seed=1, max_tokens=4))
            for _ in engine.prefill(other):
                pass
            engine.step([other])
            engine.finish(other)
        if turns[0] % 5 == 0:
            is_on = engine.drafting.controller.mode != "none"
            engine.drafting.set_mode("none" if is_on else "tree:15")
        if turns[0] % 4 == 0:
            engine.pool.release(engine.pool.take(1)[0])
            page, other_page = engine.pool.take(2)
            engine.pool.release(page)
            engine.pool.release(other_page)

    model = Runner()
    assert reply(drafting(model), 0.7, meddle) == reply(plain(), 0.7)
    assert False in model.wanted


def test_no_page_is_taken_for_it_from_others() -> None:
    """Where the last pages are in use, a step begins when its turn comes."""
    model = Runner()
    engine = drafting(model, context_limit=96, pool_tokens=96)
    spare = engine.pool.take(engine.pool.free - engine.pool.pages_for(96))
    try:
        engine.pool.reclaim = lambda _: pytest.fail("a page was reclaimed for a guess")
        assert reply(engine, max_tokens=50, held=len(spare)) == reply(
            plain(context_limit=96), max_tokens=50
        )
    finally:
        for page in spare:
            engine.pool.release(page)


def test_a_step_goes_for_no_other_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Flight, Any]] = []
    is_for = Flight.is_for
    monkeypatch.setattr(
        Flight, "is_for", lambda own, batch: seen.append((own, batch)) or is_for(own, batch)
    )
    reply(drafting(Runner()))
    for flight, batch in seen:
        call = batch.call
        assert is_for(flight, batch)
        table, length = call.page_table.clone(), call.kv_len + 1
        table[0, 0] += 1
        longer = replace(call, kv_len=length, kv_len_host=tuple(length.tolist()))
        for other in (
            replace(batch, slots=batch.slots + 1),
            replace(batch, call=replace(call, page_table=table)),
            replace(batch, call=longer),
            replace(batch, grown=None),
            replace(batch, grown=SimpleNamespace(tokens=batch.grown.tokens)),
        ):
            assert not is_for(flight, other)
    assert len(seen) > 5
