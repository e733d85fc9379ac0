"""Model folders: logits as transformers', and a clear refusal of what is not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chatkv.errors import BadWeights, UnknownModel
from chatkv.models import random_model
from chatkv.models.chunks import attend_chunk_plain
from chatkv.models.dense import DenseWeights
from chatkv.models.folder import ModelFolder

pytest.importorskip("triton")
from chatkv.models import fused_triton as fused
from chatkv.models import heads_triton
from chatkv.models.cuda_layers import Layers

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 20}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def save(path: Path, family: str, **more: Any) -> Any:
    """A random model of transformers, saved; and the model."""
    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **settings, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(path)
    random_model.byte_tokenizer()._core.save(str(path / "tokenizer.json"))
    special = {"chat_template": random_model.TEMPLATE, "eos_token": {"content": "<|end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    return model


def plain_logits(weights: DenseWeights, ids: list[int]) -> torch.Tensor:
    """[T, V] by the plain versions of everything the device runs."""
    spec, rows = weights.spec, len(ids)
    rotary = Layers(weights, backend=None)._rotaries  # type: ignore[arg-type]
    hidden = weights.embedding[ids].clone()
    x, where = torch.empty_like(hidden), torch.arange(rows, dtype=torch.int32)
    for place, (layer, angles) in enumerate(zip(weights.layers, rotary, strict=True)):
        fused.norm_rows_plain(hidden, None, layer.attention_norm, spec.norm_eps, x)
        q = torch.zeros(rows, spec.num_heads, spec.head_dim)
        pages = torch.zeros(1, 2, spec.num_kv_heads, 64, spec.head_dim)
        qkv = x @ layer.qkv.T
        heads_triton.rotate_rows_plain(qkv, layer.bias, angles, where, where.long(), q, pages)
        keys, values = pages[0, :, :, :rows]
        window, scale = spec.window(place), spec.head_dim**-0.5
        if window is None:
            attended = attend_chunk_plain(q, keys, values, 0, scale)
        else:
            attended = without_old_keys(q, keys, values, window, scale)
        fused.norm_rows_plain(
            hidden, attended.flatten(1) @ layer.o.T, layer.feed_norm, spec.norm_eps, x
        )
        act = torch.zeros(rows, spec.intermediate_size)
        fused.gate_rows_plain(x @ layer.gate_up.T, act)
        hidden += act @ layer.down.T
    fused.norm_rows_plain(hidden, None, weights.norm, spec.norm_eps, x)
    return x @ weights.head.T


def without_old_keys(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """Each row alone, with the keys deleted that its window hides."""
    rows = []
    for row in range(len(q)):
        first = max(0, row - window + 1)
        seen = slice(first, row + 1)
        rows.append(
            attend_chunk_plain(q[row][None], keys[:, seen], values[:, seen], row - first, scale)
        )
    return torch.cat(rows)


WINDOWS = {"mistral": (20, 20), "ministral": (7, None), "qwen2-mixed": (None, 11)}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    model = save(tmp_path, family)
    folder = ModelFolder(tmp_path)
    weights = folder.load(CPU, torch.float32)
    ids = torch.randint(0, 320, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = model(torch.tensor([ids])).logits[0]
    actual = plain_logits(weights, ids)
    assert torch.allclose(actual, expected, rtol=1e-3, atol=2e-4), (actual - expected).abs().max()
    assert (weights.head is weights.embedding) == (family == "llama3")
    assert folder.spec.context_limit == 256
    assert folder.spec.windows == WINDOWS.get(family, ())
    assert folder.spec.eos_ids == (256,)


def test_tokenizer_and_template_come_with_the_folder(tmp_path: Path):
    save(tmp_path, "llama")
    tokenizer = ModelFolder(tmp_path).tokenizer()
    assert tokenizer.decode(tokenizer.encode("näher <b>")) == "näher <b>"
    assert tokenizer.encode("<|end|>") == [256]
    assert tokenizer.prefix_stable()
    assert tokenizer.tok_fp() == ModelFolder(tmp_path).tokenizer().tok_fp()


def test_the_digest_follows_content(tmp_path: Path):
    save(tmp_path, "llama")
    before = ModelFolder(tmp_path).spec.weights_digest
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert ModelFolder(tmp_path).spec.weights_digest != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu, not SiLU"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rotary positions .yarn"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"intermediate_size": 128}, "the config says"),
        ({"hidden_size": None}, "lacks or garbles"),
    ],
)
def test_what_is_not_run_is_refused(change: dict[str, Any], words: str, tmp_path: Path):
    save(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadWeights, match=words):
        ModelFolder(tmp_path).load(CPU, torch.float32)


def test_a_folder_without_a_whole_model_is_refused(tmp_path: Path):
    with pytest.raises(BadWeights, match=r"has no config\.json"):
        ModelFolder(tmp_path)
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadWeights, match="cannot be read"):
        ModelFolder(tmp_path)
    file.rename(tmp_path / "model.bin")
    with pytest.raises(BadWeights, match="has no safetensors"):
        ModelFolder(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadWeights, match="is not there"):
        ModelFolder(tmp_path)


def test_random_models_are_the_same_by_name_and_seed():
    first, again, other = (
        random_model.random_weights(name, CPU, torch.float32)
        for name in ("random:tiny", "random:tiny@0", "random:tiny@1")
    )
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert not torch.equal(first.layers[1].down, other.layers[1].down)
    assert first.spec == again.spec != other.spec
    for name in ("random:huge", "random:tiny@x"):
        with pytest.raises(UnknownModel, match="No random model"):
            random_model.random_weights(name, CPU, torch.float32)


def test_the_byte_tokenizer_is_a_chat_tokenizer():
    tokenizer = random_model.byte_tokenizer()
    assert tokenizer.encode("a\n€") == list("a\n€".encode())
    assert tokenizer.decode([*"€".encode(), 256, 300]) == "€"
    assert tokenizer.prefix_stable()
