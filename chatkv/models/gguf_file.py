"""Reading one GGUF file: its metadata as a ModelSpec, its tokenizer, its tensors.

Knows the llama.cpp file format and its names. Packs nothing, caches nothing, loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from chatkv.errors import BadWeights
from chatkv.models.spec import ModelSpec
from chatkv.models.windows import of_layers

ARCHITECTURES = ("llama",)
LINEAR_TYPES = ("Q4_0", "Q4_1", "Q8_0")
VOCABULARY_TYPES = ("Q8_0",)
# How llama.cpp names the splitting of text into words, and the `tokenizers` form of the same.
_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


class GgufFile:
    """A GGUF of the Llama family, opened by memory map.

    Raises:
        BadWeights: The file is missing, cut short, no GGUF, or of a kind we cannot run exactly.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError as error:
            raise BadWeights(
                f"There is no model file at {path}.", hint="Check the path."
            ) from error
        # The reader checks little: a cut file fails as whatever numpy says of the missing bytes.
        except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
            raise BadWeights(
                f"{path} is not a whole GGUF file ({path.stat().st_size:,} bytes).",
                hint="Fetch the file again; `chatkv models pull` gets the default model.",
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_kind()
        self.spec = self._read_spec(name or path.stem)

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default` where the file has none."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def type_of(self, name: str) -> str:
        """The quantisation of a tensor, as llama.cpp calls it."""
        return self._tensors[name].tensor_type.name

    def raw(self, name: str) -> np.ndarray:
        """The blocks of a quantised tensor [rows, bytes a row] uint8, or a float32 vector."""
        if name not in self._tensors:
            raise BadWeights(f"{self.path} has no tensor {name}.", hint="Use another file.")
        return self._tensors[name].data

    def dense(self, name: str) -> np.ndarray:
        """A tensor's exact values, float32, in the order of the file."""
        return gguf.dequantize(self.raw(name), self._tensors[name].tensor_type)

    def _check_kind(self) -> None:
        architecture = self.field("general.architecture", "none")
        if architecture not in ARCHITECTURES:
            raise BadWeights(
                f"{self.path} holds a model of architecture {architecture!r}.",
                hint=f"Architectures that run: {', '.join(ARCHITECTURES)}.",
            )
        scaling = self.field("llama.rope.scaling.type", "none")
        if scaling not in ("none", ""):
            raise BadWeights(f"{self.path} scales its rotary positions ({scaling}).", hint="")
        for name, tensor in self._tensors.items():
            kind = tensor.tensor_type.name
            if name in ("token_embd.weight", "output.weight"):
                allowed = VOCABULARY_TYPES
            elif name.endswith("norm.weight") or name == "rope_freqs.weight":
                allowed = ("F32",)
            elif name.endswith(".bias"):
                raise BadWeights(
                    f"{self.path} has biases ({name}), which this decoder does not add.", hint=""
                )
            else:
                allowed = LINEAR_TYPES
            if kind not in allowed:
                raise BadWeights(
                    f"{self.path}: tensor {name} is {kind}, which cannot be run as it is.",
                    hint=f"Use a file where it is {' or '.join(allowed)}.",
                )

    def _read_spec(self, name: str) -> ModelSpec:
        try:
            heads = int(self.field("llama.attention.head_count"))
            hidden = int(self.field("llama.embedding_length"))
            head_dim = int(self.field("llama.attention.key_length", hidden // heads))
            rotated = int(self.field("llama.rope.dimension_count", head_dim))
            factors = (
                tuple(float(f) for f in self.raw("rope_freqs.weight"))
                if self.has("rope_freqs.weight")
                else ()
            )
            layers, limit = (
                int(self.field(f"llama.{key}")) for key in ("block_count", "context_length")
            )
            spec = ModelSpec(
                name=name,
                architecture="llama",
                num_layers=layers,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=int(self.field("llama.attention.head_count_kv", heads)),
                head_dim=head_dim,
                intermediate_size=int(self.field("llama.feed_forward_length")),
                vocab_size=int(self.raw("token_embd.weight").shape[0]),
                context_limit=limit,
                rope_theta=float(self.field("llama.rope.freq_base", 10000.0)),
                norm_eps=float(self.field("llama.attention.layer_norm_rms_epsilon", 1e-5)),
                eos_ids=self._eos_ids(),
                weights_digest=self._digest(),
                rope_factors=factors,
                windows=self._windows(layers, limit),
            )
        except TypeError as error:
            raise BadWeights(
                f"{self.path} lacks metadata a Llama model needs.", hint="Use another file."
            ) from error
        if rotated != head_dim:
            raise BadWeights(f"{self.path} rotates {rotated} of {head_dim} channels.", hint="")
        return spec

    def _windows(self, layers: int, limit: int) -> tuple[int | None, ...]:
        """In every layer, or in those that the pattern names."""
        window = int(self.field("llama.attention.sliding_window", 0))
        pattern = self.field("llama.attention.sliding_window_pattern", [window > 0] * layers)
        if not isinstance(pattern, list):
            raise BadWeights(
                f"{self.path} says by the number {pattern} which layers have a window.",
                hint="Use a file that lists them.",
            )
        return of_layers(self.path, [bool(slides) for slides in pattern], window, layers, limit)

    def _eos_ids(self) -> tuple[int, ...]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [self.field(f"tokenizer.ggml.{key}") for key in keys]
        ids = {int(i) for i in found if i is not None}
        # Instruct files name one stop id; a base model's own end of text stops a reply as well.
        tokens = self.field("tokenizer.ggml.tokens", [])
        types = self.field("tokenizer.ggml.token_type", [])
        ids |= {
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>")
        }
        return tuple(sorted(ids))

    def _digest(self) -> str:
        """SHA-256 over name, type, shape and quantised content of every tensor, by name."""
        digest = hashlib.sha256()
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            shape = [int(n) for n in tensor.shape]
            digest.update(f"{name}\0{tensor.tensor_type.name}\0{shape}\0".encode())
            digest.update(np.ascontiguousarray(tensor.data).data)
        return digest.hexdigest()

    def tokenizer_json(self) -> str:
        """The vocabulary in the format of the `tokenizers` library.

        Raises:
            BadWeights: A vocabulary that is not byte-level BPE of a kind we know.
        """
        kind, words = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre", "gpt-2")
        splitter = _splitters().get(words) if kind == "gpt2" else None
        if splitter is None:
            raise BadWeights(
                f"{self.path} has a tokenizer of kind {kind!r} / {words!r}.",
                hint=f"Kinds that run: byte-level BPE with {', '.join(_splitters())}.",
            )
        tokens = self.field("tokenizer.ggml.tokens")
        types = self.field("tokenizer.ggml.token_type") or [1] * len(tokens)
        added = [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        model = {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in self.field("tokenizer.ggml.merges")],
            "ignore_merges": words == "llama-bpe",
        }
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": added,
                "normalizer": None,
                "pre_tokenizer": splitter,
                "post_processor": None,
                "decoder": {**level, "use_regex": True},
                "model": model,
            },
            ensure_ascii=False,
        )

    def chat_json(self) -> str:
        """Chat template, texts of the named special tokens, stop ids."""
        tokens = self.field("tokenizer.ggml.tokens")
        named = {
            "bos_token": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token": self.field("tokenizer.ggml.eos_token_id"),
        }
        return json.dumps(
            {
                "template": self.field("tokenizer.chat_template", _PLAIN_TEMPLATE),
                "special": {key: tokens[i] for key, i in named.items() if i is not None},
                "eos_ids": list(self.spec.eos_ids),
            },
            ensure_ascii=False,
            sort_keys=True,
        )


# For a file that brings no template: role and text, as base models read it best.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def _splitters() -> dict[str, dict[str, Any]]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words = {**level, "use_regex": True}
    llama3 = {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated"}
    return {
        "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, words]},
        "gpt-2": words,
        "llama-bpe": {
            "type": "Sequence",
            "pretokenizers": [{**llama3, "invert": False}, {**level, "use_regex": False}],
        },
    }
