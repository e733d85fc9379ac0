"""Where a model is loaded, and the one sentence that says why not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from chatkv.errors import BackendUnavailable, ModelError, UnknownModel
from chatkv.models import catalog, devices, weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.models.random_model import random_weights, tokenizer_of
from chatkv.spec.drafters.draft_model import expect_same_tokenizer
from chatkv.tokenizer import Tokenizer

GGUF = ModelFile("m", Path("m.gguf"))


@pytest.fixture
def cpu_loads(monkeypatch):
    """The CPU's decoder is asked for, not loaded."""
    monkeypatch.setattr(Decoder, "load", lambda file, **_: f"{file.name} on cpu")


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def old_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "Old Card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("no_cuda", "cpu_loads")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_device_it_is_the_cpu(device):
    assert devices.load_model(GGUF, device) == ("m on cpu", "")


@pytest.mark.usefixtures("no_cuda", "cpu_loads")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "npu"])
def test_a_named_device_is_never_replaced(device):
    with pytest.raises(BackendUnavailable) as caught:
        devices.load_model(GGUF, device)
    assert "--device cpu" in caught.value.hint


@pytest.mark.usefixtures("old_card", "cpu_loads")
def test_auto_says_why_a_card_that_is_here_is_not_used():
    model, notice = devices.load_model(GGUF, "auto")
    assert model == "m on cpu"
    assert "7.5" in notice
    assert "8.0 is needed" in notice
    with pytest.raises(BackendUnavailable, match=r"7\.5"):
        devices.load_model(GGUF, "cuda")
    with pytest.raises(BackendUnavailable, match="1 CUDA devices"):
        devices.load_model(GGUF, "cuda:3")


def test_triton_is_missed_by_name(old_card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="triton is not installed"):
        devices.expect_cuda()


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("name", "part"), [("random:tiny", "Random weights run"), ("folder", "A folder of safetensors")]
)
def test_what_the_cpu_cannot_run(tmp_path, name, part):
    (tmp_path / "config.json").write_text("{}")
    file = catalog.find(tmp_path if name == "folder" else name)
    with pytest.raises(BackendUnavailable, match=part):
        devices.load_model(file, "auto")


def test_a_shape_that_no_kernel_serves():
    pytest.importorskip("triton")
    from dataclasses import replace

    from chatkv.models.cuda_load import expect_shape
    from chatkv.models.random_model import SHAPES

    expect_shape(SHAPES["tiny"])
    with pytest.raises(BackendUnavailable, match="heads of size 72"):
        expect_shape(replace(SHAPES["tiny"], head_dim=72))


def test_a_pool_that_does_not_fit_says_what_would(monkeypatch):
    from chatkv.kv import pool

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(pool.torch, "empty", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    with pytest.raises(ModelError) as caught:
        pool.PagePool(
            num_pages=2**15, page_size=64, num_layers=32, num_kv_heads=8, head_dim=128,
            device="cuda",
        )  # fmt: skip
    assert "2,097,152 tokens need 256.0 GiB" in caught.value.message
    assert "1.0 GiB are free" in caught.value.message
    assert caught.value.hint == "About 7,360 tokens fit: --context 7360."


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_random_model_takes_the_tokenizer_of_one_that_is_here(
    device, make_gguf, cache, tmp_path, monkeypatch
):
    """A draft model that may be named beside the default one, and guesses nothing right."""
    base = ModelFile("base", make_gguf(tmp_path / "base.gguf"))
    monkeypatch.setattr(catalog, "find", lambda name: base)
    real = weights.load(base)
    tokenizer = Tokenizer.from_file(real.folder / "tokenizer.json")

    def made(name):
        if device == "cuda":
            dense = random_weights(name, torch.device("cpu"), torch.float32)
            return dense.spec, tokenizer_of(name), dense.embedding.numpy()
        model, _ = devices.load_model(ModelFile(name, Path(name), "random"), "cpu")
        rows = np.arange(model.spec.vocab_size)
        return model.spec, model.tokenizer, model.vocabulary_rows(rows, of_head=False)

    name = f"random:{catalog.DEFAULT_MODEL}"
    (spec, own, first), (same, _, again), (seeded, _, other) = (
        made(name + seed) for seed in ("", "@0", "@4")
    )
    expect_same_tokenizer(tokenizer, own)
    assert own.tok_fp() == tokenizer.tok_fp()
    assert (spec.vocab_size, spec.eos_ids) == (real.spec.vocab_size, real.spec.eos_ids)
    assert spec == same
    assert spec.weights_digest != seeded.weights_digest
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.isfinite(first).all()
    with pytest.raises(UnknownModel, match="No random model"):
        made("random:nobody")
