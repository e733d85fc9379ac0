"""A model in the form the kernels read, converted once into the cache and checked at every load.

Knows the converted folder: `model.safetensors` (packed tiles and norms), `tokenizer.json`,
`chat.json`, and `manifest.json` (spec, sizes, digests). Knows no forward pass; numpy only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chatkv.errors import BadWeights, ModelError
from chatkv.models.catalog import ModelFile, cache_dir, sha256_of
from chatkv.models.gguf_file import GgufFile
from chatkv.models.packing import KINDS, group_bytes, pack, unpack
from chatkv.models.spec import ModelSpec

CONVERTER = 2
"""Version of the converted folder, part of its name."""
FILES = ("model.safetensors", "tokenizer.json", "chat.json")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a packed matrix [outputs, inputs] lies in `Weights.data`."""

    kind: str
    offset: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model in one block of memory.

    `layers[l]` holds qkv [(HQ + 2 HK) D, H], o [H, HQ D], gate_up [2 I, H] (blocks of 32 gate
    outputs, then the 32 up outputs of the same channels) and down [H, I]. q and k rows are in
    half-split rotary order.
    """

    spec: ModelSpec
    data: np.ndarray
    """uint8, 64-byte aligned."""
    layers: tuple[dict[str, Matrix], ...]
    vocabulary: Matrix
    """Embedding [V, H]."""
    head: Matrix
    """The vocabulary again when the model ties them."""
    norms: np.ndarray
    """[2 L + 1, H] float32: attention and feed-forward norm of each layer, then the last one."""
    folder: Path

    def dense(self, matrix: Matrix) -> np.ndarray:
        """The exact weights [outputs, inputs], float32, in packed output order."""
        packed = self.data[matrix.offset :]
        shape = (matrix.outputs // 16, matrix.inputs // 32, group_bytes(matrix.kind))
        return unpack(matrix.kind, packed[: int(np.prod(shape))].reshape(shape))


def load(file: ModelFile, progress: Progress | None = None) -> Weights:
    """Read a model, converting it first when the cache has no good copy.

    Raises:
        BadWeights: The file is missing, cut short, of another hash, or cannot be run exactly.
        ModelError: The cache folder cannot be written.
    """
    report = progress or _silent
    if not file.path.is_file():
        raise BadWeights(f"There is no model file at {file.path}.", hint="Check the path.")
    try:
        return _load(file, report)
    except OSError as error:
        raise ModelError(
            f"{file.name} cannot be prepared: {error}.",
            hint=f"It needs room in {cache_dir()}; $CHATKV_CACHE_DIR names another folder.",
        ) from error


def _load(file: ModelFile, report: Progress) -> Weights:
    sha256 = known_sha256(file.path, report)
    if file.sha256 is not None and sha256 != file.sha256:
        raise BadWeights(
            f"{file.path} has SHA-256 {sha256[:16]}..., expected {file.sha256[:16]}...",
            hint=f"Delete it, then get it again: chatkv models pull {file.name}",
        )
    folder = cache_dir() / "converted" / f"{sha256[:32]}-{CONVERTER}"
    try:
        return _read(folder, file.name, report)
    except _Unusable:
        _convert(file, folder, report)
    return _read(folder, file.name, report)


class _Unusable(Exception):
    """The converted folder is missing or not what its manifest says."""


def _read(folder: Path, name: str, report: Progress) -> Weights:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        fields = manifest["spec"]
        for key in ("eos_ids", "rope_factors", "windows"):
            fields[key] = tuple(fields[key])
        spec = ModelSpec(**{**fields, "name": name})
        for other in FILES[1:]:
            if _digest((folder / other).read_bytes()) != manifest["files"][other]["digest"]:
                raise _Unusable(other)
        data = _read_checked(folder / FILES[0], manifest["files"][FILES[0]], report)
        header_bytes = int(data[:8].view("<u8")[0])
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
        return _build(spec, data, header, 8 + header_bytes, manifest["kinds"], folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Unusable(str(error)) from error


def _read_checked(path: Path, expected: dict[str, Any], report: Progress) -> np.ndarray:
    """The file's bytes, 64-byte aligned, when size and digest are right."""
    size = path.stat().st_size
    if size != expected["size"]:
        raise _Unusable(f"{path.name} has {size} bytes")
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    data = room[start : start + size]
    digest, step = hashlib.blake2b(digest_size=32), 1 << 23
    with path.open("rb", buffering=0) as file:
        for at in range(0, size, step):
            piece = data[at : at + step]
            if file.readinto(piece.data) != piece.size:
                raise _Unusable(f"{path.name} ends early")
            digest.update(piece.data)
            report("loading", at + piece.size, size)
    if digest.hexdigest() != expected["digest"]:
        raise _Unusable(f"{path.name} has another digest")
    return data


def _build(
    spec: ModelSpec,
    data: np.ndarray,
    header: dict[str, Any],
    start: int,
    kinds: dict[str, str],
    folder: Path,
) -> Weights:
    def matrix(name: str, inputs: int) -> Matrix:
        tiles = header[name]["shape"][0]
        return Matrix(kinds[name], start + header[name]["data_offsets"][0], tiles * 16, inputs)

    hidden, attended = spec.hidden_size, spec.num_heads * spec.head_dim
    inputs = {"qkv": hidden, "o": attended, "gate_up": hidden, "down": spec.intermediate_size}
    layers = tuple(
        {part: matrix(f"layers.{i}.{part}", width) for part, width in inputs.items()}
        for i in range(spec.num_layers)
    )
    vocabulary = matrix("vocabulary", hidden)
    first, last = header["norms"]["data_offsets"]
    norms = data[start + first : start + last].view("<f4").reshape(header["norms"]["shape"])
    head = matrix("head", hidden) if "head" in header else vocabulary
    return Weights(spec, data, layers, vocabulary, head, norms, folder)


def _convert(file: ModelFile, folder: Path, report: Progress) -> None:
    """Write the converted folder: whole and checked, or not at all."""
    source = GgufFile(file.path, file.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".convert-", dir=folder.parent))
    try:
        (room / "tokenizer.json").write_text(source.tokenizer_json(), encoding="utf-8")
        (room / "chat.json").write_text(source.chat_json(), encoding="utf-8")
        tensors, kinds = _pack_all(source, report)
        _write_safetensors(room / "model.safetensors", tensors)
        files = {}
        for name in FILES:
            content = (room / name).read_bytes()
            files[name] = {"size": len(content), "digest": _digest(content)}
        manifest = {"spec": asdict(source.spec), "kinds": kinds, "files": files}
        (room / "manifest.json").write_text(json.dumps(manifest, sort_keys=True), encoding="utf-8")
        _put_in_place(room, folder)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _put_in_place(room: Path, folder: Path) -> None:
    try:
        room.rename(folder)
    except OSError:
        # A damaged copy, or another process was first: what is there makes way, ours is good.
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
        folder.rename(old / "folder")
        room.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _pack_all(source: GgufFile, report: Progress) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    spec = source.spec
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}

    def packed(name: str, heads: int = 0) -> tuple[str, np.ndarray]:
        raw, kind = source.raw(name), source.type_of(name)
        try:
            return KINDS[kind], pack(kind, _half_split(raw, heads) if heads else raw)
        except ValueError as error:
            raise BadWeights(f"{source.path}: tensor {name}: {error}.", hint="") from error

    def add(name: str, parts: list[tuple[str, np.ndarray]], pairs: bool = False) -> None:
        if len({kind for kind, _ in parts}) != 1:
            raise BadWeights(
                f"{source.path}: the parts of {name} are quantised in different ways.",
                hint="Use a file with one type for all linear layers.",
            )
        kinds[name] = parts[0][0]
        arrays = [array for _, array in parts]
        if pairs:
            arrays = [a.reshape(-1, 2, *a.shape[1:]) for a in arrays]
            joined = np.concatenate(arrays, axis=1)
            tensors[name] = joined.reshape(-1, *joined.shape[2:])
        else:
            tensors[name] = np.concatenate(arrays)

    for i in range(spec.num_layers):
        report("converting", i, spec.num_layers + 1)
        at = f"blk.{i}."
        q = packed(f"{at}attn_q.weight", spec.num_heads)
        k = packed(f"{at}attn_k.weight", spec.num_kv_heads)
        add(f"layers.{i}.qkv", [q, k, packed(f"{at}attn_v.weight")])
        add(f"layers.{i}.o", [packed(f"{at}attn_output.weight")])
        gate, up = packed(f"{at}ffn_gate.weight"), packed(f"{at}ffn_up.weight")
        add(f"layers.{i}.gate_up", [gate, up], pairs=True)
        add(f"layers.{i}.down", [packed(f"{at}ffn_down.weight")])
    add("vocabulary", [packed("token_embd.weight")])
    if source.has("output.weight"):
        add("head", [packed("output.weight")])
    names = [
        f"blk.{i}.{part}_norm.weight" for i in range(spec.num_layers) for part in ("attn", "ffn")
    ]
    norms = [source.raw(name).astype("<f4") for name in [*names, "output_norm.weight"]]
    tensors["norms"] = np.stack(norms)
    report("converting", spec.num_layers + 1, spec.num_layers + 1)
    return tensors, kinds


def _half_split(raw: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k with rotary pairs half a head apart; llama.cpp keeps them side by side."""
    return raw.reshape(heads, -1, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write the file; its data starts at a multiple of 64 bytes, as vector loads like it."""
    header: dict[str, Any] = {}
    at = 0
    for name, array in tensors.items():
        dtype = {"uint8": "U8", "float32": "F32"}[array.dtype.name]
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())


def known_sha256(path: Path, report: Progress | None = None) -> str:
    """SHA-256 of a file; remembered for as long as size, time and inode stay."""
    stat = path.stat()
    now = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    note = cache_dir() / "hashes" / f"{name}.json"
    try:
        known = json.loads(note.read_bytes())
        if known["file"] == now:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or a damaged one: hash again
    sha256 = sha256_of(path, report)
    note.parent.mkdir(parents=True, exist_ok=True)
    part = note.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"file": now, "sha256": sha256}))
    part.replace(note)
    return sha256


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def _silent(what: str, done: int, total: int) -> None:
    """No one listens."""
