"""The CPU's forward pass over quantised pools: exact against itself, near the plain pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chatkv.attention.hadamard import hadamard
from chatkv.attention.reference import dequantise
from chatkv.batch import chain_batch, tree_batch
from chatkv.errors import BackendUnavailable, ConfigError
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.keys import fingerprint
from chatkv.kv.table import PageTable
from chatkv.models import weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.spec.tree import DraftTree
from chatkv.tokenizer import Tokenizer

FORMATS = [KVFormat("int8"), KVFormat("int4"), KVFormat("int4", keep_layers=(2,))]


@pytest.fixture(scope="module")
def wide(make_gguf, cache, tmp_path_factory) -> Decoder:
    """The tiny model with heads that int4 can hold."""
    path = make_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", head_dim=64, seed=3)
    model = weights.load(ModelFile("wide", path))
    return Decoder(model, Tokenizer.from_file(model.folder / "tokenizer.json"))


def table_of(model: Decoder, kv: KVFormat) -> PageTable:
    """An empty table of a pool in which whatever nobody wrote is NaN."""
    pool = model.new_pool(256, kv)
    for tensor in pool.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    return PageTable(pool)


def step(model: Decoder, table: PageTable, ids: list[int]) -> np.ndarray:
    with table.reserve(len(ids)) as reserved:
        batch = chain_batch(table, ids, reserved.slots, want_logits=True)
        logits = model.step(batch, table.pool).row(0).copy()
        reserved.keep(range(len(ids)))
    return logits


def rows(table: PageTable) -> list[bytes]:
    return [table.pool.row(slot).numpy().tobytes() for slot in table.slots(0, table.length)]


@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_decoding_one_by_one_has_the_bits_of_one_chain_and_of_a_prompt(wide, kv):
    ids = np.random.default_rng(1).integers(3, wide.spec.vocab_size, 60).tolist()
    alone, chain, prompt = (table_of(wide, kv) for _ in range(3))
    single = [step(wide, alone, [token]) for token in ids][-1]
    np.testing.assert_array_equal(step(wide, chain, ids), single)
    with prompt.reserve(len(ids)) as reserved:
        logits = wide.prefill(
            ids, 0, 0, reserved.slots, prompt.entries(), prompt.pool,
            chunk_rows=wide.chunk_tokens, want_logits=True,
        )  # fmt: skip
        np.testing.assert_array_equal(logits, single)
        reserved.keep(range(len(ids)))
    assert rows(alone) == rows(chain) == rows(prompt)


@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_a_tree_and_its_neighbours_have_the_bits_of_plain_decoding(wide, kv):
    first, plain = table_of(wide, kv), table_of(wide, kv)
    other = PageTable(first.pool)
    step(wide, first, [5, 6, 7])
    step(wide, other, list(range(3, 40)))
    step(wide, plain, [5, 6, 7])
    trees = [DraftTree.of([8, 9, 10, 11], [0, 0, 0, 2]), DraftTree.of([12, 13], [0, 0])]
    with first.reserve(4) as a, other.reserve(2) as b:
        result = wide.step(tree_batch([first, other], trees, [a.slots, b.slots]), first.pool)
        logits = [result.row(row).copy() for row in range(4)]
        a.keep([0, 2, 3])  # moves codes and scales of rows that were accepted
        b.keep([0])
    for token, row in ((8, 0), (10, 2), (11, 3)):
        np.testing.assert_array_equal(step(wide, plain, [token]), logits[row])
    assert rows(first) == rows(plain)
    np.testing.assert_array_equal(step(wide, first, [14]), step(wide, plain, [14]))


@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_codes_are_the_rows_of_a_plain_pool(wide, kv):
    ids = list(range(5, 45))
    exact, coded = table_of(wide, PLAIN), table_of(wide, kv)
    near = step(wide, exact, ids) - step(wide, coded, ids)
    assert np.sqrt((near**2).mean()) < (0.05 if kv.name == "int8" else 0.6)
    size, slots = exact.pool.page_size, torch.from_numpy(exact.slots(0, 40))
    (plain, _), (codes, scales) = exact.pool.layers[0], coded.pool.layers[0]
    values, scales = (
        codes[slots // size, :, :, slots % size],
        scales[slots // size, :, :, slots % size],
    )
    expected = plain[slots // size, :, :, slots % size].float()
    spread = expected.abs()
    # A key's roundings to bfloat16 in the plain pool go to all channels here.
    spread[:, 0] = expected[:, 0].norm(dim=-1, keepdim=True)
    expected[:, 0] = hadamard(expected[:, 0])
    error = (dequantise(values, scales, torch.float32) - expected).abs()
    assert (error <= scales.float().amax(-1, keepdim=True) * 0.5 + spread * 2**-8).all()


def test_sizes(wide):
    plain = wide.new_pool(64).token_bytes
    assert plain / wide.new_pool(64, KVFormat("int8")).token_bytes > 1.9
    assert plain / wide.new_pool(64, KVFormat("int4")).token_bytes > 3.5


def test_what_the_cpu_lacks_is_refused(wide, tiny):
    for refused in (wide.new_pool, wide.identity):
        with pytest.raises(BackendUnavailable, match="fp8"):
            refused(16, KVFormat("fp8"))
    with pytest.raises(BackendUnavailable, match="has 32"):
        tiny.new_pool(16, KVFormat("int4"))
    with pytest.raises(ConfigError, match="layer 4 of 3"):
        wide.new_pool(16, KVFormat("int8", keep_layers=(4,)))


def test_formats_share_no_pages(wide):
    formats = [PLAIN, *FORMATS, KVFormat("int4", keep_layers=(1,))]
    assert len({fingerprint(wide.identity(16, kv)) for kv in formats}) == len(formats)
    assert wide.identity(16) == wide.identity(16, PLAIN)
    assert "token_bytes" not in wide.identity(16)
