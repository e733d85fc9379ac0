"""The device's whole pass on a tiny model, in float32. Run by test_interpreted.py; slow there.

The interpreter multiplies through the host's BLAS, whose bits depend on shapes: values only.
"""

# Loops here always run.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from chatkv.batch import chain_batch, tree_batch
from chatkv.kv.ops import Op
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable
from chatkv.models import cuda_layers, random_model
from chatkv.models.chunks import Chunking
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.device_rows import DeviceRow
from chatkv.models.tree_rows import TreeRows
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.heads.device import GROWTH, grower_of
from chatkv.spec.heads.file import HeadFile
from chatkv.spec.heads.grow import RecurrentCell, Vocabulary, grow
from chatkv.spec.heads.modules import new_head
from chatkv.spec.heads.shape import shape_for
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree

# Attention leaves rows that are padding as it finds them.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
Make = Callable[..., CudaDecoder]


@pytest.fixture
def make() -> Make:
    def build(name: str, linear: str = "triton") -> CudaDecoder:
        weights = random_model.random_weights(name, torch.device("cpu"), torch.float32)
        tokenizer = random_model.byte_tokenizer()
        decoder = CudaDecoder(weights, tokenizer, linear=linear, capture=False, checked=False)  # type: ignore[arg-type]
        decoder.chunks.chunking = Chunking(8, 16)
        return decoder

    return build


def pool_of(decoder: CudaDecoder) -> PagePool:
    pool = decoder.new_pool(512)
    pool.data.fill_(torch.nan)
    return pool


def step(decoder: CudaDecoder, table: PageTable, ids: list[int]) -> np.ndarray:
    with table.reserve(len(ids)) as reserved:
        batch = chain_batch(table, ids, reserved.slots, want_logits=True)
        logits = decoder.step(batch, table.pool).row(0)
        reserved.keep(range(len(ids)))
    return logits


def prefill(decoder: CudaDecoder, table: PageTable, ids: list[int], stops: list[int]) -> np.ndarray:
    """Given ids through their chunks, in as many turns as there are stops."""
    for end in (*stops, len(ids)):
        while (known := table.num_tokens) < end:
            base = table.stage.base
            first, rows = decoder.chunk(known - base)
            stop = min(base + first + rows, end)
            with table.reserve(stop - known) as reserved:
                logits = decoder.prefill(
                    ids[known:stop], table.slot(base + first), table.slot(known), reserved.slots,
                    table.entries(), table.pool, chunk_rows=rows, want_logits=stop == end,
                    holes=table.holes(),
                )  # fmt: skip
                reserved.keep(range(stop - known))
    assert logits is not None
    return logits


@pytest.mark.parametrize("narrow", [0, 1024])
@pytest.mark.parametrize("name", ["random:tiny", "random:tiny-qwen2", "random:tiny-qwen3"])
def test_prompt_and_step_agree(name: str, narrow: int, make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_layers, "NARROW", narrow)
    decoder = make(name)
    pool = pool_of(decoder)
    ids = np.random.default_rng(0).integers(0, 256, 20).tolist()
    given = prefill(decoder, PageTable(pool), ids, [])
    np.testing.assert_array_equal(prefill(decoder, PageTable(pool), ids, [5, 12]), given)
    stepped = PageTable(pool)
    step(decoder, stepped, ids[:15])
    np.testing.assert_allclose(step(decoder, stepped, ids[15:]), given, rtol=1e-3, atol=1e-4)
    library = make(name, "library")
    with_library = step(library, PageTable(pool), ids)
    np.testing.assert_allclose(with_library, given, rtol=1e-3, atol=1e-4)


def test_a_tree_is_plain_decoding_and_picks_like_its_sampler(make: Make):
    decoder = make("random:tiny")
    pool = pool_of(decoder)
    first, second = PageTable(pool), PageTable(pool)
    step(decoder, first, [1, 2, 3])
    step(decoder, second, list(range(20)))
    trees = [DraftTree.of([5, 6, 7, 8], [0, 0, 0, 1]), DraftTree.of([9, 4], [0, 0])]
    samplers = [Sampler(SamplingParams(seed=1)), Sampler(SamplingParams(temperature=0))]
    with first.reserve(4) as a, second.reserve(2) as b:
        batch = tree_batch([first, second], trees, [a.slots, b.slots])
        result = decoder.step(batch, pool)
        result.sample(samplers)
        rows = [result.row(row) for row in range(6)]
        for row, line in enumerate(rows):
            own, at, length = (0, row, 3) if row < 4 else (1, row - 4, 20)
            place = length + trees[own].depths[at] + 1
            assert result.pick(row) == samplers[own].pick(line, [], place).token
        a.keep([0, 1, 3])
        b.keep([0])
    plain = PageTable(pool)
    step(decoder, plain, [1, 2, 3])
    for token, row in ((5, 0), (6, 1), (8, 3)):
        alone = step(decoder, plain, [token])
        np.testing.assert_allclose(alone, rows[row], rtol=1e-4, atol=1e-5)
    # What was kept is what plain decoding stored.
    kept = step(decoder, first, [11])
    np.testing.assert_allclose(kept, step(decoder, plain, [11]), rtol=1e-4, atol=1e-5)


def test_what_was_forgotten_is_not_seen(make: Make) -> None:
    """Prompt and step agree behind a gap, and with other ids in the gap nothing changes: only its
    influence on rows computed before the op is left."""
    decoder = make("random:tiny")
    pool = pool_of(decoder)
    ids = np.random.default_rng(1).integers(0, 256, 110).tolist()
    op = Op(90, ((70, 90),))

    def after(start: list[int], stepped: bool, stops: list[int]) -> np.ndarray:
        table = PageTable(pool)
        try:
            prefill(decoder, table, start, [])
            table.forget(op)
            if stepped:
                step(decoder, table, ids[90:100])
                return step(decoder, table, ids[100:])
            return prefill(decoder, table, ids, stops)
        finally:
            table.release()

    expected = after(ids[:90], False, [])
    other = [*ids[:70], *ids[:20]]
    for logits in (
        after(ids[:90], True, []),
        after(ids[:90], False, [95]),
        after(other, False, []),
    ):
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    whole = prefill(decoder, PageTable(pool), ids, [])
    assert not np.allclose(whole, expected, rtol=1e-2, atol=1e-2)


def test_tapped_residuals_are_a_rows_own(make: Make) -> None:
    decoder = make("random:tiny")
    ids = [5, 9, 200, 7]
    pool = pool_of(decoder)
    untapped = step(decoder, PageTable(pool), ids)
    decoder.tap((1, 2))

    def features(parts: list[list[int]]) -> np.ndarray:
        table = PageTable(pool)
        for part in parts:
            with table.reserve(len(part)) as reserved:
                batch = chain_batch(table, part, reserved.slots, want_logits=True)
                result = decoder.step(batch, pool)
                reserved.keep(range(len(part)))
        np.testing.assert_allclose(result.row(0), untapped, atol=1e-4)
        kept = result.features([len(part) - 1])
        with table.reserve(1) as reserved:
            decoder.step(chain_batch(table, [3], reserved.slots, want_logits=True), pool)
        return np.array(kept)[0]

    whole = features([ids])
    assert whole.shape == (2, decoder.spec.hidden_size)
    assert np.abs(whole[0] - whole[1]).max() > 0
    np.testing.assert_allclose(whole, features([ids[:2], ids[2:3], ids[3:]]), atol=1e-4)
    # A prompt leaves them for its last rows, wherever its chunk was cut.
    decoder.tap((1, 2), 3)
    for stops in ([], [2], [3]):
        prefill(decoder, PageTable(pool), ids, stops)
        kept = np.array(decoder.prompt_features(1 if stops else 3))
        np.testing.assert_allclose(kept[-1], whole, atol=1e-4)
        assert kept.shape == (1 if stops else 3, 2, decoder.spec.hidden_size)


def test_rows_of_others_behind_a_grown_tree(make: Make) -> None:
    """Each row as in a step of its own tree."""
    decoder = make("random:tiny")
    pool = pool_of(decoder)
    table = PageTable(pool)
    step(decoder, table, [1, 2, 3])
    own = DraftTree.of([5, *range(10, 25)], [0, 0, 0, 1, 1, 2, 3, *range(6, 15)])
    others = DraftTree.of([5, 30, 31, 32], [0, 0, 1, 0])
    rows = TreeRows.empty(16, torch.device("cpu"))
    rows.tokens.copy_(torch.from_numpy(own.tokens.copy()))
    rows.positions.copy_(torch.tensor(own.depths, dtype=torch.int32) + 3)
    rows.ancestors.copy_(torch.from_numpy(own.ancestors())[:, None])
    both = GrownTree(5, max(own.depths), rows, lambda: own)
    both.beside, both.runs_beside = others, True
    found: list[np.ndarray] = []
    for tree in (own, others, both):
        with table.reserve(len(tree)) as reserved:
            result = decoder.step(tree_batch([table], [tree], [reserved.slots]), pool)
            found.append(np.stack([result.row(row) for row in range(len(tree))]))
    expected = np.concatenate([found[0], found[1][1:]])
    np.testing.assert_allclose(found[2], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_grows_the_tree_of_its_modules(make: Make, temperature: float) -> None:
    decoder = make("random:tiny")
    spec, weights = decoder.spec, decoder.layers.weights
    torch.manual_seed(2)
    head = new_head(shape_for("recurrent", spec, draft_ids=64)).requires_grad_(False)
    file = HeadFile(head, torch.arange(64) * 3, {})
    taps = torch.randn(2, spec.hidden_size)[[0, 1, 1]]
    grower = grower_of(file, decoder)
    for _ in range(2):
        tokens, parents, chance = grower.grow(
            DeviceRow(taps[None], 0), 7, 30, temperature=temperature, seed=9, max_rows=16
        )
    sampler = Sampler(SamplingParams(temperature=temperature, seed=9))
    ids = file.draft_ids.numpy()
    noise = [sampler.noise(30 + depth, ids) for depth in range(GROWTH.depth)]
    expected = grow(
        head,
        RecurrentCell(head, taps[None]),  # type: ignore[arg-type]
        Vocabulary.of(file.draft_ids, weights.head, weights.embedding),
        torch.tensor([7]),
        GROWTH,
        inverse_t=torch.tensor([1 / temperature if temperature else 1.0]),
        noise=torch.from_numpy(np.stack(noise))[None],
    )
    assert tokens == expected.tokens[0].tolist()
    assert parents == expected.parents[0].tolist()
    np.testing.assert_allclose(chance, expected.chance[0], rtol=1e-4)
