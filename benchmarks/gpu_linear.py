"""Products of a step on one GPU, by tile: `python -m benchmarks.gpu_linear random:llama3-8b ...`.

Times each product of a model in a CUDA graph that runs it over rotated weights (more than the L2
holds), one launch behind another as in a step, for our kernels at several tiles and for the
library. Prints microseconds a launch and the bandwidth of the weights; `--json FILE` keeps them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.about import write
from chatkv.attention.triton_tree import supports_pdl
from chatkv.models import skinny_tiles
from chatkv.models import skinny_triton as skinny
from chatkv.models.cuda_layers import NARROW, PAGE_SIZE, library_product
from chatkv.models.fused_triton import Scaled
from chatkv.models.heads_triton import Rotary
from chatkv.models.random_model import random_spec
from chatkv.models.skinny_tiles import Tile, residual_blocks
from chatkv.models.spec import ModelSpec
from sessions.bench import about as facts

L2_BYTES = 120 << 20
LAUNCHES = 32
PARTS = ("qkv", "o", "gate_up", "down", "head")
SHARED_BYTES = 220_000
SHOWN = 8


def tiles(part: str, narrow: bool, inputs: int) -> list[Tile]:
    """Tiles to try for a product."""
    if narrow:
        wide = (64, 128) if part == "head" else (16, 32) if part in ("qkv", "gate_up") else (16,)
        found = [
            Tile(n, k, warps, stages, ahead)
            for n in wide
            for k in (64, 128, 256)
            for stages in (4, 7, 10)
            for warps in ((4, 8) if part == "head" else (2, 4))
            for ahead in ((512,) if part == "head" else (512, 1024))
        ]
    elif part in ("o", "down"):
        found = [
            Tile(n, k, warps, stages, 512, split)
            for n in (64, 128)
            for k in (64, 128)
            for stages in (4, 6, 8)
            for warps in (4, 8)
            for split in (1, 2, 4, 8)
        ]
    else:
        found = [
            Tile(n, k, warps, stages, ahead)
            for n in ((64, 128) if part == "head" else (32, 64, 128))
            for k in (64, 128)
            for stages in (4, 6, 8)
            for warps in (4, 8)
            for ahead in (0, 512)
        ]
    return [t for t in found if inputs % (t.k * t.split) == 0]


def time_us(launch: Callable[[int], None], copies: int, *, only_compile: bool = False) -> float:
    """Median microseconds of a launch, in a graph of many over rotated copies."""
    for i in range(2):
        launch(i % copies)
    if only_compile:
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launch(i % copies)
    times: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / LAUNCHES)
    return median(times[2:])


def measure(name: str, part: str, rows: int, only_compile: bool) -> dict[str, Any] | None:
    """One product of one model: all tiles, and the library."""
    spec, _ = random_spec(name)
    hidden, inner, half = spec.hidden_size, spec.intermediate_size, spec.head_dim // 2
    wide = spec.num_heads * spec.head_dim
    heads = spec.num_heads + 2 * spec.num_kv_heads
    narrow = hidden <= NARROW
    outputs, inputs, halves = {
        "qkv": (2 * heads * half, hidden, 2),
        "o": (hidden, wide, 1),
        "gate_up": (2 * inner, hidden, 2),
        "down": (hidden, inner, 1),
        "head": (spec.vocab_size, hidden, 1),
    }[part]
    size = 2 * outputs * inputs
    copies = 1 if only_compile else max(2, min(LAUNCHES, -(-L2_BYTES // size)))
    weights = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
    ]
    launch = launcher(part, spec, weights, rows, narrow)
    if halves == 2:
        own = skinny_tiles.pair_tile(outputs // 2, inputs)
    elif part == "head":
        own = skinny_tiles.single_tile(outputs, inputs)
    else:
        own = (skinny_tiles.residual_tile if narrow else skinny_tiles.split_tile)(outputs, inputs)
    found: list[tuple[float, Tile]] = []
    for tile in dict.fromkeys([own, *tiles(part, narrow, inputs)]):
        stage_bytes = 2 * tile.k * (tile.n * halves + rows)
        if tile.stages * stage_bytes > SHARED_BYTES or (part == "qkv" and half % tile.n):
            continue
        if only_compile and tile.split > 1:
            continue
        us = time_us(partial(launch, tile), copies, only_compile=only_compile)
        found.append((us, tile))
    if only_compile:
        return None
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out_dtype = torch.float32 if part == "head" else torch.bfloat16
    out = torch.empty(rows, outputs, device="cuda", dtype=out_dtype)
    library = time_us(partial(library_launch, x, weights, out), copies)
    rule = found[0][0]
    print(
        f"{name} {part} [{outputs}, {inputs}]: library {library:.2f} us, "
        f"rule {rule:.2f} us {size / rule / 1e6:.2f} TB/s {_short(own)}"
    )
    for us, tile in sorted(found, key=lambda pair: pair[0])[:SHOWN]:
        print(f"    {us:7.2f} us {size / us / 1e6:5.2f} TB/s {_short(tile)}")
    sys.stdout.flush()
    return {
        "model": name,
        "part": part,
        "shape": [outputs, inputs],
        "rows": rows,
        "library_us": library,
        "rule_us": rule,
        "tb_per_s": size / rule / 1e6,
        "tile": _short(own),
        "best_us": min(us for us, _ in found),
    }


def library_launch(x: Tensor, weights: list[Tensor], out: Tensor, i: int) -> None:
    library_product(x, weights[i], out)


def _short(tile: Tile) -> str:
    return f"n{tile.n} k{tile.k} w{tile.warps} s{tile.stages} ahead {tile.ahead} split {tile.split}"


def launcher(
    part: str, spec: ModelSpec, weights: list[Tensor], rows: int, narrow: bool
) -> Callable[[Tile, int], None]:
    """Launches of one product: (tile, which copy of the weights)."""
    outputs, inputs = weights[0].shape
    pdl = supports_pdl(torch.device("cuda"))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": "cuda"}
    plain = torch.randn(rows, inputs, device="cuda").to(torch.bfloat16)
    blocks = residual_blocks(spec.hidden_size)
    squares = torch.rand(rows, blocks, **floats)
    x: Tensor | Scaled = plain
    if narrow and part in ("qkv", "gate_up", "head"):
        x = Scaled(plain, squares, 1e-5)
    out = torch.zeros(rows, outputs, **floats)
    if part in ("o", "down") and narrow:
        norm = torch.ones(outputs, **floats)
        after = Scaled(out.to(torch.bfloat16), squares, 1e-5)
        return lambda t, i: skinny.add_project(plain, weights[i], out, norm, after, tile=t, pdl=pdl)
    if part in ("o", "down"):
        parts = torch.zeros(8, rows, outputs, **floats)
        return lambda t, i: skinny.project_parts(
            plain, weights[i], parts[: t.split], tile=t, pdl=pdl
        )
    if part == "head":
        return lambda t, i: skinny.project(x, weights[i], out, tile=t, pdl=pdl)
    if part == "gate_up":
        act = torch.zeros(rows, outputs // 2, device="cuda", dtype=torch.bfloat16)
        return lambda t, i: skinny.gate_project(x, weights[i], act, tile=t, pdl=pdl)
    angles = torch.randn(64, spec.head_dim // 2, device="cuda")
    rotary = Rotary(angles.cos(), angles.sin(), spec.num_heads, spec.num_kv_heads, spec.head_dim)
    positions = torch.zeros(rows, dtype=torch.int32, device="cuda")
    slots = torch.arange(rows, device="cuda")
    q = torch.zeros(rows, spec.num_heads, spec.head_dim, dtype=torch.bfloat16, device="cuda")
    shape = (-(-rows // PAGE_SIZE), 2, spec.num_kv_heads, PAGE_SIZE, spec.head_dim)
    pages = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    return lambda t, i: skinny.rotate_project(
        x, weights[i], None, rotary, positions, slots, q, pages, tile=t, pdl=pdl
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["random:smollm2-135m", "random:llama3-8b"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--compile", action="store_true", help="fill the cache, time nothing")
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    options = parser.parse_args()
    if not options.compile:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.rows} rows")
    lines = [
        line
        for name in options.names
        for part in options.part or PARTS
        if (line := measure(name, part, options.rows, options.compile))
    ]
    if lines:
        write(options.json, "gpu_linear", facts.about("cuda", dtype="bf16"), rows=lines)


if __name__ == "__main__":
    main()
