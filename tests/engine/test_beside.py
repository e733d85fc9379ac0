"""A tree that nobody has seen runs with an n-gram's guesses behind it: the same text and pages."""

# The tiny model is a model for the tests.
# pyright: reportArgumentType=false

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.kv.pool import PagePool
from chatkv.models.logits import HostLogits
from chatkv.models.tree_rows import TreeRows
from chatkv.sampling import SamplingParams
from chatkv.spec import drafters
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters.heads import HeadsDrafter
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree

ROWS, DEPTH = 16, 4
COSTS = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.02}
PROMPT = [5, 6, 7, 8] * 6


class Device(TinyModel):
    """Takes a grown tree's rows from where the grower left them, and leaves the others'."""

    def step(self, batch: Any, pool: PagePool) -> HostLogits:
        if (grown := batch.grown) is not None:
            size, tokens, positions = len(grown.tokens), batch.tokens.copy(), batch.positions.copy()
            words = torch.zeros(len(tokens), 1, dtype=torch.int64)
            if batch.call.ancestors is not None:
                words[:] = batch.call.ancestors
            assert (len(tokens) > size) == (batch.call.ancestors is not None)
            tokens[:size], positions[:size] = grown.tokens, grown.positions
            words[:size] = grown.ancestors
            call = replace(batch.call, ancestors=words)
            batch = replace(batch, tokens=tokens, positions=positions, call=call)
        return super().step(batch, pool)


class Grower:
    """Some of what comes, and guesses at random."""

    depth = DEPTH

    def __init__(self, text: list[int]) -> None:
        self.text, self.draw = text, random.Random(0)
        self.rows = TreeRows.empty(ROWS, torch.device("cpu"))
        self.tree = DraftTree.root(0)

    def launch(self) -> None:
        """As soon as the host says for what; see `Heads`."""

    def read(self) -> tuple[list[int], list[int], list[float]]:
        tree = self.tree
        return tree.tokens.tolist(), tree.parents.tolist(), tree.chance.tolist()

    def grow(self, taps: Any, root: int, position: int, **_: Any) -> Any:
        self.make(root, position - 1)
        return self.read()

    def make(self, root: int, place: int) -> None:
        tokens, parents, depths, row = [root], [0], [0], 0
        for token in self.text[place + 1 : place + 1 + self.draw.randrange(DEPTH + 1)]:
            tokens, parents = [*tokens, token], [*parents, row]
            depths, row = [*depths, depths[row] + 1], len(parents) - 1
        while len(tokens) < ROWS:
            parent, token = self.draw.randrange(len(tokens)), self.draw.randrange(250)
            if depths[parent] < DEPTH and (parent, token) not in zip(parents, tokens, strict=True):
                tokens, parents = [*tokens, token], [*parents, parent]
                depths = [*depths, depths[parent] + 1]
        self.tree = tree = DraftTree.of(tokens, parents)
        self.rows.tokens.copy_(torch.from_numpy(tree.tokens.copy()))
        self.rows.positions.copy_(torch.tensor(tree.depths, dtype=torch.int32) + place)
        self.rows.ancestors.copy_(torch.from_numpy(tree.ancestors())[:, None])


class Heads(HeadsDrafter):
    def grown(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        grower: Any = self.grower
        grower.make(context.tokens[-1], len(context.tokens) - 1)
        return super().grown(context, max_rows)


def play(engine: Engine, temperature: float) -> tuple[list[int], torch.Tensor]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=90)
    seq = engine.add(PROMPT, [False] * len(PROMPT), params)
    seq.eos_ids = frozenset()
    engine.generate([seq])
    slots = torch.from_numpy(seq.table.slots(0, seq.table.length))
    size = engine.pool.page_size
    rows = engine.pool.data[:, slots // size, :, :, slots % size].clone()
    engine.finish(seq)
    return seq.tokens, rows


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("spec", ["tree:31", "tree:20", "tree:15", "auto"])
def test_drafted_is_plain(temperature: float, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    none = EngineConfig(spec="none", drafters=(), context_limit=256)
    expected, plain = play(Engine(Device(), none, costs=COSTS), temperature)

    def heads(means: drafters.DraftMeans) -> HeadsDrafter:
        grower: Any = Grower(expected)
        return Heads(grower, (1, 2), grower)

    monkeypatch.setitem(drafters.DRAFTERS, "heads", heads)
    config = EngineConfig(spec=spec, drafters=("ngram", "heads"), context_limit=256)
    model = Device()
    engine = Engine(model, config, costs=COSTS, guard=False)
    ran: list[tuple[int, tuple[int, ...]]] = []
    accept = engine._accept

    def watched(seq: Any, tree: Any, result: Any, first: int) -> Any:
        gained = accept(seq, tree, result, first)
        if isinstance(tree, GrownTree):
            ran.append((len(tree), gained.rows))
        return gained

    monkeypatch.setattr(engine, "_accept", watched)
    got, drafted = play(engine, temperature)
    assert not engine.drafting.drafters.failures
    assert got == expected
    assert torch.equal(drafted, plain)
    assert {size for size, _ in ran} >= {ROWS}
    went = [rows[-1] >= ROWS for size, rows in ran if size > ROWS]
    assert bool(went) == (spec != "tree:15")
    if spec in ("tree:31", "auto") and temperature == 0:
        assert any(went)
        assert spec == "auto" or not all(went)
