"""EAGLE-3 heads as others store them, read into a file of ours.

Knows two layouts of config.json and tensors: that of SafeAILab's EAGLE, and that of Speculators,
which vLLM reads. A head that would need something our layer does not do is refused, never bent.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatkv.errors import HeadsMismatch
from chatkv.models.folder import rope_factors
from chatkv.models.spec import ModelSpec
from chatkv.spec.heads.file import (
    HeadFile,
    expect_numbers,
    expect_shape,
    filled,
    outline,
    target_of,
)
from chatkv.spec.heads.shape import HeadShape, shape_for

HINT = "An EAGLE-3 head has one Llama layer over three tapped layers of its target."
LAYERS = ("midlayer.", "layers.0.", "model.layers.0.")
"""What the names of the layer's tensors begin with."""
TAPS = "eagle_aux_hidden_state_layer_ids"
DEPTH = 5


def read(folder: Path, spec: ModelSpec, tokenizer_fingerprint: bytes) -> HeadFile:
    """The head in a folder with config.json and safetensors.

    Raises:
        HeadsMismatch: It is no EAGLE-3 head, lacks something, needs what is not done here, or does
            not fit the target; says both values.
    """
    config, tensors = _config(folder), _tensors(folder)
    layer = _layer(config)
    _refuse(folder, config, layer, tensors)
    shape = _shape(folder, config, layer, spec)
    expect_shape(folder, shape, spec)
    _expect(folder, "vocabulary", int(layer["vocab_size"]), spec.vocab_size)
    head = outline(shape)
    prefix = next((p for p in LAYERS if f"{p}hidden_norm.weight" in tensors), LAYERS[0])

    def tensor(name: str) -> Tensor:
        if f"{name}.weight" not in tensors:
            raise HeadsMismatch(f"{folder} lacks the tensor {name}.weight.", hint=HINT)
        return tensors[f"{name}.weight"].float()

    def part(name: str) -> Tensor:
        return tensor(prefix + name)

    found = {
        "fuse": tensor("fc"),
        "gamma": tensor("norm"),
        "rows": tensor("lm_head"),
        "token_norm": part("input_layernorm"),
        "state_norm": part("hidden_norm"),
        "feed_norm": part("post_attention_layernorm"),
        "qkv": torch.cat([part(f"self_attn.{name}_proj") for name in "qkv"]),
        "o": part("self_attn.o_proj"),
        "gate": part("mlp.gate_proj"),
        "up": part("mlp.up_proj"),
        "down": part("mlp.down_proj"),
    }
    for name, weight in found.items():
        place = head.get_parameter(name)
        _expect(folder, f"shape of {name}", tuple(weight.shape), tuple(place.shape))
    found["confidence"] = torch.zeros(spec.hidden_size + 1)  # says nothing of its guesses
    return HeadFile(
        filled(head, found),
        _draft_ids(folder, tensors, shape.draft_ids, spec.vocab_size),
        target_of(spec, tokenizer_fingerprint),
        {"imported": folder.name, "kind": "EAGLE-3"},
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadsMismatch(f"{folder} has no usable config.json: {error}.", hint=HINT) from error
    if not isinstance(found, dict):
        raise HeadsMismatch(f"{folder / 'config.json'} is no JSON object.", hint=HINT)
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in set(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise HeadsMismatch(f"{folder} cannot be read: {error}.", hint=HINT) from error
    if not found:
        raise HeadsMismatch(
            f"{folder} has no safetensors.",
            hint="Convert other formats first; pickled weights are never loaded.",
        )
    return found


def _layer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the decoder layer: Speculators keeps them apart."""
    return config.get("transformer_layer_config") or config


def _refuse(
    folder: Path,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Raise for what would change what is computed and is not done here."""
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        _expect(folder, "speculators_model_type", kind, "eagle3")
    if "fc.weight" not in tensors:
        raise HeadsMismatch(f"{folder} is no EAGLE-3 head: it has no fc.weight.", hint=HINT)
    _expect(folder, "number of layers", int(layer.get("num_hidden_layers", 1)), 1)
    _expect(folder, "norm before fc", bool(config.get("norm_before_fc", False)), False)
    _expect(folder, "activation", layer.get("hidden_act", "silu"), "silu")
    odd = sorted(name for name in tensors if name.endswith((".bias", "_norm.weight")))
    odd = [name for name in odd if not name.endswith("hidden_norm.weight")]
    _expect(folder, "tensors that are not used here", odd, [])


def _shape(
    folder: Path, config: Mapping[str, Any], layer: Mapping[str, Any], spec: ModelSpec
) -> HeadShape:
    try:
        taps = _taps(config, spec)
        _expect(folder, "number of taps", len(taps), 3)
        heads, hidden = int(layer["num_attention_heads"]), int(layer["hidden_size"])
        dim = int(layer.get("head_dim") or hidden // heads)
        rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0)
        draft_ids = int(config.get("draft_vocab_size") or layer["vocab_size"])
        _expect(folder, "hidden", int(config.get("target_hidden_size") or hidden), spec.hidden_size)
        base = shape_for("eagle", spec, depth=DEPTH)
        shape = replace(
            base,
            hidden=hidden,
            taps=tuple(int(tap) for tap in taps),
            inner=int(layer["intermediate_size"]),
            draft_ids=draft_ids,
            num_heads=heads,
            num_kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=dim,
            rope_theta=theta,
            source="eagle3",
            eps=float(layer.get("rms_norm_eps", 1e-6)),
            norms_residual=bool(_said(config, "norm_before_residual", False)),
            rope_factors=rope_factors(folder, rope, theta, dim),
        )
        expect_numbers(shape)
        return shape
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise HeadsMismatch(
            f"{folder / 'config.json'} lacks or garbles {error}.", hint=HINT
        ) from error


def _taps(config: Mapping[str, Any], spec: ModelSpec) -> Any:
    taps = config.get(TAPS) or (config.get("eagle_config") or {}).get(TAPS)
    # What SafeAILab's code does, whose files do not say it.
    return taps or _said(config, TAPS, (2, spec.num_layers // 2, spec.num_layers - 3))


def _said(config: Mapping[str, Any], name: str, otherwise: object) -> object:
    """A setting that the layout of Speculators has to name: a wrong guess would pass unseen.

    Raises KeyError.
    """
    if "speculators_model_type" in config and config.get(name) is None:
        raise KeyError(name)
    return config.get(name, otherwise)


def _draft_ids(folder: Path, tensors: Mapping[str, Tensor], count: int, vocab_size: int) -> Tensor:
    """[K] int64: d2t holds how far each draft id is from the target's."""
    ids = torch.arange(count)
    if "d2t" in tensors:
        _expect(folder, "length of d2t", len(tensors["d2t"]), count)
        ids = ids + tensors["d2t"].long()
    inside = int(((ids >= 0) & (ids < vocab_size)).sum())
    _expect(folder, f"number of draft ids below {vocab_size}", inside, count)
    _expect(folder, "number of different draft ids", len(ids.unique()), count)
    if "t2d" in tensors:
        marked = tensors["t2d"].nonzero().flatten()
        differ = len(set(marked.tolist()) ^ set(ids.tolist()))
        _expect(folder, "number of ids that t2d and d2t do not share", differ, 0)
    return ids


def _expect(folder: Path, name: str, found: object, needed: object) -> None:
    if found != needed:
        raise HeadsMismatch(
            f"{folder.name} does not fit: {name} is {found}, needed is {needed}.", hint=HINT
        )
