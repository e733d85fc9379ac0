"""The model on a CUDA device: bits of trees, graphs, chunks and picks.

`CHATKV_REQUIRE=gpu` turns a missing device into a failure. The default model is tested where its
file is here.
"""

# What needs triton is imported once it is known to be here.
# ruff: noqa: E402

# Settings come as mappings, and loops run at least once.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import os
import random
from dataclasses import replace
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

from chatkv import sampling_triton
from chatkv.batch import chain_batch, tree_batch
from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ModelError, UnknownModel
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable
from chatkv.models import catalog, row_check
from chatkv.models.catalog import DEFAULT_MODEL
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.devices import expect_cuda
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.tree import DraftTree

TINY = ("random:tiny", "random:tiny-qwen2", "random:tiny-qwen3")
MODELS = (*TINY, "random:smollm2-135m", "random:llama3-1b", DEFAULT_MODEL)


@cache
def load(name: str, linear: str = "triton", capture: bool = True) -> CudaDecoder:
    try:
        return CudaDecoder.load(
            catalog.find(name),
            expect_cuda(),
            linear=linear,
            capture=capture,  # type: ignore[arg-type]
        )
    except UnknownModel as error:
        pytest.skip(str(error))


@cache
def pool_of(decoder: CudaDecoder) -> PagePool:
    return decoder.new_pool(24576)


class Run:
    """Sequences on one decoder; whatever nobody wrote is NaN."""

    def __init__(self, decoder: CudaDecoder, seed: int = 0) -> None:
        self.decoder, self.pool = decoder, pool_of(decoder)
        self.random = random.Random(seed)
        free = self.pool.take(self.pool.free)
        self.pool.data[:, free] = torch.nan
        for page in self.random.sample(free, len(free)):
            self.pool.release(page)

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(self.decoder.spec.vocab_size) for _ in range(count)]

    def stored(self, count: int) -> PageTable:
        """A sequence of so many ids that went through the step as chains."""
        table = PageTable(self.pool)
        ids = self.ids(count)
        while table.length < count:
            rows = min(64, count - table.length)
            self.step(table, ids[table.length : table.length + rows])
        return table

    def step(self, table: PageTable, ids: list[int]) -> np.ndarray:
        """Ids behind a table, kept; logits of the last."""
        with table.reserve(len(ids)) as reserved:
            batch = chain_batch(table, ids, reserved.slots, want_logits=True)
            logits = self.decoder.step(batch, self.pool).row(0)
            reserved.keep(range(len(ids)))
        return logits

    def rows(self, table: PageTable, start: int, stop: int) -> torch.Tensor:
        """[rows, L, 2, HK, D] stored keys and values."""
        slots = torch.from_numpy(table.slots(start, stop))
        size = self.pool.page_size
        return self.pool.data[:, slots // size, :, :, slots % size].clone()

    def tree(self, rows: int, depth: int = 15) -> DraftTree:
        parents, depths, tokens = [0], [0], [self.ids(1)[0]]
        taken: set[tuple[int, int]] = set()
        while len(parents) < rows:
            parent, token = self.random.randrange(len(parents)), self.ids(1)[0]
            if depths[parent] < depth and (parent, token) not in taken:
                taken.add((parent, token))
                parents.append(parent)
                depths.append(depths[parent] + 1)
                tokens.append(token)
        return DraftTree.of(tokens, parents)


def same(a: np.ndarray | torch.Tensor, b: np.ndarray | torch.Tensor) -> bool:
    """Bit for bit, and no NaN."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.equal(a, b) and not bool(a.isnan().any())


def expect_plain_bits(run: Run, tables: list[PageTable], trees: list[DraftTree]) -> None:
    """Run the trees together; each node must have the bits of plain decoding of its path."""
    forks = [table.fork() for table in tables]
    with tables[0].reserve(len(trees[0])) as first:
        rest = [(t, t.reserve(len(tree))) for t, tree in zip(tables[1:], trees[1:], strict=True)]
        reserved = [first, *(r.__enter__() for _, r in rest)]
        batch = tree_batch(tables, trees, [r.slots for r in reserved])
        result = run.decoder.step(batch, run.pool)
        logits = [result.row(i) for i in range(len(result))]
        stored = []
        size = run.pool.page_size
        for own in reserved:
            slots = torch.from_numpy(own.slots)
            stored.append(run.pool.data[:, slots // size, :, :, slots % size].clone())
        for _, r in rest:
            r.__exit__(None, None, None)
    at, wrong = 0, []
    for fork, tree, rows in zip(forks, trees, stored, strict=True):
        plain: dict[int, PageTable] = {}
        for row, (token, parent) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        ):
            table = plain[row] = (fork if row == 0 else plain[parent]).fork()
            alone = run.step(table, [token])
            kv = run.rows(table, table.length - 1, table.length)
            if not (same(alone, logits[at + row]) and same(kv, rows[row : row + 1])):
                wrong.append((row, tree.depths[row]))
        at += len(tree)
        for table in plain.values():
            table.release()
    for table in [*tables, *forks]:
        table.release()
    assert wrong == []


@pytest.mark.parametrize("linear", ["triton", "library"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tree_node_has_the_bits_of_plain_decoding(name: str, linear: str):
    run = Run(load(name, linear), seed=1)
    for history, rows in ((1, 2), (15, 5), (63, 16), (64, 16), (65, 12), (1000, 16)):
        expect_plain_bits(run, [run.stored(history)], [run.tree(rows)])


@pytest.mark.parametrize("name", ["random:tiny", "random:smollm2-135m", "random:llama3-1b"])
def test_sequences_run_together_have_the_bits_of_each_alone(name: str):
    run = Run(load(name), seed=2)
    tables = [run.stored(history) for history in (3, 130, 64)]
    expect_plain_bits(run, tables, [run.tree(rows) for rows in (16, 1, 7)])


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_has_the_bits_of_one_that_is_not(name: str):
    captured = load(name)
    eager = CudaDecoder(captured.layers.weights, captured.tokenizer, capture=False, checked=False)
    run = Run(captured, seed=3)
    table = run.stored(100)
    for rows in (1, 16, 1, 16):
        tree = run.tree(rows)
        results = []
        for decoder in (captured, captured, eager):
            with table.reserve(rows) as reserved:
                batch = tree_batch([table], [tree], [reserved.slots])
                logits = decoder.step(batch, run.pool)
                slots = torch.from_numpy(reserved.slots)
                kv = run.pool.data[:, slots // 64, :, :, slots % 64].clone()
                results.append((np.stack([logits.row(i) for i in range(rows)]), kv))
        for logits, kv in results[1:]:
            assert same(logits, results[0][0])
            assert same(kv, results[0][1])
    steps = [step for own in captured.graphs._steps.values() for step in own]
    assert any(step.step.graph is not None for step in steps)
    table.release()


@pytest.mark.parametrize("name", ["random:tiny", "random:smollm2-135m"])
def test_a_long_chain_has_the_bits_of_plain_steps(name: str):
    run = Run(load(name), seed=4)
    ids = run.ids(150)
    whole, single = PageTable(run.pool), PageTable(run.pool)
    for start in (0, 64, 128):
        last = run.step(whole, ids[start : start + 64])
    for token in ids:
        alone = run.step(single, [token])
    assert same(last, alone)
    assert same(run.rows(whole, 0, 150), run.rows(single, 0, 150))
    whole.release()
    single.release()


def prefill(
    decoder: CudaDecoder, table: PageTable, ids: list[int], parts: list[int], start: int = 0
) -> np.ndarray | None:
    """A run of given ids from slot `start`, stopping at `parts` on the way, as turns do."""
    logits = None
    while (done := table.length - start) < len(ids):
        first, size = decoder.chunk(done)
        stop = min(first + size, len(ids), *(p for p in parts if p > done))
        with table.reserve(stop - done) as reserved:
            logits = decoder.prefill(
                ids[done:stop],
                start + first,
                start + done,
                reserved.slots,
                table.entries(),
                table.pool,
                chunk_rows=size,
                want_logits=stop == len(ids),
            )
            reserved.keep(range(stop - done))
    return logits


@pytest.mark.parametrize("start", [0, 77])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_has_the_same_bits_however_it_is_cut(name: str, start: int):
    run = Run(load(name), seed=5)
    longest = min(5000, run.decoder.spec.context_limit - 100 - start)
    ids = run.ids(longest)
    history = run.stored(start) if start else PageTable(run.pool)
    expected: list[np.ndarray | torch.Tensor] = []
    for parts in ([], [1, 77, 200, 1025], [130]):
        table = history.fork()
        half = prefill(run.decoder, table, ids[: longest // 2], parts, start)
        whole = prefill(run.decoder, table, ids, parts, start)
        assert half is not None
        assert whole is not None
        found = [half, whole, run.rows(table, 0, table.length)]
        expected = expected or found
        assert all(same(*pair) for pair in zip(found, expected, strict=True))
        table.release()
    history.release()


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_chunk_has_the_bits_of_one_that_is_not(name: str):
    captured = load(name)
    eager = CudaDecoder(captured.layers.weights, captured.tokenizer, capture=False, checked=False)
    run = Run(captured, seed=8)
    ids = run.ids(700)
    found = []
    for decoder in (captured, captured, eager):
        table = PageTable(run.pool)
        logits = prefill(decoder, table, ids, [600])
        assert logits is not None
        found.append((logits, run.rows(table, 0, 700)))
        table.release()
    for logits, rows in found[1:]:
        assert same(logits, found[0][0])
        assert same(rows, found[0][1])
    assert captured.chunks._chunks
    assert all(chunk._graph is not None for chunk in captured.chunks._chunks.values())


@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_step_agree_within_rounding(name: str):
    run = Run(load(name), seed=6)
    longest = min(2500, run.decoder.spec.context_limit - 100)
    ids = run.ids(longest)
    table, stepped = PageTable(run.pool), PageTable(run.pool)
    given = prefill(run.decoder, table, ids, [])
    while stepped.length < longest:
        logits = run.step(stepped, ids[stepped.length : stepped.length + 64])
    assert given is not None
    error = np.linalg.norm(given - logits) / np.linalg.norm(logits)
    assert error < 0.03, error
    table.release()
    stepped.release()


@pytest.mark.parametrize("name", ["random:tiny", DEFAULT_MODEL])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafted_text_is_plain_text(name: str, temperature: float):
    decoder = load(name)
    ids = decoder.tokenizer.encode("one two three one two three one two three one two")
    texts = []
    for spec in ("none", "tree:15", "chain:7"):
        config = EngineConfig(spec=spec, drafters=("ngram", "random"), pool_tokens=4096)
        engine = Engine(decoder, config, costs={1: 1.0, 16: 1.01}, guard=False)
        found = []
        for seed in range(2):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=96)
            seqs = [
                engine.add(ids[: len(ids) - cut], [False] * (len(ids) - cut), params)
                for cut in (0, 5)
            ]
            engine.generate(seqs)
            found += [seq.tokens for seq in seqs]
            for seq in seqs:
                engine.finish(seq)
        texts.append(found)
        engine.close()
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


def test_a_product_whose_bits_depend_on_the_shape_is_found():
    """The negative control: the check must be able to fail."""
    weight = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)

    def split_by_rows(x: torch.Tensor) -> torch.Tensor:
        pieces = 2 if len(x) > 16 else 1
        parts = zip(x.float().chunk(pieces, 1), weight.float().chunk(pieces, 1), strict=True)
        return torch.stack([torch.stack([a @ b.T for a in left]) for left, b in parts]).sum(0)

    base = row_check.in_pieces(split_by_rows, rows, 16)
    assert row_check.keeps_bits(split_by_rows, rows, base, 16)
    assert not row_check.keeps_bits(split_by_rows, rows, base, 64)


SETTINGS = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 0.5, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.05},
    {"temperature": 0.7, "top_p": 1.0, "top_k": 7},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 2.0, "top_p": 0.999, "top_k": 1000, "min_p": 0.001},
)


@pytest.mark.parametrize("vocab", [320, 49152, 128256])
@pytest.mark.parametrize("kind", ["spread", "rounded", "flat", "forbidden", "signed zeros"])
def test_the_device_picks_what_the_definition_picks(vocab: int, kind: str):
    draw = np.random.default_rng(vocab)
    lines, rows = [], []
    for seed in range(4):
        x = draw.normal(size=vocab) * (1, 3, 6, 12)[seed]
        if kind == "rounded":
            x = np.round(x)
        elif kind == "flat":
            x = x * 0
        elif kind == "forbidden":
            x[draw.random(vocab) < 0.9] = -np.inf
            x[seed] = 1.0
        elif kind == "signed zeros":
            x = np.where(draw.random(vocab) < 0.5, 0.0, -0.0)
        for settings in SETTINGS:
            params = SamplingParams(seed=int(draw.integers(2**63)), **settings)
            lines.append(x.astype(np.float32))
            rows.append((params, int(draw.integers(1 << 20))))
    bad = np.zeros((3, vocab), np.float32)
    bad[0, 7], bad[1, 9], bad[2, 3] = np.nan, np.inf, 3e38
    lines += list(bad)
    rows += [(SamplingParams(temperature=0.01, seed=1), 5)] * 3
    logits = torch.from_numpy(np.stack(lines))
    integers, floats = zip(*(sampling_triton.settings_of(one) for one, _ in rows), strict=True)
    room = sampling_triton.PickRoom.of(
        torch.tensor([len(rows)], dtype=torch.int32, device="cuda"),
        torch.tensor([place - 1 for _, place in rows], dtype=torch.int32, device="cuda"),
        torch.tensor(integers, dtype=torch.int64, device="cuda"),
        torch.tensor(floats, dtype=torch.float64, device="cuda"),
    )
    sampling_triton.pick_rows(logits.cuda(), room)
    picked = room.out.tolist()
    assert picked == sampling_triton.pick_rows_plain(logits, rows)
    assert picked[-3:] == [-1, -1, -1]


def test_a_step_picks_for_each_sequence_with_its_own_settings():
    run = Run(load("random:tiny"), seed=7)
    tables = [run.stored(10), run.stored(70)]
    trees = [run.tree(5), run.tree(3)]
    samplers = [Sampler(SamplingParams(seed=5)), Sampler(SamplingParams(temperature=0))]
    with tables[0].reserve(5) as first, tables[1].reserve(3) as second:
        batch = tree_batch(tables, trees, [first.slots, second.slots])
        logits = run.decoder.step(batch, run.pool)
        logits.sample(samplers)
        for row in range(8):
            own, at = (0, row) if row < 5 else (1, row - 5)
            place = tables[own].length + trees[own].depths[at] + 1
            want = samplers[own].pick(logits.row(row), [], place).token
            assert logits.pick(row) == want
        kept, before = logits.keep(2), logits.row(2)
        run.decoder.step(replace(batch, tokens=batch.tokens[::-1].copy()), run.pool)
    np.testing.assert_array_equal(np.asarray(kept), before)
    with pytest.raises(AssertionError, match="overwritten"):
        logits.row(0)


def test_the_pool_moves_images_and_rows_on_the_device():
    pool = PagePool(
        num_pages=8, page_size=64, num_layers=3, num_kv_heads=2, head_dim=64, device="cuda"
    )
    pool.data.normal_()
    src, dst = pool.take(2)
    for count in (1, 33, 64):
        payload = pool.image(src, count)
        assert len(payload) == pool.payload_bytes(count)
        pool.data[:, dst] = torch.nan
        pool.load(dst, payload, count)
        assert same(pool.data[:, dst, :, :, :count], pool.data[:, src, :, :, :count])
        assert pool.data[:, dst, :, :, count:].isnan().all()
    copied = pool.copy(src)
    assert same(pool.data[:, copied], pool.data[:, src])
    table = PageTable(pool)
    with table.reserve(16) as reserved:
        slots = torch.from_numpy(reserved.slots)
        before = pool.data[:, slots // 64, :, :, slots % 64].clone()
        reserved.keep([0, 2, 5, 15])
    kept = torch.from_numpy(table.slots(0, 4))
    assert same(pool.data[:, kept // 64, :, :, kept % 64], before[[0, 2, 5, 15]])


def test_what_does_not_fit_is_said():
    with pytest.raises(ModelError, match="GiB are free"):
        load("random:tiny").new_pool(1 << 33)
    decoder = load("random:tiny")
    run = Run(decoder)
    table = run.stored(3)
    with table.reserve(65) as reserved:
        batch = chain_batch(table, [1] * 65, reserved.slots, want_logits=True)
        with pytest.raises(ValueError, match="65 rows of one sequence"):
            decoder.step(batch, run.pool)
    with table.reserve(1) as reserved:
        batch = chain_batch(table, [decoder.spec.vocab_size], reserved.slots, want_logits=True)
        with pytest.raises(ValueError, match="outside"):
            decoder.step(batch, run.pool)


@pytest.mark.parametrize("name", ["random:tiny", "random:llama3-1b", DEFAULT_MODEL])
def test_tapped_residuals_have_the_bits_of_plain_decoding(name: str) -> None:
    decoder = load(name)
    last = decoder.spec.num_layers
    run = Run(decoder, seed=5)
    prompt, ids = run.ids(40), run.ids(6)
    kept = []
    try:
        decoder.tap((1, last))
        for parts in ([ids], [ids[:3], ids[3:5], ids[5:]]):
            table = PageTable(run.pool)
            run.step(table, prompt)
            for part in parts:
                with table.reserve(len(part)) as reserved:
                    batch = chain_batch(table, part, reserved.slots, want_logits=True)
                    result = decoder.step(batch, run.pool)
                    reserved.keep(range(len(part)))
            kept.append(result.features([len(part) - 1]))
            run.step(PageTable(run.pool), prompt)  # what is kept outlives other steps
    finally:
        decoder.tap(())
    whole, cut = (np.array(features) for features in kept)
    assert whole.shape == (1, 2, decoder.spec.hidden_size)
    assert same(whole, cut)


def test_tapped_residuals_of_a_prompt_do_not_depend_on_where_it_was_cut() -> None:
    decoder = load(DEFAULT_MODEL)
    run = Run(decoder, seed=5)
    ids = run.ids(700)
    found = []
    try:
        decoder.tap((10, 20, decoder.spec.num_layers), 40)
        for cut in (600, 660, 690):
            table = PageTable(run.pool)
            for stop in (cut, len(ids)):
                while (known := table.length) < stop:
                    first, rows = decoder.chunk(known)
                    end = min(first + rows, stop)
                    with table.reserve(end - known) as reserved:
                        decoder.prefill(
                            ids[known:end], first, known, reserved.slots, table.entries(),
                            run.pool, chunk_rows=rows, want_logits=False, tapped=1,
                        )  # fmt: skip
                        reserved.keep(range(end - known))
            found.append(np.array(decoder.prompt_features(10)))
        batch_table = PageTable(run.pool)
        for first in range(0, len(ids), 50):
            part = ids[first : first + 50]
            with batch_table.reserve(len(part)) as reserved:
                batch = chain_batch(batch_table, part, reserved.slots, want_logits=False, tapped=50)
                result = decoder.step(batch, run.pool)
                reserved.keep(range(len(part)))
        stepped = np.array(result.features(range(40, 50)))
    finally:
        decoder.tap(())
    assert found[0].shape == (10, 3, decoder.spec.hidden_size)
    assert all(same(found[0], other) for other in found[1:])
    # The step's products round otherwise.
    assert np.abs(stepped - found[0]).mean() < 0.02 * np.abs(stepped).mean()
