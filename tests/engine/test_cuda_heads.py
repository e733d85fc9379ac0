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
from chatkv.models.device_rows import DeviceRow, DeviceRows
from chatkv.models.devices import load_model
from chatkv.models.model import ForwardBatch
from chatkv.models.step_graphs import Flight
from chatkv.noise import gumbel
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from chatkv.spec.drafters import heads as heads_drafter
from chatkv.spec.drafters.eagle import EagleDrafter
from chatkv.spec.drafters.heads import HeadsDrafter, find_heads, load_heads
from chatkv.spec.heads import file as head_file
from chatkv.spec.heads.device import GROWTH
from chatkv.spec.heads.device_eagle import FusedEagle
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.grow import EagleCell, Guesses, RecurrentCell, Vocabulary, grow
from chatkv.spec.heads.modules import EagleHead, RecurrentHead, angles_of, new_head
from chatkv.spec.heads.shape import shape_for
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


@pytest.fixture(params=["recurrent", "eagle"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of the head that the engine finds."""
    monkeypatch.setattr(heads_drafter, "KINDS", (request.param,))
    return request.param


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
def test_drafted_is_plain_ids_and_bytes(
    temperature: float, kind: str, monkeypatch: pytest.MonkeyPatch
):
    limit = {"context_limit": 1024, "pool_tokens": 2048}
    expected = play(
        Engine(model(), EngineConfig(spec="none", drafters=(), **limit), costs={1: 1.0}),
        temperature,
    )
    unseen, begun = [], []
    settle, is_for = GrownTree.settle, Flight.is_for
    monkeypatch.setattr(GrownTree, "settle", lambda tree: unseen.append(tree) or settle(tree))

    def noted(flight: Flight, batch: ForwardBatch) -> bool:
        begun.append(is_for(flight, batch))
        return begun[-1]

    monkeypatch.setattr(Flight, "is_for", noted)
    for spec, names in (
        ("tree:15", ("heads",)),
        ("tree:40", ("ngram", "heads")),
        ("auto", ("auto",)),
        ("chain:3", ("heads",)),
    ):
        config = EngineConfig(spec=spec, drafters=names, **limit)
        engine = Engine(model(), config, guard=False)
        if spec == "tree:40":
            engine._runner = None  # a step that begins ahead has nothing beside its tree
        unseen.clear()
        got = play(engine, temperature)
        assert not engine.drafting.drafters.failures
        for (ids, rows), (plain_ids, plain_rows) in zip(got, expected, strict=True):
            assert ids == plain_ids
            assert torch.equal(rows.view(torch.uint8), plain_rows.view(torch.uint8))
        if spec == "tree:40" and temperature == 0:
            beside = {id(tree): tree for tree in unseen if tree.others is not None}
            assert len(beside) > 4
        if spec == "tree:15":  # the others go by the clock, or want fewer rows than the tree has
            assert engine.drafting.controller.stats.tau > 1.3
            assert len({id(tree) for tree in unseen}) > 40
            assert begun.count(True) > 30, "few steps began ahead"
            begun.clear()


def test_sequences_that_share_steps_draft_as_each_alone(kind: str):
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
def test_the_tree_is_that_of_the_modules(temperature: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads_drafter, "KINDS", ("recurrent",))
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
        same, count = compared(got, expected)
        shared, total = shared + same, total + count
    # bfloat16 rounds in other places: guesses of nearly equal chance may change places.
    assert total > 500
    assert shared / total > 0.95


def compared(got: tuple[list[int], list[int], list[float]], expected: Guesses) -> tuple[int, int]:
    """Paths that two trees share, and those of the first."""
    mine = DraftTree.of(*got)
    theirs = DraftTree.of(
        expected.tokens[0].tolist(), expected.parents[0].tolist(), expected.chance[0].tolist()
    )
    paths = [{tree.path(row) for row in range(len(tree))} for tree in (mine, theirs)]
    return len(paths[0] & paths[1]), len(mine)


class Rows:
    """Random rows of a text, of which an eagle head has stored some."""

    def __init__(self, count: int, seed: int) -> None:
        torch.manual_seed(seed)
        shape = shape_for("eagle", model().spec, draft_ids=2048)
        ids = torch.randperm(model().spec.vocab_size)[:2048]
        self.file = HeadFile(new_head(shape).requires_grad_(False), ids, {})
        self.file.head.gamma.mul_(3)  # sure of itself, so that trees are deep
        self.grower = FusedEagle(self.file, model())
        for parameter in self.file.head.parameters():
            if parameter.dim() > 1:
                parameter.data = parameter.data.to(torch.bfloat16)
        self.taps = torch.randn(len(shape.taps), count, shape.hidden, device="cuda")
        self.ids = torch.randint(0, 49000, (count + 1,)).tolist()

    def grow(self, memory, start: int, stop: int, temperature: float, parts: int = 1):
        """Store rows from start to stop, in some pieces, and grow behind the last one."""
        step = -(-(stop - start) // parts)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            rows = DeviceRows(self.taps, range(first, last))
            self.grower.store(memory, first, rows, self.ids[first + 1 : last + 1])
        first = max(0, stop - self.grower.window)
        return self.grower.grow(
            memory, (first, stop), self.ids[stop], temperature=temperature, seed=3, max_rows=16
        )

    def expected(self, stop: int, temperature: float) -> Guesses:
        """The tree of the modules."""
        head, weights = self.file.head, model().layers.weights
        assert isinstance(head, EagleHead)
        first = max(0, stop - self.grower.window)
        places = torch.arange(first, stop, device="cuda")
        behind = torch.tensor(self.ids[first + 1 : stop + 1], device="cuda")
        states = head.features(self.taps[:, first:stop].transpose(0, 1))
        embedded = weights.embedding[behind]
        keys, values = head.stored(states, embedded, angles_of(head.shape, places))

        def look(q):
            scores = torch.einsum("nwhgd,shd->nwhgs", q, keys.float())
            return scores, lambda shares: torch.einsum("nwhgs,shd->nwhgd", shares, values.float())

        ids = self.file.draft_ids.numpy()
        noise = np.stack([gumbel(3, stop + 1 + depth, ids) for depth in range(GROWTH.depth)])
        return grow(
            head,
            EagleCell(head, states[-1:], places[-1:], look),
            Vocabulary.of(self.file.draft_ids, weights.head, weights.embedding),
            behind[-1:],
            GROWTH,
            inverse_t=torch.tensor([1 / temperature if temperature else 1.0], device="cuda"),
            noise=torch.from_numpy(noise)[None].cuda() if temperature else None,
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_eagle_tree_is_that_of_the_modules(temperature: float):
    text = Rows(700, seed=1)
    memory, shared, total, start = text.grower.new_memory(), 0, 0, 0
    for stop in [3, 4, 9, 60, 300, *range(520, 560, 3), *range(690, 701)]:
        got = text.grow(memory, start, stop, temperature)
        with torch.no_grad():
            same, count = compared(got, text.expected(stop, temperature))
        shared, total, start = shared + same, total + count, stop
    assert total > 400
    assert shared / total > 0.95


def test_an_eagle_tree_does_not_depend_on_how_its_rows_came():
    """A few at a time behind steps, or all at once after a resume: the same bits."""
    text, found = Rows(640, seed=2), []
    for parts, stops in ((1, (640,)), (9, (200, 640)), (1, (16, 500, 501, 517, 640))):
        memory, start = text.grower.new_memory(), 0
        for stop in stops:
            tree = text.grow(memory, start, stop, 0.7, parts)
            start = stop
        text.grower.put_away()
        slots = torch.arange(128, 640, device="cuda") % len(memory.states)
        found.append((tree, [tensor[slots] for tensor in memory.tensors()]))
    for tree, tensors in found[1:]:
        assert tree == found[0][0]
        for one, other in zip(tensors, found[0][1], strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_rows_of_plain_steps_computed_together_give_the_trees_of_those_that_were_copied(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(heads_drafter, "KINDS", ("eagle",))
    config = EngineConfig(spec="tree:15", drafters=("heads",), context_limit=1024, pool_tokens=2048)
    settle, found = GrownTree.settle, []
    for again in (False, True):
        engine = Engine(model(), config, costs={1: 1.0}, guard=False)
        (drafter,) = engine.drafting.drafters.drafters
        assert isinstance(drafter, EagleDrafter)
        monkeypatch.setattr(drafter.grower, "reads_again", again)
        params = SamplingParams(temperature=0.7, seed=4, max_tokens=80)
        seq = begun(engine, PROMPTS[0], params)
        engine.drafting.set_mode("none")
        for _ in range(30):
            engine.step([seq])
        kept = [start for start, _ in drafter.held[seq.id].waiting if start >= seq.prompt_tokens]
        assert len(kept) == (1 if again else 30)
        engine.drafting.set_mode("tree:15")
        seen: list[GrownTree] = []
        trees: list[tuple[list[int], list[int]]] = []
        propose = engine.drafting.propose

        def watched(tree, seen=seen, trees=trees):
            got = settle(tree)
            if not any(tree is one for one in seen):
                seen.append(tree)
                trees.append((got.tokens.tolist(), got.parents.tolist()))
            return got

        def proposed(seqs, propose=propose, trees=trees):
            (tree,) = propose(seqs)
            if isinstance(tree, DraftTree):
                trees.append((tree.tokens.tolist(), tree.parents.tolist()))
            return [tree]

        monkeypatch.setattr(GrownTree, "settle", watched)
        monkeypatch.setattr(engine.drafting, "propose", proposed)
        while not seq.finished:
            engine.step([seq])
        assert not engine.drafting.drafters.failures
        found.append((seq.tokens, trees))
        engine.finish(seq)
    assert found[0] == found[1]
    assert len(found[0][1]) > 10
    assert max(len(tokens) for tokens, _ in found[0][1]) == 16


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_begun_behind_a_step_are_those_grown_from_the_rows_it_kept(
    temperature: float, monkeypatch: pytest.MonkeyPatch
):
    """A resume grows the second way, so it guesses as a chat that never quit."""
    monkeypatch.setattr(heads_drafter, "KINDS", ("eagle",))
    config = EngineConfig(spec="tree:15", drafters=("heads",), context_limit=1024, pool_tokens=2048)
    engine = Engine(model(), config, costs={1: 1.0}, guard=False)
    (drafter,) = engine.drafting.drafters.drafters
    assert isinstance(drafter, EagleDrafter)
    other, compared_trees = load_heads(model()), 0
    assert isinstance(other, EagleDrafter)
    read, kept = engine.drafting.read, []

    def also(seq_id, start, features):
        copy = torch.as_tensor(np.asarray(features)).cuda().transpose(0, 1)
        kept.append((start, DeviceRows(copy, range(len(features)))))
        if not drafter.has_read(seq_id):
            read(seq_id, start, features)

    engine.drafting.read = engine.prompts.read = also
    engine.drafting.wants_rows = lambda seq_id: True
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60)
    seq = begun(engine, PROMPTS[0], params)
    memory, first = other.grower.new_memory(), kept[0][0]
    take = GrownTree.settle
    trees: list[DraftTree] = []
    monkeypatch.setattr(GrownTree, "settle", lambda tree: trees.append(take(tree)) or trees[-1])
    while not seq.finished:
        trees.clear()
        before = len(seq.tokens)
        engine.step([seq])
        if not trees:
            continue
        known = [(start, rows) for start, rows in kept if start + len(rows) <= before - 1]
        for start, rows in known:
            stop = start + len(rows)
            other.grower.store(memory, start, rows, seq.tokens[start + 1 : stop + 1])
        del kept[: len(known)]
        tokens, parents, _ = other.grower.grow(
            memory, (first, before - 1), seq.tokens[before - 1],
            temperature=temperature, seed=4, max_rows=16,
        )  # fmt: skip
        assert (tokens, parents) == (trees[0].tokens.tolist(), trees[0].parents.tolist())
        compared_trees += 1
    assert compared_trees > 10
    assert not engine.drafting.drafters.failures
