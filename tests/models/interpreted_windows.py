"""The device's pass of models with sliding windows, in float32. Run by test_interpreted.py; slow.

The interpreter multiplies through the host's BLAS, whose bits depend on shapes: values only.
"""

# Loops here always run.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from chatkv.batch import chains_batch
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.ops import Op
from chatkv.kv.table import PageTable
from chatkv.models import random_model
from chatkv.models.chunks import Chunking
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.folder import ModelFolder

# Attention leaves rows that are padding as it finds them.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
}
MIXED = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("Mistral", {"sliding_window": 9}),
    "mixed": ("Ministral", MIXED),
}
IDS = np.random.default_rng(0).integers(0, 256, 30).tolist()


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CudaDecoder, Any]:
    """Our decoder and transformers' model, with the same random weights."""
    kind, settings = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for tensor in model.parameters():
        tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(tmp_path)
    weights = ModelFolder(tmp_path).load(torch.device("cpu"), torch.float32)
    decoder = CudaDecoder(weights, random_model.byte_tokenizer(), capture=False, checked=False)
    decoder.chunks.chunking = Chunking(8, 8)
    return decoder, model


def table_of(decoder: CudaDecoder, kv: KVFormat = PLAIN) -> PageTable:
    pool = decoder.new_pool(512, kv)
    for tensor in pool.tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    return PageTable(pool)


def step(decoder: CudaDecoder, table: PageTable, ids: list[int]) -> np.ndarray:
    """[len(ids), V]."""
    with table.reserve(len(ids)) as reserved:
        result = decoder.step(chains_batch([table], [ids], [reserved.slots]), table.pool)
        rows = np.stack([result.row(row) for row in range(len(ids))])
        reserved.keep(range(len(ids)))
    return rows


def prefill(decoder: CudaDecoder, table: PageTable, ids: list[int]) -> np.ndarray:
    while (known := table.num_tokens) < len(ids):
        base = table.stage.base
        first, rows = decoder.chunk(known - base)
        stop = min(base + first + rows, len(ids))
        with table.reserve(stop - known) as reserved:
            logits = decoder.prefill(
                ids[known:stop], table.slot(base + first), table.slot(known), reserved.slots,
                table.entries(), table.pool, chunk_rows=rows, want_logits=True,
                holes=table.holes(),
            )  # fmt: skip
            reserved.keep(range(stop - known))
    assert logits is not None
    return logits


def test_prompt_and_step_are_transformers_past_the_window(made: tuple[CudaDecoder, Any]) -> None:
    decoder, model = made
    expected = model(torch.tensor([IDS])).logits[0].numpy()
    near = {"rtol": 1e-3, "atol": 2e-4}
    np.testing.assert_allclose(prefill(decoder, table_of(decoder), IDS), expected[-1], **near)
    table = table_of(decoder)
    for start in (0, 14, 28):
        rows = step(decoder, table, IDS[start : start + 14])
        np.testing.assert_allclose(rows, expected[start : start + len(rows)], **near)


@pytest.mark.parametrize("made", ["mixed"], indirect=True)
@pytest.mark.parametrize("kv", [PLAIN, KVFormat("int8")], ids=str)
def test_prompt_and_step_agree_behind_a_gap(made: tuple[CudaDecoder, Any], kv: KVFormat) -> None:
    decoder, _ = made
    found = []
    for stepped in (False, True):
        table = table_of(decoder, kv)
        prefill(decoder, table, IDS[:22])
        table.forget(Op(22, ((3, 6), (17, 19))))
        found.append(
            step(decoder, table, IDS[22:])[-1] if stepped else prefill(decoder, table, IDS)
        )
    # Codes round where sums in another order fall on the other side.
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-4 if kv is PLAIN else 3e-2)
