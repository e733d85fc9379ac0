"""Heads on a CUDA device: trees that run before the host has seen them change no text and no page.

Needs the default model, whose head ships.
"""

# ruff: noqa: E402

# Settings come as mappings, and loops run at least once.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import os
from functools import cache

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    if os.environ.get("CHATKV_REQUIRE") == "gpu":
        pytest.fail("CHATKV_REQUIRE=gpu, and torch sees no CUDA device", pytrace=False)
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.models import catalog
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.device_rows import DeviceRow
from chatkv.models.devices import load_model
from chatkv.noise import gumbel
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from chatkv.spec.drafters.heads import HeadsDrafter, find_heads, load_heads
from chatkv.spec.heads import file as head_file
from chatkv.spec.heads.device import GROWTH
from chatkv.spec.heads.grow import RecurrentCell, Vocabulary, grow
from chatkv.spec.heads.modules import RecurrentHead
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree

DEFAULT = next((row for row in catalog.list_models() if row.path), None)
if DEFAULT is None:
    pytest.skip("the default model is not here", allow_module_level=True)

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright. Then explain it again to a child.",
    "List the months of the year, and one holiday in each of them.",
)


@cache
def model() -> CudaDecoder:
    assert DEFAULT is not None
    found = load_model(catalog.find(DEFAULT.name), "cuda")[0]
    assert isinstance(found, CudaDecoder)
    return found


def begun(engine: Engine, text: str, params: SamplingParams) -> Sequence:
    tokenizer = engine.model.tokenizer
    ids = [*tokenizer.head_ids(), *tokenizer.user_ids(text, True)]
    seq = engine.add(ids, [False] * len(ids), params)
    for _ in engine.prefill(seq):
        pass
    return seq


def rows_of(engine: Engine, seq: Sequence) -> torch.Tensor:
    """[rows, L, 2, HK, D] what the sequence's pages hold."""
    slots = torch.from_numpy(seq.table.slots(0, seq.table.length))
    size = engine.pool.page_size
    return engine.pool.data[:, slots // size, :, :, slots % size].clone()


def play(engine: Engine, temperature: float) -> list[tuple[list[int], torch.Tensor]]:
    found = []
    for seed, text in enumerate(PROMPTS):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=90)
        seq = begun(engine, text, params)
        while not seq.finished:
            engine.step([seq])
        found.append((seq.tokens, rows_of(engine, seq)))
        engine.finish(seq)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafted_is_plain_ids_and_bytes(temperature: float, monkeypatch: pytest.MonkeyPatch):
    limit = {"context_limit": 1024, "pool_tokens": 2048}
    expected = play(
        Engine(model(), EngineConfig(spec="none", drafters=(), **limit), costs={1: 1.0}),
        temperature,
    )
    unseen = []
    settle = GrownTree.settle
    monkeypatch.setattr(GrownTree, "settle", lambda tree: unseen.append(tree) or settle(tree))
    for spec, names in (
        ("tree:15", ("heads",)),
        ("auto", ("auto",)),
        ("chain:3", ("heads",)),
    ):
        config = EngineConfig(spec=spec, drafters=names, **limit)
        engine = Engine(model(), config, guard=False)
        unseen.clear()
        got = play(engine, temperature)
        assert not engine.drafting.drafters.failures
        for (ids, rows), (plain_ids, plain_rows) in zip(got, expected, strict=True):
            assert ids == plain_ids
            assert torch.equal(rows.view(torch.uint8), plain_rows.view(torch.uint8))
        if spec == "tree:15":  # the others go by the clock, or want fewer rows than the tree has
            assert engine.drafting.controller.stats.tau > 1.3
            assert len({id(tree) for tree in unseen}) > 40


def test_sequences_that_share_steps_draft_as_each_alone():
    limit = {"context_limit": 1024, "pool_tokens": 4096}
    plain = Engine(model(), EngineConfig(spec="none", drafters=(), **limit), costs={1: 1.0})
    expected = [ids for ids, _ in play(plain, 0.7)]
    config = EngineConfig(spec="tree:15", drafters=("heads",), **limit)
    engine = Engine(model(), config, guard=False)
    seqs = [
        begun(engine, text, SamplingParams(temperature=0.7, seed=seed, max_tokens=90))
        for seed, text in enumerate(PROMPTS)
    ]
    turn = 0
    while running := [seq for seq in seqs if not seq.finished]:
        # Alone, together, and one between two steps of another.
        engine.step(running if turn % 3 == 0 else [running[turn % len(running)]])
        turn += 1
    assert [seq.tokens for seq in seqs] == expected
    assert not engine.drafting.drafters.failures


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_tree_is_that_of_the_modules(temperature: float):
    found = find_heads(model())
    assert found is not None
    opened = head_file.load(found, model().spec, model().tokenizer.tok_fp())
    drafter = load_heads(model())
    assert isinstance(drafter, HeadsDrafter)
    weights = model().layers.weights
    head = opened.head.to(weights.embedding.device, weights.dtype)
    assert isinstance(head, RecurrentHead)
    words = Vocabulary.of(opened.draft_ids, weights.head, weights.embedding)
    config = EngineConfig(spec="none", drafters=("heads",), context_limit=1024, pool_tokens=2048)
    engine = Engine(model(), config, costs={1: 1.0})
    kept: list[tuple[int, int, torch.Tensor]] = []

    def read(seq_id: int, start: int, features) -> None:
        kept.append((start + len(features), seq_id, features[len(features) - 1].values.clone()))

    engine.drafting.read = read
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40)
    seq = begun(engine, PROMPTS[0], params)
    while not seq.finished:
        engine.step([seq])
    shared = total = 0
    for place, _, taps in kept[:-1]:
        root, position = seq.tokens[place], place + 1
        row = DeviceRow(taps[None], 0)
        got = drafter.grower.grow(row, root, position, temperature=temperature, seed=5, max_rows=16)
        again = drafter.grower.grow(
            row, root, position, temperature=temperature, seed=5, max_rows=16
        )
        assert got == again
        ids = opened.draft_ids.numpy()
        noise = np.stack([gumbel(5, position + depth, ids) for depth in range(GROWTH.depth)])
        expected = grow(
            head,
            RecurrentCell(head, taps[None]),
            words,
            torch.tensor([root], device=taps.device),
            GROWTH,
            inverse_t=torch.tensor([1 / temperature if temperature else 1.0], device=taps.device),
            noise=torch.from_numpy(noise)[None].to(taps.device) if temperature else None,
        )
        mine = DraftTree.of(*got)
        theirs = DraftTree.of(
            expected.tokens[0].tolist(), expected.parents[0].tolist(), expected.chance[0].tolist()
        )
        paths = [{tree.path(row) for row in range(len(tree))} for tree in (mine, theirs)]
        shared += len(paths[0] & paths[1])
        total += len(mine)
    # bfloat16 rounds in other places: guesses of nearly equal chance may change places.
    assert total > 500
    assert shared / total > 0.95
