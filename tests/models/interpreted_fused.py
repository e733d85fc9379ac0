"""The device's row kernels against their plain versions. Run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from chatkv.attention import store
from chatkv.attention.reference import dequantise
from chatkv.models import chunks, skinny_tiles
from chatkv.models import fused_triton as fused
from chatkv.models import heads_triton as heads_kernels
from chatkv.models import skinny_triton as skinny
from chatkv.models.fused_triton import Scaled
from chatkv.models.heads_triton import Rotary

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
            heads_kernels.rotate_rows_plain(qkv, bias, angles, *where, q, pages)
        else:
            heads_kernels.rotate_rows(qkv, bias, angles, *where, q, pages, heads_a_program=heads)
        found.append((q, pages))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    ("kind", "dim"),
    [(torch.int8, 64), (torch.int8, 96), (torch.float8_e4m3fn, 64), (torch.uint8, 128)],
    ids=str,
)
def test_rotated_rows_become_codes(kind: torch.dtype, dim: int, heads: int):
    angles, where, found = rotary(dim), places(ROWS), []
    qkv = torch.randn(ROWS, angles.all_heads * dim)
    columns, per_slot = (dim // 2, dim // 32) if kind == torch.uint8 else (dim, 1)
    for plain in (False, True):
        q, pages = torch.zeros(ROWS, 3, dim), torch.full((5, 2, 1, 16, columns), 7).to(kind)
        scales = torch.full((5, 2, 1, 16, per_slot), 0.5).half()
        if plain:
            heads_kernels.rotate_rows_plain(qkv, None, angles, *where, q, pages, scales)
        else:
            heads_kernels.rotate_rows(
                qkv, None, angles, *where, q, pages, scales, heads_a_program=heads
            )
        found.append((q, pages.view(torch.uint8), scales))
    assert all(torch.equal(actual, expected) for actual, expected in zip(*found, strict=True))


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


@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 80)], ids=str)
@pytest.mark.parametrize(("start", "known", "stop"), [(0, 0, 200), (70, 75, 90), (200, 328, 456)])
def test_a_chunk_attends_to_pages(start: int, known: int, stop: int, heads: tuple[int, int, int]):
    rows, (num_heads, num_kv_heads, dim) = 256, heads
    q = torch.randn(rows, num_heads, dim)
    pages = torch.randn(8, 2, num_kv_heads, 64, dim)
    table = torch.randperm(8).to(torch.int32)
    stored = pages[table.long()].permute(1, 2, 0, 3, 4).flatten(2, 3)
    keys, found = stored[:, :, : start + rows]
    expected = chunks.attend_chunk_plain(q, keys, found, start, dim**-0.5)
    # What lies behind the last new row was never written.
    for entry, page in enumerate(table.tolist()):
        pages[page, :, :, max(0, stop - 64 * entry) :] = torch.nan
    out = torch.zeros_like(q)
    span = torch.tensor([start, known, stop], dtype=torch.int32)
    chunks.attend_chunk(q, pages, table, span, out)
    close(out[known - start : stop - start], expected[known - start : stop - start])
    assert bool(out.isfinite().all())
    chunks.attend_chunk(q, pages, table, span, q)
    new = slice(known - start, stop - start)
    assert torch.equal(q[new], out[new])


@pytest.mark.parametrize("window", [0, 20, 150])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("has_holes", [False, True])
def test_a_chunk_sees_what_exists_and_is_near(has_holes: bool, codes: bool, window: int):
    """Forgotten slots hold NaN; positions run ahead of slots; a window counts positions."""
    rows, start, stop, dim, ahead = 128, 192, 290, 64, 40 if has_holes else 0
    q, values = torch.randn(rows, 4, dim), torch.randn(6, 2, 2, 64, dim)
    table = torch.randperm(6).to(torch.int32)
    valid = torch.tensor([[0, 9], [33, 64], [1, 50], [0, 64], [0, 64], [0, 64]], dtype=torch.int32)
    page_pos = torch.tensor([-3, 40, 111, 232, 296, 360], dtype=torch.int32)
    slots = torch.arange(start + rows)
    positions = page_pos[slots // 64] + slots % 64 if has_holes else slots
    lo, hi = valid[slots // 64].unbind(-1)
    exists = (lo <= slots % 64) & (slots % 64 < hi) | torch.tensor(not has_holes)
    pages, scales = store.quantise(values, torch.int8) if codes else (values, None)
    stored = dequantise(pages, scales, torch.float32)[table.long()]
    keys, found = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : start + rows]
    own = start + torch.arange(rows)
    seen = exists & (slots <= own[:, None])
    if window:
        seen &= positions > positions[own][:, None] - window
    scores = torch.einsum("thd,hld->htl", q, keys.repeat_interleave(2, 0)) * dim**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("htl,hld->thd", weights, found.repeat_interleave(2, 0))
    for slot in range(6 * 64):
        if slot >= stop or not exists[slot]:
            poisoned = pages if scales is None else scales
            poisoned[table[slot // 64], :, :, slot % 64] = torch.nan
    span = torch.tensor([start, start, stop, ahead], dtype=torch.int32)
    out = torch.zeros_like(q)
    holes = (valid, page_pos) if has_holes else None
    chunks.attend_chunk(q, pages, table, span, out, scales, holes=holes, window=window)
    close(out[: stop - start], expected[: stop - start])


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_a_chunk_attends_to_codes(kind: torch.dtype):
    rows, start, stop, dim = 128, 70, 190, 64
    q, values = torch.randn(rows, 4, dim), torch.randn(4, 2, 2, 64, dim)
    pages, scales = store.quantise(values, kind)
    table = torch.randperm(4).to(torch.int32)
    stored = dequantise(pages, scales, torch.float32)[table.long()]
    stored = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)
    keys, found = stored[:, :, : start + rows]
    expected = chunks.attend_chunk_plain(q, keys, found, start, dim**-0.5)
    for entry, page in enumerate(table.tolist()):
        scales[page, :, :, max(0, stop - 64 * entry) :] = torch.nan
    span, out = torch.tensor([start, start, stop], dtype=torch.int32), torch.zeros_like(q)
    chunks.attend_chunk(q, pages, table, span, out, scales)
    close(out[: stop - start], expected[: stop - start])


@pytest.mark.parametrize("hidden", [576, 4096])
@pytest.mark.parametrize("offset", [0, 1, 127, 128, 300, 2047, 2048, 4095, 4096, 10_000])
def test_chunks_cover_every_id_once(offset: int, hidden: int):
    chunk_of = chunks.Chunking.of(hidden).chunk_of
    first, rows = chunk_of(offset)
    assert first <= offset < first + rows
    assert chunk_of(first) == chunk_of(first + rows - 1) == (first, rows)
    assert first == 0 or sum(chunk_of(first - 1)) == first
