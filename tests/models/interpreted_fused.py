"""The device's row kernels against their plain versions. Run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from chatkv.models import chunks, skinny_tiles
from chatkv.models import fused_triton as fused
from chatkv.models import skinny_triton as skinny
from chatkv.models.fused_triton import Rotary, Scaled

EPS = 1e-5
ROWS, WIDTH = 16, 96


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 on both sides: only the order of sums may differ."""
    assert bool(expected.isfinite().all())
    error = (actual - expected).norm() / expected.norm()
    assert error < 2e-6, error


def rotary(dim: int, norm: bool = False) -> Rotary:
    angles = torch.randn(64, dim // 2)
    weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    return Rotary(angles.cos(), angles.sin(), 3, 1, dim, *weights, EPS)


def places(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, and scattered slots of five pages, one of them to be left out."""
    slots = torch.randperm(80)[:rows]
    slots[5] = -1
    return torch.randint(0, 64, (rows,), dtype=torch.int32), slots


def empty_scaled(rows: int, width: int) -> Scaled:
    blocks = skinny_tiles.residual_blocks(width)
    return Scaled(torch.full((rows, width), torch.nan), torch.full((rows, blocks), torch.nan), EPS)


def scaled_rows(rows: int, width: int) -> Scaled:
    scaled = empty_scaled(rows, width)
    scaled.x.normal_()
    scaled.squares.uniform_()
    return scaled


def test_embedding_begins_a_norm():
    table, norm = torch.randn(50, WIDTH), torch.randn(WIDTH)
    tokens = torch.randint(0, 50, (ROWS,), dtype=torch.int32)
    found = []
    for embed in (fused.embed_rows, fused.embed_rows_plain):
        hidden, scaled = torch.zeros(ROWS, WIDTH), empty_scaled(ROWS, WIDTH)
        embed(tokens, table, hidden, norm=norm, scaled=scaled)
        found.append((hidden, scaled.x, scaled.squares))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("delta", [None, (ROWS, WIDTH), (3, ROWS, WIDTH)], ids=str)
def test_norm(delta: tuple[int, ...] | None):
    before, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    more = None if delta is None else torch.randn(delta)
    found = []
    for norm in (fused.norm_rows, fused.norm_rows_plain):
        hidden, out = before.clone(), torch.zeros(ROWS, WIDTH)
        norm(hidden, more, weight, EPS, out)
        found.append((hidden, out))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dim", [32, 80])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_goes_to_pages(norm: bool, dim: int, heads: int):
    angles = rotary(dim, norm)
    qkv = torch.randn(ROWS, angles.all_heads * dim)
    bias = torch.randn(qkv.shape[1]) if norm else None
    where = places(ROWS)
    found = []
    for plain in (False, True):
        q, pages = torch.zeros(ROWS, 3, dim), torch.full((5, 2, 1, 16, dim), 7.0)
        if plain:
            fused.rotate_rows_plain(qkv, bias, angles, *where, q, pages)
        else:
            fused.rotate_rows(qkv, bias, angles, *where, q, pages, heads_a_program=heads)
        found.append((q, pages))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


def test_gate():
    gate_up, found = torch.randn(ROWS, 2 * WIDTH) * 20, []
    for gate in (fused.gate_rows, fused.gate_rows_plain):
        found.append(torch.zeros(ROWS, WIDTH))
        gate(gate_up, found[-1])
    close(*found)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("scaled", [False, True])
def test_products(scaled: bool, rows: int):
    x = scaled_rows(rows, WIDTH) if scaled else torch.randn(rows, WIDTH)
    weight, found = torch.randn(130, WIDTH), []
    for project in (skinny.project, skinny.project_plain):
        found.append(torch.zeros(rows, 130))
        project(x, weight, found[-1])
    close(*found)
    weight, found = torch.randn(2 * 40, WIDTH), []
    for project in (skinny.gate_project, skinny.gate_project_plain):
        found.append(torch.zeros(rows, 40))
        project(x, weight, found[-1])
    close(*found)
    angles = rotary(32)
    weight, where, found = torch.randn(angles.all_heads * 32, WIDTH), places(rows), []
    bias = torch.randn(len(weight)) if scaled else None
    for project in (skinny.rotate_project, skinny.rotate_project_plain):
        q, pages = torch.zeros(rows, 3, 32), torch.full((5, 2, 1, 16, 32), 7.0)
        project(x, weight, bias, angles, *where, q, pages)
        found.append((q, pages))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("rows", [16, 32])
def test_products_onto_the_residual(rows: int):
    weight, before, norm = torch.randn(130, WIDTH), torch.randn(rows, 130), torch.randn(130)
    x, found = torch.randn(rows, WIDTH), []
    for project in (skinny.add_project, skinny.add_project_plain):
        hidden, scaled = before.clone(), empty_scaled(rows, 130)
        project(x, weight, hidden, norm, scaled)
        found.append((hidden, scaled.x, scaled.squares))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


def test_products_in_parts():
    weight, x, found = torch.randn(144, 1024), torch.randn(16, 1024), []
    split = skinny_tiles.split_tile(144, 1024).split
    assert split > 1
    for project in (skinny.project_parts, skinny.project_parts_plain):
        found.append(torch.zeros(split, 16, 144))
        project(x, weight, found[-1])
    close(*found)
    close(found[0].sum(0), x @ weight.T)


def test_gathered_pages():
    pages = torch.randn(6, 2, 3, 16, 32)
    table = torch.tensor([4, 0, 5, 2], dtype=torch.int32)
    for stop, slots in ((1, 16), (33, 40), (64, 64)):
        actual = chunks.gather(pages, table, stop, slots)
        assert torch.equal(actual, chunks.gather_plain(pages, table, stop, slots))


def test_joined_attention_is_attention_over_both():
    q = torch.randn(16, 4, 32)
    keys, values = torch.randn(2, 2, 40, 32)
    scale = 32**-0.5
    whole = chunks.attend_chunk_plain(q, keys, values, 24, scale)
    parts = []
    for first, stop in ((0, 24), (24, 40)):
        repeated = [t[:, first:stop].repeat_interleave(2, 0) for t in (keys, values)]
        scores = torch.einsum("thd,hld->htl", q, repeated[0]) * scale
        seen = torch.arange(first, stop)[None] <= torch.arange(16)[:, None] + 24
        scores = scores.masked_fill(~seen, -torch.inf)
        out = torch.einsum("htl,hld->thd", scores.softmax(-1), repeated[1])
        parts += [out, scores.logsumexp(-1)]
    close(chunks.join_rows(*parts), whole)
    close(chunks.join_rows_plain(*parts), whole)


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 300, 2047, 2048, 4095, 4096, 10_000])
def test_chunks_cover_every_id_once(offset: int):
    first, rows = chunks.chunk_of(offset)
    assert first <= offset < first + rows
    assert chunks.chunk_of(first) == chunks.chunk_of(first + rows - 1) == (first, rows)
    assert first == 0 or chunks.chunk_of(first - 1)[0] + chunks.chunk_of(first - 1)[1] == first
