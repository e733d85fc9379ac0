"""Quantised pools on a CUDA device: bits of trees, of prompts, of drafted text and of images."""

# What needs triton is imported once it is known to be here.
# ruff: noqa: E402

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

from chatkv.batch import chain_batch, tree_batch
from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import BackendUnavailable, UnknownModel
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.table import PageTable
from chatkv.models import catalog
from chatkv.models.catalog import DEFAULT_MODEL
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.devices import expect_cuda
from chatkv.models.heads_triton import Rotary, rotate_rows, rotate_rows_plain
from chatkv.sampling import SamplingParams
from chatkv.spec.tree import DraftTree

FORMATS = [KVFormat("int8"), KVFormat("fp8"), KVFormat("int4"), KVFormat("int8", (2,))]
MODELS = ("random:tiny", "random:tiny-qwen3", DEFAULT_MODEL)


@cache
def load(name: str) -> CudaDecoder:
    try:
        return CudaDecoder.load(catalog.find(name), expect_cuda())
    except UnknownModel as error:
        pytest.skip(str(error))


def table_of(model: CudaDecoder, kv: KVFormat) -> PageTable:
    """An empty table of a pool in which whatever nobody wrote is NaN."""
    pool = model.new_pool(1024, kv)
    for tensor in pool.tensors:
        tensor.view(torch.uint8).fill_(255)
    return PageTable(pool)


def step(model: CudaDecoder, table: PageTable, ids: list[int]) -> np.ndarray:
    with table.reserve(len(ids)) as reserved:
        batch = chain_batch(table, ids, reserved.slots, want_logits=True)
        logits = np.array(model.step(batch, table.pool).row(0))
        reserved.keep(range(len(ids)))
    return logits


def prefill(model: CudaDecoder, table: PageTable, ids: list[int], stops: list[int]) -> np.ndarray:
    logits = None
    for end in (*stops, len(ids)):
        while (known := table.length) < end:
            first, rows = model.chunk(known)
            stop = min(first + rows, end)
            with table.reserve(stop - known) as reserved:
                logits = model.prefill(
                    ids[known:stop], first, known, reserved.slots, table.entries(), table.pool,
                    chunk_rows=rows, want_logits=stop == end,
                )  # fmt: skip
                reserved.keep(range(stop - known))
    assert logits is not None
    return logits.copy()


def rows(table: PageTable) -> list[list[int]]:
    return [table.pool.row(int(slot)).tolist() for slot in table.slots(0, table.length)]


@pytest.mark.parametrize("kv", FORMATS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_tree_has_the_bits_of_plain_decoding(name: str, kv: KVFormat):
    model = load(name)
    first, plain = table_of(model, kv), table_of(model, kv)
    other = PageTable(first.pool)
    history = [5 + i % 200 for i in range(150)]
    for table in (first, plain):
        for at in range(0, 150, 50):
            step(model, table, history[at : at + 50])
    step(model, other, list(range(3, 40)))
    trees = [DraftTree.of([8, 9, 10, 11], [0, 0, 0, 2]), DraftTree.of([12, 13], [0, 0])]
    with first.reserve(4) as a, other.reserve(2) as b:
        result = model.step(tree_batch([first, other], trees, [a.slots, b.slots]), first.pool)
        logits = [np.array(result.row(row)) for row in range(4)]
        a.keep([0, 2, 3])
        b.keep([0])
    for token, row in ((8, 0), (10, 2), (11, 3)):
        alone = step(model, plain, [token])
        assert np.isfinite(alone).all()
        np.testing.assert_array_equal(alone, logits[row])
    assert rows(first) == rows(plain)
    np.testing.assert_array_equal(step(model, first, [14]), step(model, plain, [14]))


@pytest.mark.parametrize("kv", FORMATS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_the_same_in_any_pieces_and_near_the_step(name: str, kv: KVFormat):
    model = load(name)
    ids = [3 + i * 7 % 250 for i in range(700)]
    whole, parts, stepped = (table_of(model, kv) for _ in range(3))
    given = prefill(model, whole, ids, [])
    np.testing.assert_array_equal(prefill(model, parts, ids, [3, 400, 513]), given)
    assert rows(whole) == rows(parts)
    for at in range(0, 650, 50):
        step(model, stepped, ids[at : at + 50])
    logits = step(model, stepped, ids[650:])
    exact = prefill(model, table_of(model, PLAIN), ids, [])
    for found in (given, logits):
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert error < (0.3 if kv.name == "int4" else 0.1), error


@pytest.mark.parametrize("kv", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["random:tiny", DEFAULT_MODEL])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_and_batched_text_is_plain_text(name: str, kv: KVFormat, temperature: float):
    model = load(name)
    ids = model.tokenizer.encode("one two three one two three one two three one two")
    texts = []
    for spec, together in (("none", False), ("tree:15", True), ("chain:7", True)):
        config = EngineConfig(
            spec=spec, drafters=("ngram", "random"), pool_tokens=4096, kv_dtype=kv.name,
            keep_layers=kv.keep_layers,
        )  # fmt: skip
        engine = Engine(model, config, costs={1: 1.0, 16: 1.01}, guard=False)
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=80)
        seqs = [engine.add(ids[cut:], [False] * (len(ids) - cut), params) for cut in (0, 5)]
        for group in [seqs] if together else [[seq] for seq in seqs]:
            engine.generate(group)
        texts.append([seq.tokens for seq in seqs])
        engine.close()
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_an_image_comes_back(kv: KVFormat):
    model = load("random:tiny")
    table = table_of(model, kv)
    step(model, table, list(range(3, 60)))
    pool, before = table.pool, rows(table)
    payload = pool.image(table.pages[0], 57)
    assert len(payload) == pool.payload_bytes(57)
    (page,) = pool.take()
    pool.load(page, payload, 57)
    assert [pool.row(page * pool.page_size + i).tolist() for i in range(57)] == before


def test_what_an_old_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = load("random:tiny")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(BackendUnavailable, match=r"8\.9"):
        model.new_pool(64, KVFormat("fp8"))


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize(
    ("kind", "dim"), [(torch.int8, 64), (torch.int8, 96), (torch.uint8, 128)], ids=str
)
def test_queries_and_keys_are_multiplied_as_the_plain_version_says(
    kind: torch.dtype, dim: int, heads: int
):
    torch.manual_seed(0)
    rows, columns, per_slot = 40, dim, 1
    if kind == torch.uint8:
        columns, per_slot = dim // 2, dim // 32
    angles = torch.randn(64, dim // 2)
    parts = [
        torch.randn(rows, 5 * dim),
        torch.randint(0, 64, (rows,), dtype=torch.int32),
        torch.randperm(80)[:rows],
        torch.zeros(rows, 3, dim),
        torch.zeros(5, 2, 1, 16, columns).to(kind),
        torch.zeros(5, 2, 1, 16, per_slot).half(),
    ]
    found = []
    for device, rotate in (("cpu", rotate_rows_plain), ("cuda", rotate_rows)):
        qkv, *rest = (part.clone().to(device) for part in parts)
        rotary = Rotary(angles.cos().to(device), angles.sin().to(device), 3, 1, dim)
        options = {} if device == "cpu" else {"heads_a_program": heads}
        rotate(qkv, None, rotary, *rest, **options)
        found.append([part.cpu() for part in rest[2:]])
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
