"""Reading a model folder as Hugging Face lays it out: config.json, safetensors, tokenizer.json.

Knows the names and settings of the Llama family: Llama 2 and 3, Mistral, Ministral, Qwen2, Qwen3.
Knows no forward pass. What cannot be run as it is meant is refused, never bent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatkv.errors import BadWeights
from chatkv.models.dense import DenseLayer, DenseWeights, expect_room
from chatkv.models.spec import ModelSpec
from chatkv.models.weights import known_sha256
from chatkv.models.windows import windows_of
from chatkv.tokenizer import Tokenizer

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
Progress = Callable[[str, int, int], None]
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class ModelFolder:
    """A folder with config.json, safetensors and tokenizer.json, opened but not loaded.

    Raises:
        BadWeights: Something is missing, or asks for what this decoder does not do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self._json("config.json")
        self._files = self._find_files()
        self.spec = self._read_spec()

    def load(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16,
        progress: Progress | None = None,
    ) -> DenseWeights:  # fmt: skip
        """All tensors on the device, each rounded to `dtype` once.

        Raises:
            BadWeights: A tensor is missing or of another shape; a file is cut short.
            ModelError: The device has no room.
        """
        expect_room(self.spec, dtype, self._is_tied(), device)
        try:
            return self._load(device, dtype, progress)
        except (SafetensorError, OSError) as error:
            raise BadWeights(
                f"{self.path} cannot be read: {error}.", hint="Fetch the files again."
            ) from error

    def tokenizer(self) -> Tokenizer:
        """The folder's own tokenizer and chat template.

        Raises:
            BadWeights: There is no tokenizer.json, or it cannot be read.
        """
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise BadWeights(
                f"{self.path} has no tokenizer.json.",
                hint="Save the fast tokenizer with transformers into that folder.",
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        # tokenizers raises plain Exception for a file it cannot read.
        except Exception as error:
            raise BadWeights(f"{path} cannot be read: {error}.", hint="Fetch it again.") from error
        settings = self._json("tokenizer_config.json", optional=True)
        template = self._template(settings)
        special = {
            name: text if isinstance(text, str) else text["content"]
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := settings.get(name))
        }
        digest = hashlib.blake2b(digest_size=32, person=b"chatkv-tok")
        for part in (path.read_bytes(), template.encode(), repr(self.spec.eos_ids).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        return Tokenizer(core, template, special, self.spec.eos_ids, digest.digest())

    def _template(self, settings: dict[str, Any]) -> str:
        beside = self.path / "chat_template.jinja"
        if beside.is_file():
            return beside.read_text(encoding="utf-8")
        found = settings.get("chat_template") or _PLAIN_TEMPLATE
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            found = named.get("default", _PLAIN_TEMPLATE)
        return found

    def _load(
        self, device: torch.device, dtype: torch.dtype, progress: Progress | None
    ) -> DenseWeights:
        spec, hidden, dim = self.spec, self.spec.hidden_size, self.spec.head_dim
        wide, narrow, inner = spec.num_heads * dim, spec.num_kv_heads * dim, spec.intermediate_size
        opened = {file: safe_open(file, framework="pt") for file in set(self._files.values())}

        def tensor(name: str, *shape: int, to: torch.dtype = dtype) -> Tensor:
            if name not in self._files:
                raise BadWeights(f"{self.path} has no tensor {name}.", hint="Fetch it again.")
            found = opened[self._files[name]].get_tensor(name)
            if tuple(found.shape) != shape:
                raise BadWeights(
                    f"{self.path}: tensor {name} is {tuple(found.shape)}, the config says {shape}.",
                    hint="The config belongs to another model.",
                )
            return found.to(device).to(to)

        def vector(name: str, *shape: int) -> Tensor:
            return tensor(name, *shape, to=torch.float32)

        layers: list[DenseLayer] = []
        for i in range(spec.num_layers):
            if progress is not None:
                progress("loading", i, spec.num_layers)
            at, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
            has_bias = f"{attention}q_proj.bias" in self._files
            has_norm = f"{attention}q_norm.weight" in self._files
            heads = [
                (f"{attention}{n}_proj", w) for n, w in (("q", wide), ("k", narrow), ("v", narrow))
            ]
            mlp = f"{at}mlp."
            layers.append(
                DenseLayer(
                    qkv=torch.cat([tensor(f"{name}.weight", w, hidden) for name, w in heads]),
                    o=tensor(f"{attention}o_proj.weight", hidden, wide),
                    gate_up=torch.cat(
                        [tensor(f"{mlp}{n}_proj.weight", inner, hidden) for n in ("gate", "up")]
                    ),
                    down=tensor(f"{mlp}down_proj.weight", hidden, inner),
                    attention_norm=vector(f"{at}input_layernorm.weight", hidden),
                    feed_norm=vector(f"{at}post_attention_layernorm.weight", hidden),
                    bias=torch.cat([vector(f"{name}.bias", w) for name, w in heads])
                    if has_bias
                    else None,
                    q_norm=vector(f"{attention}q_norm.weight", dim) if has_norm else None,
                    k_norm=vector(f"{attention}k_norm.weight", dim) if has_norm else None,
                )
            )
        embedding = tensor("model.embed_tokens.weight", spec.vocab_size, hidden)
        tied = self._is_tied()
        head = embedding if tied else tensor("lm_head.weight", spec.vocab_size, hidden)
        return DenseWeights(
            spec, embedding, head, vector("model.norm.weight", hidden), tuple(layers)
        )

    def _is_tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings")) or "lm_head.weight" not in self._files

    def _json(self, name: str, optional: bool = False) -> dict[str, Any]:
        path = self.path / name
        if optional and not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise BadWeights(
                f"{self.path} has no {name}.", hint="Give a folder with a whole model."
            ) from error
        except (ValueError, OSError, TypeError) as error:
            raise BadWeights(f"{path} cannot be read: {error}.", hint="Fetch it again.") from error

    def _find_files(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self._json("model.safetensors.index.json", optional=True).get("weight_map")
        if index is None:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise BadWeights(
                    f"{self.path} has no safetensors.",
                    hint="Convert other formats first; pickled weights are never loaded.",
                )
            return dict(self._names(files))
        # Only plain names: an index must not lead out of its folder.
        bad = [name for name in index.values() if Path(name).name != name]
        missing = [name for name in set(index.values()) if not (self.path / name).is_file()]
        if bad or missing:
            raise BadWeights(
                f"{self.path}: the index names {(bad or missing)[0]}, which is not there.",
                hint="Fetch the missing files.",
            )
        return {tensor: self.path / file for tensor, file in index.items()}

    def _names(self, files: list[Path]) -> Iterator[tuple[str, Path]]:
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - no mapping, it only looks like one
                        yield name, file
            except (SafetensorError, OSError) as error:
                raise BadWeights(
                    f"{file} cannot be read: {error}.", hint="Fetch it again."
                ) from error

    def _read_spec(self) -> ModelSpec:
        config = self.config
        kind = (config.get("architectures") or ["none"])[0]
        if kind not in ARCHITECTURES:
            raise BadWeights(
                f"{self.path} holds a model of architecture {kind}.",
                hint=f"Architectures that run: {', '.join(ARCHITECTURES)}.",
            )
        self._refuse_unknown_parts()
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            head_dim = int(config.get("head_dim") or hidden // heads)
            rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
            theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
            limit, layers = int(config["max_position_embeddings"]), int(config["num_hidden_layers"])
            return ModelSpec(
                name=self.path.name,
                architecture=ARCHITECTURES[kind],
                num_layers=layers,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                intermediate_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                context_limit=limit,
                rope_theta=theta,
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                eos_ids=self._eos_ids(),
                weights_digest=self._digest(),
                rope_factors=rope_factors(self.path, rope, theta, head_dim),
                windows=windows_of(self.path, ARCHITECTURES[kind], config, layers, limit),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadWeights(
                f"{self.path / 'config.json'} lacks or garbles {error}.", hint="Fetch it again."
            ) from error

    def _refuse_unknown_parts(self) -> None:
        """Raise for settings that would change what is computed and are not done here."""
        config = self.config
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise BadWeights(f"{self.path} uses {config['hidden_act']}, not SiLU.", hint="")
        odd = [
            name
            for name in self._files
            if name.endswith(".bias")
            and not name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        ]
        if odd:
            raise BadWeights(f"{self.path} has a bias where none is added: {odd[0]}.", hint="")
        if config.get("quantization_config"):
            raise BadWeights(
                f"{self.path} is quantised.",
                hint="Use the folder with bfloat16 or float16 weights.",
            )

    def _eos_ids(self) -> tuple[int, ...]:
        ids: set[int] = set()
        for source in (self.config, self._json("generation_config.json", optional=True)):
            found = source.get("eos_token_id")
            ids |= set(found if isinstance(found, list) else [] if found is None else [found])
        return tuple(sorted(ids))

    def _digest(self) -> str:
        """SHA-256 over config and the content of all files."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(set(self._files.values())):
            digest.update(file.name.encode() + b"\0" + known_sha256(file).encode())
        return digest.hexdigest()


def rope_factors(path: Path, rope: Mapping[str, Any], theta: float, dim: int) -> tuple[float, ...]:
    """Divisors of the rotary frequencies, [D / 2], as transformers computes them.

    Raises:
        BadWeights: A scaling that is not known here.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ()
    factor = float(rope.get("factor", 1.0))
    if kind == "linear":
        return (factor,) * (dim // 2)
    if kind != "llama3":
        raise BadWeights(
            f"{path} scales its rotary positions ({kind}).",
            hint="Scalings that run: linear, llama3.",
        )
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = float(rope["original_max_position_embeddings"])
    factors: list[float] = []
    for i in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
