"""The drafter `heads` on a real decoder: taps, trees, and no other text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import HeadsMismatch
from chatkv.models import weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.drafter import DraftContext
from chatkv.spec.drafters import DraftMeans, create_drafters
from chatkv.spec.drafters import heads as heads_drafter
from chatkv.spec.drafters.heads import HeadsDrafter, find_heads, load_heads
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.heads import cpu_parts
from chatkv.spec.heads.cpu import CpuFan, CpuGrower, grower_of
from chatkv.spec.heads.file import HeadFile, save, target_of
from chatkv.spec.heads.grow import Growth, ParallelCell, RecurrentCell, Vocabulary, grow
from chatkv.spec.heads.modules import new_head
from chatkv.spec.heads.shape import shape_for
from chatkv.spec.token_log import TokenIndex
from chatkv.tokenizer import Tokenizer

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
DRAFT_IDS = 160


@pytest.fixture
def decoder(make_gguf, cache, tmp_path) -> Decoder:
    model = weights.load(ModelFile("model", make_gguf(tmp_path / "model.gguf", seed=5)))
    return Decoder(model, Tokenizer.from_file(model.folder / "tokenizer.json"))


def head_file(decoder: Decoder, kind: Any = "recurrent", draft_ids: int = DRAFT_IDS) -> HeadFile:
    torch.manual_seed(1)
    head = new_head(shape_for(kind, decoder.spec, draft_ids=draft_ids)).requires_grad_(False)
    target = target_of(decoder.spec, decoder.tokenizer.tok_fp())
    return HeadFile(head, torch.arange(draft_ids) + 3, target)


@pytest.mark.parametrize("kind", ["recurrent", "parallel"])
def test_a_tree_is_that_of_the_modules(decoder, monkeypatch, kind):
    """The packed products lose what Q8_0 loses, so chances are close and the order is kept."""
    monkeypatch.setattr(cpu_parts, "CODES", "q8")
    file = head_file(decoder, kind)
    grower = (CpuGrower if kind == "recurrent" else CpuFan)(file, decoder, depth=2, children=3)
    taps = np.random.default_rng(0).standard_normal((3, decoder.spec.hidden_size))
    taps: Any = taps.astype(np.float32)
    rows = torch.from_numpy(
        decoder.vocabulary_rows(np.arange(decoder.spec.vocab_size), of_head=False)
    )
    cell = RecurrentCell if kind == "recurrent" else ParallelCell
    for temperature in (0.0, 0.8):
        found = grower.grow(taps, 9, 40, temperature=temperature, seed=5, max_rows=7)
        noise = Sampler(SamplingParams(temperature=temperature, seed=5))
        ids = file.draft_ids.numpy()
        noises = np.stack([noise.noise(40 + depth, ids) for depth in range(2)])
        expected = grow(
            file.head,
            cell(file.head, torch.from_numpy(taps)[None]),  # type: ignore[arg-type]
            Vocabulary.of(file.draft_ids, rows, rows),
            torch.tensor([9]),
            Growth(rows=4, depth=1, width=1, children=3),
            inverse_t=torch.tensor([1 / temperature if temperature else 1.0]),
            noise=torch.from_numpy(noises)[None],
        )
        tokens, parents, chance = found
        assert tokens[:4] == expected.tokens[0].tolist()
        assert parents[:4] == [0, 0, 0, 0]
        np.testing.assert_allclose(chance[1:4], expected.chance[0, 1:], rtol=0.2)


def test_a_parallel_head_guesses_each_depth_as_its_modules_do(decoder, monkeypatch):
    """The guesses of a depth are the same behind all of the depth before."""
    monkeypatch.setattr(cpu_parts, "CODES", "q8")
    monkeypatch.setattr(cpu_parts, "LEAST_CHANCE", 0.0)
    file = head_file(decoder, "parallel")
    with torch.no_grad():
        file.head.gamma.mul_(3)
    grower = CpuFan(file, decoder, depth=9, children=2)
    assert grower.depth == file.head.shape.depth == 4
    taps: Any = np.random.default_rng(2).standard_normal((3, decoder.spec.hidden_size))
    rows = torch.from_numpy(decoder.vocabulary_rows(file.draft_ids.numpy(), of_head=True))
    head: Any = file.head
    states = head.fan(head.features(torch.from_numpy(taps)))
    for temperature in (0.0, 0.7):
        noise = Sampler(SamplingParams(temperature=temperature, seed=6))
        tokens, parents, chance = grower.grow(
            taps.astype(np.float32), 9, 40, temperature=temperature, seed=6, max_rows=30
        )
        assert parents == [0, 0, 0, 1, 1, 3, 3, 5, 5]
        for depth in range(4):
            scores = head.logits(states[depth], rows) / (temperature or 1)
            scores = scores + torch.from_numpy(noise.noise(40 + depth, file.draft_ids.numpy()))
            shares = scores.softmax(-1)
            best = shares.topk(2).indices
            row = 1 + 2 * depth
            assert tokens[row] == int(file.draft_ids[best[0]])
            expected = float(shares[best[0]]) * chance[parents[row]]
            assert chance[row] == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("kind", ["recurrent", "parallel"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafted_is_plain(decoder, temperature, kind, tmp_path, monkeypatch):
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=60)
    prompt = [1, *np.random.default_rng(0).integers(3, 250, 20).tolist()]

    def reply(engine: Engine) -> list[int]:
        seq = engine.add(prompt, [False] * len(prompt), params)
        for _ in engine.prefill(seq):
            pass
        while not seq.finished:
            engine.step([seq])
        engine.finish(seq)
        return seq.tokens

    monkeypatch.setattr(heads_drafter, "WEIGHTS", tmp_path)
    expected = reply(Engine(decoder, EngineConfig(spec="none"), costs=COSTS))
    save(tmp_path / "heads.safetensors", head_file(decoder, kind))
    for spec in ("tree:7", "auto"):
        engine = Engine(decoder, EngineConfig(spec=spec), costs=COSTS, guard=False)
        assert engine.drafting.drafters.names == ("ngram", "heads")
        assert reply(engine) == expected
        assert not engine.drafting.drafters.failures
    config = EngineConfig(spec="tree:5", drafters=("heads",))
    engine = Engine(decoder, config, costs=COSTS, guard=False)
    guarded = engine.drafting.drafters
    drafter: Any = guarded.drafters[0]
    assert reply(engine) == expected
    stats = engine.drafting.controller.stats
    assert engine.drafting.controller._recent[0].drafted  # behind the prompt too
    assert stats.plain_steps <= 1
    assert not guarded.failures
    assert not drafter._read


@pytest.mark.parametrize("spec", ["none", "auto", "tree:5"])
def test_no_row_is_held_while_a_step_runs(decoder, spec, tmp_path, monkeypatch):
    """Where steps leave their rows on a device, one that is held has to be copied."""
    monkeypatch.setattr(heads_drafter, "WEIGHTS", tmp_path)
    save(tmp_path / "heads.safetensors", head_file(decoder))
    config = EngineConfig(spec=spec, drafters=("heads",))
    engine = Engine(decoder, config, costs=COSTS, guard=False)
    drafter: Any = engine.drafting.drafters.drafters[0]
    seq = engine.add([1, 2, 3], [False] * 3, SamplingParams(temperature=0, max_tokens=40))
    for _ in engine.prefill(seq):
        pass
    held: list[int] = []
    step = decoder.step

    def watched(*args: Any) -> Any:
        held.append(len(drafter._read))
        return step(*args)

    monkeypatch.setattr(decoder, "step", watched)
    while not seq.finished:
        engine.step([seq])
    assert sum(held) == 0
    assert len(held) > 3
    assert (sum(engine.drafting.controller.stats.offered.values()) > 0) == (spec != "none")


def test_heads_of_another_quantisation_are_named_with_both_values(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(heads_drafter, "WEIGHTS", tmp_path)
    file = head_file(decoder)
    other = {**file.target, "weights": "ab" * 32}
    save(tmp_path / f"{decoder.spec.name.lower()}-heads.safetensors", replace(file, target=other))
    with pytest.raises(HeadsMismatch) as raised:
        load_heads(decoder)
    assert "ab" * 32 in raised.value.message
    assert decoder.spec.weights_digest in raised.value.message


def test_there_is_no_guess_from_a_row_that_did_not_choose_the_root(decoder):
    grower: Any = grower_of(head_file(decoder), decoder)
    drafter = HeadsDrafter(grower, (1, 2, 3))
    context = DraftContext(1, [1, 2, 3], Sampler(SamplingParams()))
    features: Any = np.ones((1, 3, decoder.spec.hidden_size), np.float32)
    for place, grows in ((0, False), (1, True), (2, False)):
        drafter.read(1, place, features)
        (tree,) = drafter.propose([context], [8])
        assert (len(tree) > 1) == grows
    drafter.drop(1)
    assert len(drafter.propose([context], [8])[0]) == 1


def test_what_ships_is_found_by_the_weights_it_was_made_for(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(heads_drafter, "WEIGHTS", tmp_path)
    with pytest.raises(HeadsMismatch, match="There are no draft heads"):
        load_heads(decoder)
    save(tmp_path / "b.safetensors", head_file(decoder))
    (tmp_path / "a.safetensors").write_bytes(b"no file of heads")
    assert load_heads(decoder).taps == (1, 2, 3)
    save(tmp_path / "c.safetensors", head_file(decoder, "eagle"))
    assert find_heads(decoder) == tmp_path / "c.safetensors"  # the better kind
    monkeypatch.setattr(heads_drafter, "KINDS", ("recurrent", "eagle"))
    assert find_heads(decoder) == tmp_path / "b.safetensors"


def test_guesses_in_four_bits_are_near_those_in_eight(decoder, monkeypatch):
    taps: Any = np.random.default_rng(0).standard_normal((40, 3, decoder.spec.hidden_size))
    found: list[list[Any]] = []
    for kind in ("q8", "q4"):
        monkeypatch.setattr(cpu_parts, "CODES", kind)
        grower = CpuGrower(head_file(decoder), decoder, depth=1, children=4)
        found.append([])
        for row in taps.astype(np.float32):
            tokens, _, _ = grower.grow(row, 5, 9, temperature=0, seed=1, max_rows=9)
            found[-1] += [set(tokens[1:])] if kind == "q8" else tokens[1:2]
    assert sum(best in known for known, best in zip(*found, strict=True)) > 30


def test_heads_that_cannot_be_packed_say_so(decoder):
    with pytest.raises(HeadsMismatch, match="30 draft ids"):
        grower_of(head_file(decoder, draft_ids=30), decoder)


def test_auto_means_heads_where_some_fit_these_very_weights(decoder, tmp_path, monkeypatch, caplog):
    """What is not there is left out without a word; what is broken, with one."""
    monkeypatch.setattr(heads_drafter, "WEIGHTS", tmp_path)
    log = TokenIndex()

    def made(*names: str, log: TokenIndex | None = None) -> GuardedDrafters:
        return create_drafters(names, DraftMeans(260, log, target=decoder))

    assert made("auto").names == ("ngram",)
    assert made("auto", log=log).names == ("ngram", "history")
    assert not caplog.records
    save(tmp_path / "a.safetensors", head_file(decoder, "eagle"))
    assert made("auto").names == ("ngram", "heads")
    found = made("random", "auto", "ngram", log=log)
    assert found.names == ("random", "ngram", "history", "heads")
    assert not found.failures
    (tmp_path / "a.safetensors").unlink()
    save(tmp_path / "a.safetensors", head_file(decoder, draft_ids=30))  # no CPU runs one
    found = made("auto", log=log)
    assert found.names == ("ngram", "history")
    assert found.failures == [caplog.messages[-1]]
    assert "do not run on the CPU" in found.failures[0]
    with pytest.raises(HeadsMismatch, match="do not run on the CPU"):
        made("auto", "heads")
