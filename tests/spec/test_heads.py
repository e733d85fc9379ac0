"""Draft heads: their files, and the trees they grow."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import product as pairs
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from chatkv.errors import HeadsMismatch
from chatkv.models.random_model import random_spec
from chatkv.spec.heads import packed
from chatkv.spec.heads.file import HeadFile, load, save, target_of
from chatkv.spec.heads.grow import (
    EagleCell,
    Growth,
    ParallelCell,
    RecurrentCell,
    Vocabulary,
    grow,
)
from chatkv.spec.heads.modules import Head, angles_of, new_head
from chatkv.spec.heads.shape import KINDS, shape_for, taps_of
from chatkv.spec.tree import DraftTree

SPEC = replace(random_spec("random:tiny")[0], weights_digest="ab" * 32)
PRINT = b"tokens".ljust(32)
IDS = torch.arange(40) * 7 % 320


def made(kind: str, depth: int | None = None) -> Head:
    torch.manual_seed(3)
    return new_head(shape_for(kind, SPEC, draft_ids=len(IDS), depth=depth)).requires_grad_(False)


def written(tmp_path, kind: str = "recurrent"):
    path = tmp_path / "heads.safetensors"
    facts = {"steps": 5, "stints": 1}
    measured = {"tree of 16": {"0": {"tau": 2.5}}}
    save(path, HeadFile(made(kind), IDS, target_of(SPEC, PRINT), facts, measured))
    return path


def changed(path, tensors: dict[str, Any] | None = None, **about: str):
    """The same file with other metadata or tensors; None takes a tensor away."""
    with safe_open(path, framework="pt") as opened:
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = {**opened.metadata(), **about}
    held |= tensors or {}
    save_file({name: t for name, t in held.items() if t is not None}, path, metadata=metadata)
    return path


def cell_of(head: Head, taps: torch.Tensor, positions: torch.Tensor | None = None):
    if head.shape.kind == "recurrent":
        return RecurrentCell(head, taps)
    if head.shape.kind == "parallel":
        return ParallelCell(head, taps)
    # Rows that have stored nothing but themselves would need a look; one empty slot is as good.
    size = (len(taps), 1, head.shape.num_kv_heads, head.shape.head_dim)
    stored = torch.zeros(size)

    def look(q):
        scores = torch.einsum("nwhgd,nshd->nwhgs", q, stored)
        return scores, lambda shares: torch.einsum("nwhgs,nshd->nwhgd", shares, stored)

    places = torch.arange(len(taps)) if positions is None else positions
    return EagleCell(head, head.features(taps), places, look)


def vocabulary() -> Vocabulary:
    torch.manual_seed(4)
    table = torch.randn(SPEC.vocab_size, SPEC.hidden_size)
    return Vocabulary.of(IDS, 0.2 * table, table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_comes_back_as_it_was(tmp_path, kind):
    found = load(written(tmp_path, kind), SPEC, PRINT)
    assert found.head.shape == made(kind).shape
    for (name, weight), (other, expected) in zip(
        found.head.named_parameters(), made(kind).named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(weight, expected.bfloat16().float())
    assert found.draft_ids.tolist() == IDS.tolist()
    assert found.training["steps"] == 5
    assert found.measured["tree of 16"]["0"]["tau"] == 2.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_file_loses_at_most_half_a_step(tmp_path, kind):
    path = tmp_path / "heads.safetensors"
    save(path, HeadFile(made(kind), IDS, target_of(SPEC, PRINT)), packed=True)
    once = load(path, SPEC, PRINT)
    for (name, weight), (_, exact) in zip(
        once.head.named_parameters(), made(kind).named_parameters(), strict=True
    ):
        if not packed.fits(weight):
            assert torch.equal(weight, exact.bfloat16().float()), name
            continue
        largest = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
        wrong = (weight - exact).unflatten(-1, (-1, 32)).abs()
        assert bool((wrong <= largest * (0.5 / 127 + 2**-10)).all()), name
    # Packing what is packed changes nothing.
    save(path, once, packed=True)
    again = dict(load(path, SPEC, PRINT).head.named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in once.head.named_parameters())
    assert path.stat().st_size < 0.62 * written(tmp_path / "other", kind).stat().st_size
    changed(path, {"fuse.scale": None})
    with pytest.raises(HeadsMismatch, match=r"scales of fuse is \(0,\)"):
        load(path, SPEC, PRINT)


def test_sizes_of_the_default_model():
    spec = random_spec("random:smollm2-135m")[0]
    assert taps_of(spec.num_layers) == (10, 20, 30)
    millions = {
        kind: sum(p.numel() for p in new_head(shape_for(kind, spec)).parameters()) / 1e6
        for kind in KINDS
    }
    assert millions == pytest.approx({"parallel": 2.32, "recurrent": 3.21, "eagle": 5.09}, abs=0.01)


@pytest.mark.parametrize(
    ("about", "tensors", "words"),
    [
        ({"weights": "cd" * 32}, {}, ["weights", "cd" * 32, "ab" * 32]),
        ({"tokenizer": "00"}, {}, ["tokenizer is 00", PRINT.hex()]),
        ({"format": "3"}, {}, ["format is 3", "needed is 1"]),
        ({"format": "2"}, {}, ["scales of", "(0,)"]),
        ({"shape": "{}"}, {}, ["shape"]),
        ({}, {"draft_ids": IDS[:39].int()}, ["number of draft ids is 39", "40"]),
        ({}, {"draft_ids": torch.zeros(40).int()}, ["different draft ids is 1", "40"]),
        ({}, {"draft_ids": IDS.int() + 300}, ["below 320"]),
        ({}, {"gamma": None}, ["gamma is None", "(128,)"]),
        ({}, {"gamma": torch.ones(64).bfloat16()}, ["gamma is (64,)", "(128,)"]),
        ({}, {"gamma": torch.full((128,), torch.nan).bfloat16()}, ["gamma is finite is False"]),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(tmp_path, about, tensors, words):
    path = changed(written(tmp_path), tensors, **about)
    with pytest.raises(HeadsMismatch) as raised:
        load(path, SPEC, PRINT)
    assert all(word in raised.value.message for word in words), raised.value.message
    assert "train-heads" in raised.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [("taps", [1, 2, 3]), ("hidden", 64), ("num_heads", 8), ("kind", "other"), ("depth", 0)],
)
def test_a_shape_of_another_model_is_refused(tmp_path, field, value):
    path = written(tmp_path)
    with safe_open(path, framework="pt") as opened:
        shape = json.loads(opened.metadata()["shape"])
    changed(path, shape=json.dumps({**shape, field: value}))
    with pytest.raises(HeadsMismatch) as raised:
        load(path, SPEC, PRINT)
    assert field in raised.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("inner", value) for value in (-1, 0, 2**40, 1.5, True, "x", None, [1])),
        *(("depth", value) for value in ("5", 2**40)),
        ("draft_ids", None),
        ("rope_theta", "x"),
        ("eps", -1.0),
        ("rope_factors", [1, "x"]),
        ("source", "other"),
        ("taps", "abc"),
        (None, None),
        (None, [5]),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused_before_it_is_allocated(tmp_path, field, value):
    path = written(tmp_path)
    with safe_open(path, framework="pt") as opened:
        shape = json.loads(opened.metadata()["shape"])
    changed(path, shape=json.dumps({**shape, field: value} if field else value))
    with pytest.raises(HeadsMismatch) as raised:
        load(path, SPEC, PRINT)
    assert (field or "shape") in raised.value.message


@pytest.mark.parametrize("name", ["training", "measured"])
@pytest.mark.parametrize("text", ["", "{", "null", "[1]"])
def test_facts_that_cannot_be_read_are_damage(tmp_path, name, text):
    path = changed(written(tmp_path), **{name: text})
    with pytest.raises(HeadsMismatch, match=f"{name} is a JSON object is False"):
        load(path, SPEC, PRINT)


def test_a_flipped_bit_is_refused_or_harmless(tmp_path):
    path = written(tmp_path)
    raw = path.read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")
    for place in range(8, head, 7):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with suppress(HeadsMismatch):
            load(path, SPEC, PRINT)


def test_values_of_a_file_are_told_in_one_short_line(tmp_path):
    path = changed(written(tmp_path), tokenizer="a\n" + "x" * 70_000)
    with pytest.raises(HeadsMismatch) as raised:
        load(path, SPEC, PRINT)
    assert len(raised.value.message) < 400
    assert "\n" not in raised.value.message


def test_a_file_cut_short_is_refused(tmp_path):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(HeadsMismatch, match="5000 bytes"):
        load(path, SPEC, PRINT)
    path.unlink()
    with pytest.raises(HeadsMismatch, match="no bytes"):
        load(path, SPEC, PRINT)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_trees_of_draft_ids_and_rows_do_not_depend_on_each_other(kind):
    head, words = made(kind), vocabulary()
    taps, roots = torch.randn(6, 3, SPEC.hidden_size), torch.tensor([1, 5, 9, 300, 2, 7])
    positions = torch.arange(6) + 10
    noise = torch.randn(6, 4, len(IDS))
    heat = torch.tensor([1.0, 1.4, 1.0, 1.0, 2.0, 1.0])
    growth = Growth(rows=16, depth=4, width=4, children=6)
    cell = cell_of(head, taps, positions)
    found = grow(head, cell, words, roots, growth, inverse_t=heat, noise=noise)
    for row in range(6):
        tree = DraftTree.of(
            found.tokens[row].tolist(),
            found.parents[row].tolist(),
            found.chance[row].tolist(),
        )
        assert tree.tokens[0] == roots[row]
        assert set(tree.tokens[1:].tolist()) <= set(IDS.tolist())
        one = slice(row, row + 1)
        alone = grow(
            head, cell_of(head, taps[one], positions[one]), words, roots[one], growth,
            inverse_t=heat[one], noise=noise[one],
        )  # fmt: skip
        assert torch.equal(alone.tokens[0], found.tokens[row])
        assert torch.equal(alone.parents[0], found.parents[row])
        assert torch.allclose(alone.chance[0], found.chance[row], rtol=1e-4)


def test_the_tree_is_the_best_one():
    head, words = made("recurrent"), vocabulary()
    taps, root = torch.randn(1, 3, SPEC.hidden_size), 17
    growth = Growth(rows=12, depth=2, width=len(IDS), children=len(IDS))
    found = grow(
        head, RecurrentCell(head, taps), words, torch.tensor([root]), growth,
        inverse_t=torch.ones(1),
    )  # fmt: skip
    first = head.advance(head.features(taps), words.embedding[[root]])
    share = head.logits(first, words.draft_rows).softmax(-1)[0]
    chances = {(int(t),): float(share[i]) for i, t in enumerate(IDS)}
    second = head.advance(first.expand(len(IDS), -1), words.embedding[IDS])
    below = head.logits(second, words.draft_rows).softmax(-1)
    for a, b in pairs(range(len(IDS)), range(len(IDS))):
        chances[int(IDS[a]), int(IDS[b])] = float(share[a] * below[a, b])
    expected = sorted(chances.values(), reverse=True)[:11]
    assert sorted(found.chance[0, 1:].tolist(), reverse=True) == pytest.approx(expected, rel=1e-4)
    tree = DraftTree.of(*(part[0].tolist() for part in (found.tokens, found.parents, found.chance)))
    for row in range(1, 12):
        assert float(tree.chance[row]) == pytest.approx(chances[tree.path(row)], rel=1e-4)


def test_positions_turn_heads_as_the_target_does():
    shape = shape_for("eagle", SPEC)
    cos, sin = angles_of(shape, torch.tensor([0, 3]))
    assert torch.equal(cos[0], torch.ones(32))
    assert float(sin[1, 0]) == pytest.approx(0.14112, abs=1e-5)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_sure_guess_is_never_without_its_parent(rows):
    """All on the best path are certain, so they rank alike: the upper ones stay."""
    head, words = made("recurrent"), vocabulary()
    roots = torch.arange(40)
    found = grow(
        head, RecurrentCell(head, torch.randn(40, 3, SPEC.hidden_size)), words, roots,
        Growth(rows=rows, depth=4, width=3, children=6), inverse_t=torch.full((40,), 1e5),
    )  # fmt: skip
    assert found.parents.tolist() == [[0, *range(rows - 1)]] * 40
    assert found.chance.tolist() == [[1.0] * rows] * 40
