"""An eagle head as on a device, in Triton's interpreter: run by `test_interpreted.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from chatkv.models import random_model
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.device_rows import DeviceRows
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.heads import device_eagle
from chatkv.spec.heads.device_eagle import GROWTH, DeviceMemory, FusedEagle
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.grow import EagleCell, Guesses, Vocabulary, grow
from chatkv.spec.heads.modules import EagleHead, angles_of, new_head
from chatkv.spec.heads.shape import shape_for
from chatkv.spec.tree import DraftTree

WINDOW = 16


@dataclass
class Text:
    """A sequence, its taps, and the memory that should hold what a whole look gives."""

    memory: DeviceMemory
    ids: list[int] = field(default_factory=list)
    taps: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 2, 128))


@pytest.fixture
def decoder() -> CudaDecoder:
    weights = random_model.random_weights("random:tiny", torch.device("cpu"), torch.float32)
    tokenizer = random_model.byte_tokenizer()
    return CudaDecoder(weights, tokenizer, linear="triton", capture=False, checked=False)  # type: ignore[arg-type]


def expected(file: HeadFile, decoder: CudaDecoder, text: Text, params: SamplingParams) -> Guesses:
    """The tree by the modules, over all rows of the window at once."""
    head, weights, rows = file.head, decoder.layers.weights, len(text.taps)
    assert isinstance(head, EagleHead)
    behind = torch.tensor(text.ids[1:])
    keys, values = head.stored(
        head.features(text.taps),
        weights.embedding[behind],
        angles_of(head.shape, torch.arange(rows)),
    )
    keys, values = keys[None, -WINDOW:], values[None, -WINDOW:]

    def look(q):
        scores = torch.einsum("nwhgd,nshd->nwhgs", q, keys)
        return scores, lambda shares: torch.einsum("nwhgs,nshd->nwhgd", shares, values)

    sampler, ids = Sampler(params), file.draft_ids.numpy()
    noise = np.stack([sampler.noise(rows + 1 + depth, ids) for depth in range(GROWTH.depth)])
    heat = params.temperature
    return grow(
        head,
        EagleCell(head, head.features(text.taps[-1:]), torch.tensor([rows - 1]), look),
        Vocabulary.of(file.draft_ids, weights.head, weights.embedding),
        torch.tensor([text.ids[-1]]),
        GROWTH,
        inverse_t=torch.tensor([1 / heat if heat else 1.0]),
        noise=torch.from_numpy(noise)[None],
    )


def test_a_head_in_bfloat16_grows_trees() -> None:
    """As on a device: matrices rounded, norms and what is stored not."""
    weights = random_model.random_weights("random:tiny", torch.device("cpu"), torch.bfloat16)
    tokenizer = random_model.byte_tokenizer()
    model: Any = CudaDecoder(weights, tokenizer, linear="triton", capture=False, checked=False)
    shape = shape_for("eagle", model.spec, draft_ids=64)
    torch.manual_seed(2)
    file = HeadFile(new_head(shape).requires_grad_(False), torch.arange(64) * 3, {})
    grower = FusedEagle(file, model)
    memory, start = grower.new_memory(), 0
    for count in (12, 1, 3):
        room = torch.randn(len(shape.taps), count, shape.hidden)
        grower.store(memory, start, DeviceRows(room, range(count)), [7] * count)
        start += count
        grown = grower.grow(memory, (0, start), 7, temperature=0.7, seed=1, max_rows=16)
        assert len(DraftTree.of(*grown)) == GROWTH.rows
        assert max(DraftTree.of(*grown).depths) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_are_those_of_the_modules_for_sequences_in_turns(
    decoder: CudaDecoder, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_eagle, "WINDOW", WINDOW)
    torch.manual_seed(2)
    shape = shape_for("eagle", decoder.spec, draft_ids=64)
    file = HeadFile(new_head(shape).requires_grad_(False), torch.arange(64) * 3, {})
    grower = FusedEagle(file, decoder)
    params = SamplingParams(temperature=temperature, seed=9)
    random = np.random.default_rng(1)
    texts = [Text(grower.new_memory(), [5], torch.zeros(0, len(shape.taps), shape.hidden))]
    # Which text, its new rows by part, and whether they are grown from.
    for which, parts, grows in (
        (0, [3], True), (0, [1], True), (0, [9, 2], True), (1, [12], True), (0, [4], True),
        (1, [2], False), (0, [1], True), (1, [8], True), (1, [1, 1, 1], True), (0, [1], True),
    ):  # fmt: skip
        if which == len(texts):  # a fork of the first one
            first = texts[0]
            texts.append(Text(first.memory.copy(), list(first.ids), first.taps.clone()))
        text = texts[which]
        for count in parts:
            start = len(text.taps)
            room = torch.randn(len(shape.taps), 12, shape.hidden)
            rows = random.permutation(12)[:count].tolist()
            text.taps = torch.cat([text.taps, room[:, rows].transpose(0, 1)])
            text.ids += random.integers(0, 200, count).tolist()
            behind = text.ids[start + 1 :]
            grower.store(text.memory, start, DeviceRows(room, rows), behind)
        if not grows:
            continue
        stop = len(text.taps)
        tokens, parents, chance = grower.grow(
            text.memory, (max(0, stop - WINDOW), stop), text.ids[-1],
            temperature=temperature, seed=9, max_rows=16,
        )  # fmt: skip
        tree = expected(file, decoder, text, params)
        assert tokens == tree.tokens[0].tolist()
        assert parents == tree.parents[0].tolist()
        np.testing.assert_allclose(chance, tree.chance[0], rtol=1e-3)
