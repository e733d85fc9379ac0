"""The file of a trained head: safetensors, and in its metadata what the head was made for.

Knows names, shapes and numbers to compare; no training and no guessing.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from chatkv.errors import HeadsMismatch
from chatkv.models.spec import ModelSpec
from chatkv.spec.heads import packed as packing
from chatkv.spec.heads.modules import Head, new_head, parameters_of
from chatkv.spec.heads.shape import KINDS, HeadShape, Source, shape_for

FORMAT, PACKED_FORMAT = 1, 2
"""In the second, matrices are packed in eight bits."""
DRAFT_IDS = "draft_ids"
WIDTHS = ("hidden", "inner", "depth", "draft_ids", "num_heads", "num_kv_heads", "head_dim")
WIDEST = 2**20
"""Of any of them: a damaged file may say anything, and what it says is allocated."""
SHOWN = 100
"""Characters of a value in a message."""
HINT = "Train heads for this model: chatkv train-heads; or leave `heads` out of --drafters."


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head with what its file says about it."""

    head: Head
    draft_ids: Tensor
    """[K] int64, the most frequent first."""
    target: Mapping[str, str]
    """What it was made for: `target_of`."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Stages, minutes, tokens, steps; the prompts it learned from."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """tau and a_d by temperature, with device and command."""


def target_of(spec: ModelSpec, tokenizer_fingerprint: bytes) -> dict[str, str]:
    """The identity of a target: its quantised tensors, its tokenizer."""
    return {"weights": spec.weights_digest, "tokenizer": tokenizer_fingerprint.hex()}


def save(path: Path, file: HeadFile, *, packed: bool = False) -> None:
    """Write the file in bfloat16, whole or not at all.

    Args:
        packed: Matrices in eight bits instead: half the size, for a head that is done.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in parameters_of(file.head):
        if packed and packing.fits(weight):
            tensors[name], tensors[name + packing.SCALE] = packing.pack(weight.detach().cpu())
        else:
            tensors[name] = weight.detach().to("cpu", torch.bfloat16).contiguous()
    tensors[DRAFT_IDS] = file.draft_ids.to("cpu", torch.int32).contiguous()
    about = {
        "format": str(PACKED_FORMAT if packed else FORMAT),
        **file.target,
        "shape": json.dumps(asdict(file.head.shape)),
        "training": json.dumps(dict(file.training)),
        "measured": json.dumps(dict(file.measured)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, part, metadata=about)
        part.chmod(0o644)  # the library makes it private, and wheels keep modes
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path, spec: ModelSpec, tokenizer_fingerprint: bytes) -> HeadFile:
    """Read a head for a target, float32.

    Raises:
        HeadsMismatch: With the field, what the file has and what is needed.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            about = dict(opened.metadata() or {})
            names = set(opened.keys())
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.is_file() else "no"
        raise HeadsMismatch(
            f"{path} is no file of draft heads: {_short(error)} ({size} bytes).", hint=HINT
        ) from error
    is_packed = about.get("format") == str(PACKED_FORMAT)
    _expect(path, "format", about.get("format"), str(PACKED_FORMAT if is_packed else FORMAT))
    for name, needed in target_of(spec, tokenizer_fingerprint).items():
        _expect(path, name, about.get(name), needed)
    shape = _shape(path, about)
    expect_shape(path, shape, spec)
    head, weights = outline(shape), dict[str, Tensor]()
    for name, weight in parameters_of(head):
        found = tuple(tensors[name].shape) if name in tensors else None
        _expect(path, f"shape of {name}", found, tuple(weight.shape))
        read = tensors[name]
        if is_packed and packing.fits(weight):
            scales = tensors.get(name + packing.SCALE, torch.empty(0))
            blocks = (*weight.shape[:-1], weight.shape[-1] // packing.BLOCK)
            _expect(path, f"shape of the scales of {name}", tuple(scales.shape), blocks)
            read = packing.unpack(read, scales)
        _expect(path, f"{name} is finite", bool(read.isfinite().all()), True)
        weights[name] = read
    return HeadFile(
        filled(head, weights),
        _draft_ids(path, tensors.get(DRAFT_IDS), shape, spec.vocab_size),
        {name: about.get(name, "") for name in ("weights", "tokenizer")},
        _facts(path, about, "training"),
        _facts(path, about, "measured"),
    )


def outline(shape: HeadShape) -> Head:
    """A head without memory for its weights: what a file says of its shape may be anything."""
    with torch.device("meta"):
        return new_head(shape)


def filled(head: Head, weights: Mapping[str, Tensor]) -> Head:
    """An outline with weights of its shapes, float32."""
    copies = {name: weight.to(torch.float32, copy=True) for name, weight in weights.items()}
    head.load_state_dict(copies, assign=True)
    return head.requires_grad_(False)


def kind_for(path: Path, spec: ModelSpec, tokenizer_fingerprint: bytes) -> str | None:
    """The kind of the head, if the file says that it was made for this target. Reads no tensor."""
    try:
        with safe_open(path, framework="pt") as opened:
            about = dict(opened.metadata() or {})
        needed = target_of(spec, tokenizer_fingerprint)
        if any(about.get(name) != value for name, value in needed.items()):
            return None
        return str(json.loads(about["shape"])["kind"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def expect_shape(path: Path, shape: HeadShape, spec: ModelSpec) -> None:
    """Raise HeadsMismatch unless a head of that shape fits a target."""
    _expect(path, "hidden", shape.hidden, spec.hidden_size)
    if shape.source == "eagle3":  # its attention is its own affair
        inside = [layer for layer in shape.taps if 1 <= layer <= spec.num_layers]
        _expect(path, f"taps of {spec.num_layers} layers", list(shape.taps), inside)
        return
    expected = shape_for(shape.kind, spec, draft_ids=shape.draft_ids, depth=shape.depth)
    for name, needed in asdict(expected).items():
        # The inner width is the head's own affair; its tensors are checked below.
        if name != "inner":
            _expect(path, name, getattr(shape, name), needed)


def _shape(path: Path, about: Mapping[str, str]) -> HeadShape:
    try:
        fields = json.loads(about["shape"])
        factors = tuple(fields.get("rope_factors", ()))
        shape = HeadShape(**{**fields, "taps": tuple(fields["taps"]), "rope_factors": factors})
        expect_numbers(shape)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise HeadsMismatch(
            f"{path} says nothing usable of its shape: {_short(error)}.", hint=HINT
        ) from error
    if shape.kind not in KINDS:
        _expect(path, "kind", shape.kind, " or ".join(KINDS))
    return shape


def expect_numbers(shape: HeadShape) -> None:
    """Raise ValueError unless all is of its type and no width is beyond reason."""
    good = {name: range(1, WIDEST + 1) for name in WIDTHS}
    for name, value in asdict(shape).items():
        match name:
            case "taps":
                right = all(type(tap) is int for tap in value)
            case "kind" | "norms_residual":
                right = True
            case "source":
                right = value in get_args(Source)
            case "rope_factors":
                right = len(value) in (0, shape.head_dim // 2) and all(map(_is_positive, value))
            case _ if name in good:
                right = type(value) is int and value in good[name]
            case _:
                right = _is_positive(value)
        if not right:
            raise ValueError(f"{name} is {_short(value)}")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _facts(path: Path, about: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        facts = json.loads(about.get(name, "{}"))
    except ValueError:
        facts = None
    _expect(path, f"{name} is a JSON object", isinstance(facts, dict), True)
    return dict(facts or {})


def _draft_ids(path: Path, ids: Tensor | None, shape: HeadShape, vocab_size: int) -> Tensor:
    _expect(path, "number of draft ids", None if ids is None else len(ids), shape.draft_ids)
    assert ids is not None, "its length was right"
    ids = ids.long()
    _expect(path, "number of different draft ids", len(ids.unique()), len(ids))
    inside = int(((ids >= 0) & (ids < vocab_size)).sum())
    _expect(path, f"number of draft ids below {vocab_size}", inside, len(ids))
    return ids


def _expect(path: Path, name: str, found: object, needed: object) -> None:
    if found != needed:
        raise HeadsMismatch(
            f"{path} does not fit this model: {name} is {_short(found)}, needed is {needed}.",
            hint=HINT,
        )


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
