"""A tiny Llama written as a real GGUF, and transformers' Llama built from our own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
)

from chatkv.models import catalog, weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.models.weights import Weights
from chatkv.tokenizer import Tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INNER = 128, 3, 4, 2, 32, 192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "e r", "Ġ a", "a n"]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    named = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [named[b] for b in range(256)]


def write_gguf(
    path: Path,
    *,
    linear: str = "Q4_1",
    vocabulary: str = "Q8_0",
    architecture: str = "llama",
    tied: bool = True,
    template: str = TEMPLATE,
    head_dim: int = DIM,
    seed: int = 0,
    window: int | None = None,
    slides: list[bool] | None = None,
) -> Path:
    """A random Llama of three layers with a byte-level tokenizer."""
    tokens = [*SPECIAL, *byte_characters(), *(m.replace(" ", "") for m in MERGES)]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 16)]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if window is not None:
        writer.add_sliding_window(window)
    if slides is not None:
        writer.add_sliding_window_pattern(slides)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(template)
    rng = np.random.default_rng(seed)

    def add(name: str, shape: tuple[int, ...], kind: str) -> None:
        if kind == "F32":
            writer.add_tensor(name, (1 + 0.1 * rng.normal(size=shape)).astype(np.float32))
            return
        values = (rng.normal(size=shape) / np.sqrt(shape[1]) * 1.5).astype(np.float32)
        dtype = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor(name, gguf.quantize(values, dtype), raw_dtype=dtype)

    add("token_embd.weight", (len(tokens), HIDDEN), vocabulary)
    if not tied:
        add("output.weight", (len(tokens), HIDDEN), vocabulary)
    add("output_norm.weight", (HIDDEN,), "F32")
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", (HIDDEN,), "F32")
        add(f"blk.{i}.ffn_norm.weight", (HIDDEN,), "F32")
        add(f"blk.{i}.attn_q.weight", (HEADS * head_dim, HIDDEN), linear)
        add(f"blk.{i}.attn_k.weight", (KV_HEADS * head_dim, HIDDEN), linear)
        add(f"blk.{i}.attn_v.weight", (KV_HEADS * head_dim, HIDDEN), linear)
        add(f"blk.{i}.attn_output.weight", (HIDDEN, HEADS * head_dim), linear)
        add(f"blk.{i}.ffn_gate.weight", (INNER, HIDDEN), linear)
        add(f"blk.{i}.ffn_up.weight", (INNER, HIDDEN), linear)
        add(f"blk.{i}.ffn_down.weight", (HIDDEN, INNER), linear)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def oracle_of(model: Weights) -> Any:
    """transformers' Llama in float32 with our dequantised tensors; with windows, its Ministral."""
    spec = model.spec
    kinds, windows = (LlamaConfig, LlamaForCausalLM), {}
    if spec.windows:
        kinds = (MinistralConfig, MinistralForCausalLM)
        types = {True: "full_attention", False: "sliding_attention"}
        windows = {
            "sliding_window": max(window for window in spec.windows if window is not None),
            "layer_types": [types[window is None] for window in spec.windows],
        }
    config = kinds[0](
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.context_limit,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
        **windows,
    )
    tensors = {
        "model.embed_tokens.weight": model.dense(model.vocabulary),
        "lm_head.weight": model.dense(model.head),
        "model.norm.weight": model.norms[-1],
    }
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for i, layer in enumerate(model.layers):
        q, k, v = np.split(model.dense(layer["qkv"]), [wide, wide + narrow])
        pairs = model.dense(layer["gate_up"]).reshape(-1, 2, 32, spec.hidden_size)
        gate, up = (pairs[:, j].reshape(-1, spec.hidden_size) for j in (0, 1))
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": model.dense(layer["o"]),
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": model.dense(layer["down"]),
            "input_layernorm": model.norms[2 * i],
            "post_attention_layernorm": model.norms[2 * i + 1],
        }
        tensors |= {f"model.layers.{i}.{name}.weight": part for name, part in parts.items()}
    oracle = kinds[1](config).eval().requires_grad_(False)
    oracle.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()})
    return oracle


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of these tests' own, for as long as they run."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("CHATKV_CACHE_DIR", str(folder))
    yield folder
    patch.undo()


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one test, to be damaged."""
    monkeypatch.setenv("CHATKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_weights(cache: Path, tiny_path: Path) -> Weights:
    return weights.load(ModelFile("tiny", tiny_path))


@pytest.fixture(scope="session")
def tiny(tiny_weights: Weights) -> Decoder:
    return Decoder(
        tiny_weights, Tokenizer.from_file(tiny_weights.folder / "tokenizer.json"), threads=2
    )


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., Path]:
    return write_gguf


@pytest.fixture(scope="session")
def make_oracle() -> Callable[[Weights], Any]:
    return oracle_of


@pytest.fixture(scope="session")
def default_file(cache: Path) -> ModelFile:
    """The default model, where it is installed."""
    listing = catalog.list_models()[0]
    if listing.path is None:
        pytest.skip(f"{listing.name} is not on this machine")
    return catalog.find(listing.name)


@pytest.fixture(scope="session")
def default_model(default_file: ModelFile) -> Decoder:
    return Decoder.load(default_file)
