"""The converted copy of a model: made once, checked always, made again when it is not right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from chatkv.errors import BadWeights, ModelError
from chatkv.models import weights
from chatkv.models.catalog import ModelFile
from chatkv.models.gguf_file import GgufFile


@pytest.fixture
def file(own_cache, tiny_path) -> ModelFile:
    return ModelFile("tiny", tiny_path)


def conversions(monkeypatch) -> list[ModelFile]:
    made, convert = [], weights._convert

    def counted(file, folder, report):
        made.append(file)
        convert(file, folder, report)

    monkeypatch.setattr(weights, "_convert", counted)
    return made


def test_tensors_are_those_of_the_file(file, tiny_path):
    model, source = weights.load(file), GgufFile(tiny_path)
    spec = model.spec
    np.testing.assert_array_equal(model.dense(model.vocabulary), source.dense("token_embd.weight"))
    assert model.head is model.vocabulary
    for i, layer in enumerate(model.layers):
        down = model.dense(layer["down"])
        np.testing.assert_array_equal(down, source.dense(f"blk.{i}.ffn_down.weight"))
        gate_up = model.dense(layer["gate_up"]).reshape(-1, 2, 32, spec.hidden_size)
        gate, up = (gate_up[:, j].reshape(-1, spec.hidden_size) for j in (0, 1))
        np.testing.assert_array_equal(gate, source.dense(f"blk.{i}.ffn_gate.weight"))
        np.testing.assert_array_equal(up, source.dense(f"blk.{i}.ffn_up.weight"))
        q = model.dense(layer["qkv"])[: spec.num_heads * spec.head_dim]
        pairs = source.dense(f"blk.{i}.attn_q.weight").reshape(
            spec.num_heads, -1, 2, spec.hidden_size
        )
        halves = q.reshape(spec.num_heads, 2, -1, spec.hidden_size)
        np.testing.assert_array_equal(halves.swapaxes(1, 2), pairs)


def test_converted_once_and_readable_as_safetensors(file, monkeypatch):
    made, reports = conversions(monkeypatch), []
    first = weights.load(file, lambda *report: reports.append(report))
    second = weights.load(file)
    assert len(made) == 1
    assert {what for what, _, _ in reports} == {"checking", "converting", "loading"}
    assert all(0 <= done <= total for _, done, total in reports)
    np.testing.assert_array_equal(first.data, second.data)
    assert second.data.ctypes.data % 64 == 0
    tensors = load_file(first.folder / "model.safetensors")
    assert tensors["layers.0.qkv"].dtype == np.uint8
    np.testing.assert_array_equal(tensors["norms"], first.norms)
    assert sorted(p.name for p in first.folder.parent.iterdir()) == [first.folder.name]


@pytest.mark.parametrize("name", [*weights.FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty"])
def test_a_damaged_copy_is_made_again(file, monkeypatch, name, damage):
    first = weights.load(file)
    path = first.folder / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        cut = {"cut": len(content) - 7, "flip": len(content), "empty": 0}[damage]
        path.write_bytes(content[:cut])
    made = conversions(monkeypatch)
    again = weights.load(file)
    if (name, damage) != ("manifest.json", "flip"):  # a flipped digit may leave valid JSON
        assert len(made) == 1
    np.testing.assert_array_equal(first.data, again.data)
    assert again.spec == first.spec
    assert len(list(again.folder.parent.iterdir())) == 1


def test_a_missing_file(own_cache, tmp_path):
    with pytest.raises(BadWeights, match="There is no model file"):
        weights.load(ModelFile("x", tmp_path / "none.gguf"))


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, 20_000, -1, -5000])
def test_a_truncated_file(own_cache, tiny_path, tmp_path, keep):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path.read_bytes()[:keep])
    with pytest.raises(BadWeights, match="not a whole GGUF") as caught:
        weights.load(ModelFile("x", path))
    assert caught.value.hint
    assert not list(own_cache.glob("converted/*"))


def test_a_file_that_is_no_gguf(own_cache, tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("not a model\n" * 1000)
    with pytest.raises(BadWeights, match="not a whole GGUF"):
        weights.load(ModelFile("x", path))


def test_another_hash_than_the_catalogue_says(own_cache, tiny_path):
    with pytest.raises(BadWeights, match="expected 0000000000000000") as caught:
        weights.load(ModelFile("tiny", tiny_path, sha256="0" * 64))
    assert "models pull tiny" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2'"),
        ({"linear": "Q5_0"}, "is Q5_0"),
        ({"vocabulary": "F16"}, "token_embd.weight is F16"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(own_cache, make_gguf, tmp_path, options, part):
    path = make_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(BadWeights, match=part) as caught:
        weights.load(ModelFile("x", path))
    assert caught.value.hint


def test_a_replaced_file_is_noticed(own_cache, make_gguf, tmp_path):
    path = make_gguf(tmp_path / "model.gguf", seed=1)
    first = weights.load(ModelFile("x", path))
    make_gguf(tmp_path / "new.gguf", seed=2).replace(path)
    second = weights.load(ModelFile("x", path))
    assert first.folder != second.folder
    assert first.spec.weights_digest != second.spec.weights_digest


def test_the_digest_is_of_the_content(own_cache, make_gguf, tmp_path):
    paths = [make_gguf(tmp_path / f"{n}.gguf", template=t) for n, t in (("a", "x"), ("b", "y"))]
    specs = [weights.load(ModelFile("x", path)).spec for path in paths]
    assert specs[0].weights_digest == specs[1].weights_digest


def test_a_cache_that_cannot_be_written(file, own_cache):
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot be prepared") as caught:
        weights.load(file)
    assert "CHATKV_CACHE_DIR" in caught.value.hint


def test_a_note_of_a_hash_that_is_damaged_is_not_believed(file, own_cache, monkeypatch):
    weights.load(file)
    (note,) = (own_cache / "hashes").iterdir()
    for content in ("", "[]", json.dumps({"file": [1, 2, 3], "sha256": "0" * 64})):
        note.write_text(content)
        made = conversions(monkeypatch)
        weights.load(file)
        assert not made
