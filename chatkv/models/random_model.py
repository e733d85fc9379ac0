"""Random weights of a named shape, for benchmarks and tests: nothing to fetch, nothing to say.

Knows shapes and a seed. The same name on the same kind of device gives the same weights.
`random:NAME` of a model that is here is a tiny one with its tokenizer: a draft model that is wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from chatkv.errors import UnknownModel
from chatkv.models import catalog, weights
from chatkv.models.catalog import CATALOG, RANDOM
from chatkv.models.dense import DenseLayer, DenseWeights, expect_room
from chatkv.models.spec import ModelSpec
from chatkv.tokenizer import Tokenizer

EOS = 256
TOKENIZER = "tokenizer.json"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def _shape(
    layers: int, hidden: int, heads: tuple[int, int, int], inner: int, vocab: int, theta: float,
    *, context: int = 8192, eps: float = 1e-5, architecture: str = "llama",
    windows: tuple[int | None, ...] = (),
) -> ModelSpec:  # fmt: skip
    return ModelSpec(
        name="",
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        intermediate_size=inner,
        vocab_size=vocab,
        context_limit=context,
        rope_theta=theta,
        norm_eps=eps,
        eos_ids=(EOS,),
        weights_digest="",
        windows=windows,
    )


SHAPES = {
    "tiny": _shape(2, 128, (4, 2, 64), 256, 320, 1e4, context=2048),
    "tiny-qwen2": _shape(2, 128, (4, 2, 64), 256, 320, 1e6, context=2048, architecture="qwen2"),
    "tiny-qwen3": _shape(2, 128, (4, 2, 64), 256, 320, 1e6, context=2048, architecture="qwen3"),
    "tiny-windows": _shape(
        2, 128, (4, 2, 64), 256, 320, 1e4, context=2048, architecture="mistral", windows=(100, 100)
    ),
    "tiny-mixed": _shape(
        3,
        128,
        (4, 2, 64),
        256,
        320,
        1e6,
        context=2048,
        architecture="qwen2",
        windows=(None, 150, 40),
    ),
    "smollm2-135m": _shape(30, 576, (9, 3, 64), 1536, 49152, 1e5),
    "smollm2-1.7b": _shape(24, 2048, (32, 32, 64), 8192, 49152, 1.3e5),
    "qwen2-0.5b": _shape(24, 896, (14, 2, 64), 4864, 151936, 1e6, architecture="qwen2"),
    "qwen3-1.7b": _shape(28, 2048, (16, 8, 128), 6144, 151936, 1e6, architecture="qwen3"),
    "llama2-7b": _shape(32, 4096, (32, 32, 128), 11008, 32000, 1e4, context=4096),
    "llama3-1b": _shape(16, 2048, (32, 8, 64), 8192, 128256, 5e5),
    "llama3-8b": _shape(32, 4096, (32, 8, 128), 14336, 128256, 5e5),
}
"""Shapes by name. Vocabulary ids from 257 on stand for nothing."""


def random_spec(name: str) -> tuple[ModelSpec, int]:
    """The shape and the seed of a name.

    Raises:
        UnknownModel: No such shape, or a seed that is no number.
        BadWeights: The model whose tokenizer is to be taken cannot be read.
    """
    shape, _, seed = name.lower().removeprefix(RANDOM).partition("@")
    known = [*SHAPES, *CATALOG]
    if shape not in map(str.lower, known) or not (seed or "0").isdigit():
        raise UnknownModel(
            f"No random model is called {name!r}.",
            hint=f"Known: {', '.join(RANDOM + known for known in known)}; @7 behind it is a seed.",
        )
    spec = SHAPES["tiny"]
    if (model := lender(name)) is not None:
        lent = ("vocab_size", "context_limit", "eos_ids")
        spec = replace(spec, **{field: getattr(model.spec, field) for field in lent})
    else:
        spec = SHAPES[shape]
    return replace(spec, name=f"{RANDOM}{shape}@{int(seed or 0)}"), int(seed or 0)


def lender(name: str) -> weights.Weights | None:
    """The model whose tokenizer a random one takes; None for one of bytes."""
    shape = name.lower().removeprefix(RANDOM).partition("@")[0]
    return None if shape in SHAPES else weights.load(catalog.find(shape))


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a random model."""
    model = lender(name)
    return byte_tokenizer() if model is None else Tokenizer.from_file(model.folder / TOKENIZER)


def random_weights(name: str, device: torch.device, dtype: torch.dtype) -> DenseWeights:
    """Weights of spread 1 / sqrt(inputs), norms around 1.

    Raises:
        UnknownModel: No such shape.
        ModelError: The device has no room.
    """
    spec, seed = random_spec(name)
    expect_room(spec, dtype, False, device)
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(outputs: int, inputs: int, spread: float = 1.0) -> Tensor:
        values = torch.empty(outputs, inputs, dtype=dtype, device=device)
        # In pieces: float32 of a whole vocabulary would need twice the room of the result.
        for piece in values.split(8192):
            draw = torch.randn(piece.shape, generator=generator, device=device)
            piece.copy_(draw * (spread / math.sqrt(inputs)))
        return values

    def vector(width: int, around: float = 1.0) -> Tensor:
        return around + 0.1 * torch.randn(width, generator=generator, device=device)

    hidden, wide = spec.hidden_size, spec.num_heads * spec.head_dim
    all_heads = wide + 2 * spec.num_kv_heads * spec.head_dim
    is_qwen2, is_qwen3 = spec.architecture == "qwen2", spec.architecture == "qwen3"
    layers = tuple(
        DenseLayer(
            qkv=matrix(all_heads, hidden),
            o=matrix(hidden, wide),
            gate_up=matrix(2 * spec.intermediate_size, hidden),
            down=matrix(hidden, spec.intermediate_size),
            attention_norm=vector(hidden),
            feed_norm=vector(hidden),
            bias=vector(all_heads, 0.0) if is_qwen2 else None,
            q_norm=vector(spec.head_dim) if is_qwen3 else None,
            k_norm=vector(spec.head_dim) if is_qwen3 else None,
        )
        for _ in range(spec.num_layers)
    )
    embedding = matrix(spec.vocab_size, hidden, math.sqrt(hidden))
    head = matrix(spec.vocab_size, hidden, 3.0)
    spec = replace(spec, weights_digest=f"{spec.name} {device.type} {dtype} 1")
    return DenseWeights(spec, embedding, head, vector(hidden), layers)


def byte_tokenizer() -> Tokenizer:
    """One id a byte, and an end of text: enough for a model that says nothing."""
    # Byte-level BPE without merges; the order of its characters is that of the bytes.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    named = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    core = tokenizers.Tokenizer(models.BPE(vocab={named[b]: b for b in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return Tokenizer(
        core, TEMPLATE, {"eos_token": "<|end|>"}, (EOS,), b"chatkv random bytes".ljust(32)
    )
