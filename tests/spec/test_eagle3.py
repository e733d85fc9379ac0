"""EAGLE-3 heads from others' folders, held against an implementation of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from chatkv.errors import HeadsMismatch
from chatkv.models.random_model import byte_tokenizer, random_spec
from chatkv.spec.heads import eagle3
from chatkv.spec.heads.file import kind_for, load, save
from chatkv.spec.heads.grow import EagleCell
from chatkv.spec.heads.modules import EagleHead, angles_of
from chatkv.spec.train import __main__ as stages

SPEC = replace(random_spec("random:tiny")[0], weights_digest="ab" * 32, num_layers=8)
H, HEADS, KV, DIM, INNER, DRAFT = SPEC.hidden_size, 4, 2, 24, 96, 48
PRINT = b"tokens".ljust(32)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def settings(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
        "intermediate_size": INNER, "vocab_size": SPEC.vocab_size, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-2, "rope_theta": 100.0, "hidden_act": "silu", **more,
    }  # fmt: skip


def weights(prefix: str) -> dict[str, Tensor]:
    torch.manual_seed(4)
    sizes = {
        "fc": (H, 3 * H), "norm": (H,), "lm_head": (DRAFT, H),
        f"{prefix}input_layernorm": (H,), f"{prefix}hidden_norm": (H,),
        f"{prefix}post_attention_layernorm": (H,),
        f"{prefix}self_attn.q_proj": (HEADS * DIM, 2 * H),
        f"{prefix}self_attn.k_proj": (KV * DIM, 2 * H),
        f"{prefix}self_attn.v_proj": (KV * DIM, 2 * H),
        f"{prefix}self_attn.o_proj": (H, HEADS * DIM),
        f"{prefix}mlp.gate_proj": (INNER, H), f"{prefix}mlp.up_proj": (INNER, H),
        f"{prefix}mlp.down_proj": (H, INNER),
    }  # fmt: skip
    made = {}
    for name, size in sizes.items():
        made[f"{name}.weight"] = torch.randn(size) / (1 if len(size) == 1 else size[1] ** 0.5)
    ids = torch.randperm(SPEC.vocab_size)[:DRAFT]
    made["d2t"] = ids - torch.arange(DRAFT)
    made["t2d"] = torch.zeros(SPEC.vocab_size, dtype=torch.bool).scatter(0, ids, True)
    return made


def safe_ai_lab(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    about = {**settings(draft_vocab_size=DRAFT, rope_scaling=LLAMA3), **more}
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights("midlayer."), folder / "model.safetensors")
    return folder


def speculators(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    about = {
        "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
        "transformer_layer_config": settings(), **more,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights("layers.0."), folder / "model.safetensors")
    return folder


def logits_by_hand(
    tensors: dict[str, Tensor],
    prefix: str,
    taps: Tensor,
    embeds: Tensor,
    *,
    normed: bool,
    scaled: bool,
) -> Tensor:
    """[rows + 2, DRAFT] the last rows are guesses on the head's own states, over all before them.

    Args:
        taps: [rows, 3 H]. embeds: [rows + 2, H] of the id behind each row.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * tensors[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    def turn(x: Tensor, place: int) -> Tensor:
        out = torch.empty_like(x)
        for i in range(DIM // 2):
            angle = 100.0 ** (-2 * i / DIM)
            length = 2 * torch.pi / angle
            if scaled and length > 16:
                angle /= 8
            elif scaled and length >= 4:
                smooth = (16 / length - 1) / 3
                angle *= (1 - smooth) / 8 + smooth
            c, s = torch.tensor(place * angle).cos(), torch.tensor(place * angle).sin()
            a, b = x[..., i], x[..., i + DIM // 2]
            out[..., i], out[..., i + DIM // 2] = a * c - b * s, b * c + a * s
        return out

    keys: list[Tensor] = []
    values: list[Tensor] = []
    found, state = [], torch.zeros(H)
    for place, embed in enumerate(embeds):
        hidden = linear(taps[place], "fc") if place < len(taps) else state
        normed_hidden = norm(hidden, f"{prefix}hidden_norm")
        z = torch.cat([norm(embed, f"{prefix}input_layernorm"), normed_hidden])
        q = turn(linear(z, f"{prefix}self_attn.q_proj").view(HEADS, DIM), place)
        keys.append(turn(linear(z, f"{prefix}self_attn.k_proj").view(KV, DIM), place))
        values.append(linear(z, f"{prefix}self_attn.v_proj").view(KV, DIM))
        mixed = []
        for head in range(HEADS):
            own = head // (HEADS // KV)
            scores = torch.stack([q[head] @ key[own] for key in keys]) / DIM**0.5
            mixed.append(scores.softmax(0) @ torch.stack([value[own] for value in values]))
        out = (normed_hidden if normed else hidden) + linear(
            torch.cat(mixed), f"{prefix}self_attn.o_proj"
        )
        z = norm(out, f"{prefix}post_attention_layernorm")
        gate = linear(z, f"{prefix}mlp.gate_proj")
        gate = gate * gate.sigmoid() * linear(z, f"{prefix}mlp.up_proj")
        state = out + linear(gate, f"{prefix}mlp.down_proj")
        found.append(linear(norm(state, "norm"), "lm_head"))
    return torch.stack(found)


@pytest.mark.parametrize("layout", ["SafeAILab", "Speculators"])
def test_an_imported_head_guesses_as_its_makers_do(tmp_path, layout):
    if layout == "Speculators":
        folder, prefix = speculators(tmp_path / "head"), "layers.0."
    else:
        folder, prefix = safe_ai_lab(tmp_path / "head"), "midlayer."
    imported = eagle3.read(folder, SPEC, PRINT)
    save(tmp_path / "ours.safetensors", imported, packed=False)
    file = load(tmp_path / "ours.safetensors", SPEC, PRINT)  # rounded to bfloat16
    assert file.head.shape == imported.head.shape
    assert file.head.shape.taps == ((1, 3, 8) if layout == "Speculators" else (2, 4, 5))
    tensors = weights(prefix)
    assert file.draft_ids.tolist() == (tensors["d2t"] + torch.arange(DRAFT)).tolist()
    torch.manual_seed(1)
    rows = 6
    taps, embeds = torch.randn(rows, 3, H) * 3, torch.randn(rows + 2, H)
    expected = logits_by_hand(
        tensors, prefix, taps.flatten(1), embeds,
        normed=layout == "Speculators", scaled=layout != "Speculators",
    )  # fmt: skip
    head = imported.head
    assert isinstance(head, EagleHead)
    assert head.rows is not None
    places = torch.arange(rows)
    keys, values = head.stored(head.features(taps), embeds[:rows], angles_of(head.shape, places))

    def look(q):
        scores = torch.einsum("nwhgd,shd->nwhgs", q, keys)
        return scores, lambda shares: torch.einsum("nwhgs,shd->nwhgd", shares, values)

    cell = EagleCell(head, head.features(taps[-1:]), places[-1:], look)
    state = cell.begin(embeds[None, rows - 1 : rows])
    for step in range(3):
        got = head.logits(state, head.rows)[0, 0]
        assert torch.allclose(got, expected[rows - 1 + step], atol=2e-4), step
        if step < 2:
            zero = torch.zeros(1, 1, dtype=torch.int64)
            state = cell.advance(zero, embeds[None, rows + step : rows + step + 1])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"hidden_size": 64}, ["hidden is 64", "128"]),
        ({"vocab_size": 999}, ["vocabulary is 999", str(SPEC.vocab_size)]),
        ({"num_hidden_layers": 2}, ["number of layers is 2", "1"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 99]}, ["taps of 8 layers is [1, 3, 99]"]),
        ({"draft_vocab_size": 47}, ["shape of rows is (48, 128)", "(47, 128)"]),
        ({"hidden_act": "gelu"}, ["activation is gelu"]),
        ({"norm_before_fc": True}, ["norm before fc is True"]),
        ({"speculators_model_type": "mtp"}, ["speculators_model_type is mtp", "eagle3"]),
        ({"intermediate_size": "wide"}, ["lacks or garbles"]),
        ({"num_attention_heads": 0}, ["lacks or garbles"]),
        ({"num_attention_heads": 10**6}, ["shape of qkv"]),
        ({"head_dim": -1}, ["head_dim is -1"]),
        ({"num_key_value_heads": 2**53}, [f"num_kv_heads is {2**53}"]),
        ({"eagle_aux_hidden_state_layer_ids": 5}, ["lacks or garbles"]),
        ({"rope_theta": float("inf")}, ["rope_theta is inf"]),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(tmp_path, more, words):
    with pytest.raises(HeadsMismatch) as raised:
        eagle3.read(safe_ai_lab(tmp_path / "head", **more), SPEC, PRINT)
    assert all(word in raised.value.message for word in words), raised.value.message


@pytest.mark.parametrize("name", ["norm_before_residual", "eagle_aux_hidden_state_layer_ids"])
def test_speculators_has_to_say_what_cannot_be_guessed(tmp_path, name):
    with pytest.raises(HeadsMismatch, match=f"lacks or garbles '{name}'"):
        eagle3.read(speculators(tmp_path / "head", **{name: None}), SPEC, PRINT)


def test_both_maps_of_ids_must_agree(tmp_path):
    folder, tensors = safe_ai_lab(tmp_path / "head"), weights("midlayer.")
    tensors["t2d"][int(tensors["t2d"].nonzero()[0])] = False
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HeadsMismatch, match="t2d and d2t do not share is 1, needed is 0"):
        eagle3.read(folder, SPEC, PRINT)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(HeadsMismatch, match="no usable config"):
        eagle3.read(tmp_path, SPEC, PRINT)
    (tmp_path / "config.json").write_text(json.dumps(settings()))
    with pytest.raises(HeadsMismatch, match="has no safetensors"):
        eagle3.read(tmp_path, SPEC, PRINT)
    # Pickled weights are not even opened.
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93.")
    with pytest.raises(HeadsMismatch, match="has no safetensors") as caught:
        eagle3.read(tmp_path, SPEC, PRINT)
    assert "never loaded" in caught.value.hint
    tensors = weights("midlayer.")
    for name, words in (
        ("fc.weight", "no fc.weight"),
        ("midlayer.mlp.up_proj.weight", "lacks the tensor midlayer.mlp.up_proj.weight"),
    ):
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "a.safetensors")
        with pytest.raises(HeadsMismatch, match=words):
            eagle3.read(safe_config(tmp_path), SPEC, PRINT)
    save_file({**tensors, "fc.bias": torch.ones(H)}, tmp_path / "a.safetensors")
    with pytest.raises(HeadsMismatch, match=r"fc\.bias"):
        eagle3.read(tmp_path, SPEC, PRINT)


def safe_config(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(settings(draft_vocab_size=DRAFT)))
    return folder


def test_the_stage_writes_a_head_that_is_found(tmp_path, monkeypatch, capsys):
    spec = random_spec("random:tiny")[0]
    folder = safe_ai_lab(tmp_path / "Theirs", eagle_aux_hidden_state_layer_ids=[1, 1, 2])
    command = ["train", "import", "--model", "random:tiny", "--out", "x"]
    command += ["--folder", str(folder), "--to", str(tmp_path / "heads")]
    monkeypatch.setattr("sys.argv", command)
    assert stages.main() == 0
    (path,) = (tmp_path / "heads").iterdir()
    tokenizer = byte_tokenizer()
    assert kind_for(path, spec, tokenizer.tok_fp()) == "eagle"
    assert load(path, spec, tokenizer.tok_fp()).head.shape.source == "eagle3"
    (folder / "config.json").write_text("{}")
    assert stages.main() == 4
    assert "lacks or garbles" in capsys.readouterr().err
