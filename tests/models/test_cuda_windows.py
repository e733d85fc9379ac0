"""Sliding windows on a CUDA device: trees, prompts, drafted text and what was let go of."""

# What needs triton is imported once it is known to be here.
# ruff: noqa: E402

from __future__ import annotations

import os
import random
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

from chatkv.batch import chain_batch, tree_batch
from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.ops import Op
from chatkv.kv.table import PageTable
from chatkv.models import catalog
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.dense import DenseWeights
from chatkv.models.devices import expect_cuda
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.spec.tree import DraftTree

MODELS = ("random:tiny-windows", "random:tiny-mixed")
FORMATS = [PLAIN, KVFormat("int8"), KVFormat("fp8"), KVFormat("int4")]


@cache
def load(name: str, capture: bool = True) -> CudaDecoder:
    return CudaDecoder.load(catalog.find(name), expect_cuda(), capture=capture)


def table_of(model: CudaDecoder, kv: KVFormat = PLAIN) -> PageTable:
    """An empty table of a pool in which whatever nobody wrote is NaN. So is page 0, which stands
    for pages that were let go of: nobody gets it."""
    pool = model.new_pool(8192, kv)
    for tensor in pool.tensors:
        tensor.view(torch.uint8).fill_(255)
    assert pool.take() == [0]
    return PageTable(pool, model.spec.widest_window)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, count).tolist()


def step(model: CudaDecoder, table: PageTable, ids: list[int]) -> np.ndarray:
    """Ids behind a table, kept; logits of the last."""
    with table.reserve(len(ids)) as reserved:
        batch = chain_batch(table, ids, reserved.slots, want_logits=True)
        logits = np.array(model.step(batch, table.pool).row(0))
        reserved.keep(range(len(ids)))
    return logits


def prefill(
    model: CudaDecoder, table: PageTable, ids: list[int], stops: list[int], *, lets_go: bool = False
) -> np.ndarray:
    """All of `ids` that are not in place yet, in as many turns as there are stops."""
    logits = None
    for end in (*[stop for stop in stops if stop > table.num_tokens], len(ids)):
        while (known := table.num_tokens) < end:
            base = table.stage.base
            first, rows = model.chunk(known - base)
            stop = min(base + first + rows, end)
            with table.reserve(stop - known) as reserved:
                logits = model.prefill(
                    ids[known:stop], table.slot(base + first), table.slot(known), reserved.slots,
                    table.entries(), table.pool, chunk_rows=rows, want_logits=stop == end,
                    holes=table.holes(),
                )  # fmt: skip
                reserved.keep(range(stop - known))
            if lets_go:
                table.let_go()
    assert logits is not None
    return logits.copy()


def bits(table: PageTable, start: int) -> torch.Tensor:
    """[rows, bytes] from a place on."""
    slots = table.slots(table.slot(start), table.length)
    return torch.stack([table.pool.row(slot) for slot in slots.tolist()])


def random_tree(rows: int, seed: int) -> DraftTree:
    draw = random.Random(seed)
    tokens, parents, depths = [5], [0], [0]
    while len(tokens) < rows:
        parent = draw.randrange(len(tokens))
        if depths[parent] < 14:
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(6 + len(tokens))
    return DraftTree.of(tokens, parents)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kv", FORMATS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_tree_among_others_has_the_bits_of_plain_decoding(name: str, kv: KVFormat, forgets: bool):
    """Histories before, in and behind the first window, with pages let go of; each tree also
    alone."""
    model = load(name)
    first = table_of(model, kv)
    tables = [first, *(PageTable(first.pool, first.window) for _ in range(3))]
    for seed, (table, count) in enumerate(zip(tables, (30, 103, 330, 1000), strict=True)):
        ids = some_ids(count + 9, seed)
        prefill(model, table, ids[:count], [], lets_go=True)
        if forgets:
            table.forget(Op(count, ((10, 20), (count - 8, count - 3))))
            for token in ids[count:]:
                step(model, table, [token])
        table.let_go()
    assert (tables[-1].gone > 0) == (name == MODELS[0])
    plain = [table.fork() for table in tables]
    trees = [random_tree(rows, seed) for seed, rows in enumerate((16, 1, 9, 16))]
    reserved = [table.reserve(len(tree)) for table, tree in zip(tables, trees, strict=True)]
    held = [own.__enter__() for own in reserved]
    batch = tree_batch(tables, trees, [own.slots for own in held])
    result = model.step(batch, first.pool)
    logits = [np.array(result.row(row)) for row in range(len(batch.tokens))]
    stored = [[first.pool.row(slot) for slot in own.slots.tolist()] for own in held]
    at = 0
    for fork, tree, rows in zip(plain, trees, stored, strict=True):
        made: dict[int, PageTable] = {}
        for row, parent in enumerate(tree.parents.tolist()):
            made[row] = (fork if row == 0 else made[parent]).fork()
            alone = step(model, made[row], [int(tree.tokens[row])])
            assert np.isfinite(alone).all()
            np.testing.assert_array_equal(alone, logits[at + row])
            assert torch.equal(bits(made[row], made[row].num_tokens - 1)[0], rows[row])
        for table in made.values():
            table.release()
        at += len(tree)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kv", FORMATS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_has_the_same_bits_however_it_is_cut(name: str, kv: KVFormat, forgets: bool):
    model = load(name)
    ids, found = some_ids(1500), []
    start = 130 if forgets else 0
    for stops in ([], [131, 150, 200, 777, 1025], [512]):
        for lets_go in (False, True):
            table = table_of(model, kv)
            if forgets:
                prefill(model, table, ids[:start], [])
                table.forget(Op(start, ((4, 30), (100, 120))))
            logits = prefill(model, table, ids, stops, lets_go=lets_go)
            assert np.isfinite(logits).all()
            found.append((logits, bits(table, 1450)))
    for logits, rows in found[1:]:
        np.testing.assert_array_equal(logits, found[0][0])
        assert torch.equal(rows, found[0][1])


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_and_chunks_have_the_bits_of_those_that_are_not(name: str):
    found = []
    for capture in (True, False):
        model = load(name, capture)
        for _ in range(2):  # the second time from graphs
            table = table_of(model)
            logits = [prefill(model, table, some_ids(700), [600], lets_go=True)]
            with table.reserve(16) as reserved:
                batch = tree_batch([table], [random_tree(16, 3)], [reserved.slots])
                result = model.step(batch, table.pool)
                logits += [np.array(result.row(row)) for row in range(16)]
            found.append(np.stack(logits))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def reference(weights: DenseWeights, ids: list[int], windows: bool = True) -> torch.Tensor:
    """[T, V] by the definition, in float32 over whole matrices."""
    spec, count = weights.spec, len(ids)
    where = torch.arange(count, device=weights.device)
    angles = where[:, None] * torch.as_tensor(spec.rope_frequencies, device=weights.device)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * weight

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = weights.embedding[ids].float()
    for place, layer in enumerate(weights.layers):
        qkv = norm(x, layer.attention_norm) @ layer.qkv.float().T
        qkv = qkv if layer.bias is None else qkv + layer.bias
        heads = qkv.view(count, -1, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        group = spec.num_heads // spec.num_kv_heads
        k, v = turn(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        seen = where[None] <= where[:, None]
        window = spec.window(place)
        if windows and window is not None:
            seen &= where[None] > where[:, None] - window
        scores = torch.einsum("thd,lhd->htl", turn(q), k) * spec.head_dim**-0.5
        weight = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("htl,lhd->thd", weight, v).flatten(1) @ layer.o.float().T
        gate, up = (norm(x, layer.feed_norm) @ layer.gate_up.float().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.float().T
    return norm(x, weights.norm) @ weights.head.float().T


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_definition_past_the_window(name: str):
    model, ids = load(name), some_ids(700)
    exact = reference(model.layers.weights, ids).cpu().numpy()
    open_wide = reference(model.layers.weights, ids, windows=False).cpu().numpy()
    stepped = table_of(model)
    for start in range(0, 700, 50):
        logits = step(model, stepped, ids[start : start + 50])
        error = np.linalg.norm(logits - exact[start + 49]) / np.linalg.norm(logits)
        assert error < 0.05, (start, error)
    given = prefill(model, table_of(model), ids, [])
    assert np.linalg.norm(given - exact[-1]) / np.linalg.norm(given) < 0.05
    assert np.linalg.norm(given - open_wide[-1]) / np.linalg.norm(given) > 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_drafted_text_is_plain_text_and_goes_on_from_its_window(name: str, temperature: float):
    """In a pool that holds no more than what is in sight, where all layers have a window."""
    model, all_windows = load(name), name == MODELS[0]
    texts: list[list[int]] = []
    for spec in ("none", "tree:15", "chain:7"):
        config = EngineConfig(
            spec=spec, drafters=("ngram", "random"), pool_tokens=640 if all_windows else 4096
        )
        engine = Engine(model, config, costs={1: 1.0, 16: 1.01}, guard=False)
        ids = some_ids(120) * 4
        flags = [False] * len(ids)
        for turn in range(3):
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=150)
            seq, report = engine.add(ids, flags, params), PrefillReport()
            for _ in engine.prefill(seq, report):
                pass
            assert not turn or report.reused > len(ids) - 80
            most = 0
            while not seq.finished:
                engine.step([seq])
                most = max(most, len(seq.table.pages))
            assert (most <= 4) == all_windows
            ids, flags = [*seq.tokens, 7, 8], [*seq.sampled, False, False]
            engine.finish(seq)
        texts.append(ids)
        engine.close()
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]
