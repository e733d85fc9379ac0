"""Times tree attention on a CUDA device against its peers, after checking values and bits.

    python -m benchmarks.attention_gpu [--json FILE] [--limit SECONDS]

Median over replays of a CUDA graph that holds one call for each rotated copy of the data, which
exceed the L2 cache together. Host planning, and our plan of a step, are outside the time. Peers
that must be compiled are compiled in processes beside it, and measured last.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import attention_peers as peers
from benchmarks.about import about, write
from benchmarks.attention_shapes import HELD_OUT, QUOTED, SLOW, TUNED, Shape
from benchmarks.attention_tax import SHAPES as TAXED
from benchmarks.attention_tax import compile_choices, tax
from benchmarks.attention_timing import (
    graph_time,
    make_copies,
    make_copy,
    our_time,
    quantised,
    read_bandwidth,
)
from chatkv.attention.triton_check import QUANTISED, Case, differing_rows, errors
from chatkv.attention.triton_tree import TritonBackend

Row = dict[str, Any]
LARGEST_CHECKED = 600_000_000
"""Bytes of keys and values up to which bits are compared; values up to a third of it."""
COMPILING = 0.45
"""Share of the time limit after which what is not compiled yet is left for later."""
QUANTISED_SHAPES = [Shape("llama-3-8b", (65536,) * 8, rows) for rows in (1, 16)]


def measure(shape: Shape) -> Row:
    """Ours, checked first, and the peers that need no compiling. What cannot run is `missing`."""
    cases, data = make_copies(shape)
    row: Row = {"shape": shape.name, "rows": shape.group_rows, "bytes": shape.num_bytes}
    row |= {"held_out": shape in HELD_OUT, "missing": {}}
    backend = TritonBackend()
    if shape.num_bytes < LARGEST_CHECKED / 3:
        row["error"], row["lse_error"] = errors(backend, cases[0])
    if shape.num_bytes < LARGEST_CHECKED:
        row["differing"] = differing_rows(backend, backend, cases[0], some_nodes(shape))
    before = our_time(backend, cases)
    row["kernel"] = backend.kernel
    _time_peers(row, data, peers.READY)
    for name, us in QUOTED.get(shape.name, {}).items():
        if name not in row:
            row[f"{name} (quoted)"] = us
    # Once before the peers and once after, since a device warms up.
    row["ours"] = (before + our_time(backend, cases)) / 2
    return row


def some_nodes(shape: Shape) -> list[int]:
    """Rows of a call to compare with plain decoding: 16, from all sequences."""
    total = shape.rows * len(shape.lengths)
    return list(range(0, total, -(-total // 16)))


def measure_compiled(shape: Shape, row: Row) -> None:
    """The peers that were compiled beside."""
    cases, data = make_copies(shape)
    _time_peers(row, data, peers.COMPILED)
    row["ours again"] = our_time(TritonBackend(), cases)


def _time_peers(
    row: Row, data: Sequence[peers.Data], found: dict[str, Callable[[peers.Data], peers.Run]]
) -> None:
    for name, build in found.items():
        if name == "FlexAttention" and row["shape"] not in peers.FLEX_SHAPES:
            continue
        try:
            few = data[: 2 if name == "FlexAttention" else len(data)]
            row[name] = graph_time([build(copy) for copy in few])
            row.pop(f"{name} (quoted)", None)
        except Exception as error:  # noqa: BLE001 (any peer may fail in any way)
            row["missing"][name] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.synchronize()


def measure_quantised(shape: Shape) -> list[Row]:
    """Ours on pages of each dtype."""
    found: list[Row] = []
    plain, _ = make_copies(shape)
    for dtype in (torch.bfloat16, *QUANTISED):
        cases: list[Case] = [quantised(case, dtype) if found else case for case in plain]
        backend = TritonBackend()
        us = our_time(backend, cases)
        row: Row = {"shape": shape.name, "pages": str(dtype).removeprefix("torch."), "us": us}
        row |= {"bf16_over_this": found[0]["us"] / us if found else 1.0, "kernel": backend.kernel}
        found.append(row)
    return found


def fastest(row: Row, names: Sequence[str]) -> float:
    """The fastest of those peers that ran, or was quoted; NaN if none did."""
    found = [row[key] for key in row for name in names if key in (name, f"{name} (quoted)")]
    return min(found, default=math.nan)


def mean(values: Sequence[float]) -> float:
    """Geometric, over what is a number; NaN of nothing."""
    found = [value for value in values if not math.isnan(value)]
    return math.exp(statistics.fmean(map(math.log, found))) if found else math.nan


def add_ratios(rows: Sequence[Row], bandwidth: float) -> None:
    """Each row's peer time over ours, and the share of the read bandwidth that ours reaches."""
    for row in rows:
        row["floor"] = row["bytes"] / bandwidth
        row["floor_share"] = row["floor"] / row["ours"]
        for key, names in (("tree_ratio", peers.TREE), ("chain_ratio", ["FA3 chain"])):
            ratio = fastest(row, list(names)) / row["ours"]
            row[key] = None if math.isnan(ratio) else ratio


def summarise(rows: Sequence[Row], quantised_rows: Sequence[Row]) -> Row:
    """Geometric means by kind of shape, and the worst of each."""
    kinds: dict[str, Callable[[Row], bool]] = {
        "up to 64 rows": lambda row: row["rows"] <= 64 and not row["shape"].endswith(" T1"),
        "plain": lambda row: row["shape"].endswith(" T1"),
        "above 64 rows": lambda row: row["rows"] > 64,
    }
    found: Row = {}
    for kind, belongs in kinds.items():
        for held_out in (False, True):
            some = [row for row in rows if belongs(row) and row["held_out"] == held_out]
            line: Row = {"shapes": len(some)}
            for key in ("tree_ratio", "chain_ratio"):
                ratios = [row[key] for row in some if row[key] is not None]
                if ratios:
                    line |= {f"{key}_mean": mean(ratios), f"{key}_worst": min(ratios)}
            found[f"{kind}, {'held out' if held_out else 'tuned'}"] = line
    for kind in ("up to 64 rows", "plain"):
        taxes = [row["tax"]["exact_over_free"] for row in rows if "tax" in row and kinds[kind](row)]
        if taxes:
            found[f"exactness tax, {kind}"] = {"mean": mean(taxes), "worst": max(taxes)}
    large = [row for row in rows if row["bytes"] >= 5e8 and row["rows"] <= 64]
    found["share of read bandwidth from 0.5 GB on"] = {
        row["shape"]: row["floor_share"] for row in large
    }
    found["differing"] = sum(row.get("differing", 0) for row in rows)
    found["bf16 over quantised"] = {
        f"{row['shape']} {row['pages']}": row["bf16_over_this"] for row in quantised_rows
    }
    return found


def show(rows: Sequence[Row], summary: Row) -> None:
    """Print the table and the summary."""
    names = list(peers.ALL)
    print(f"{'us':36}{'rows':>5}{'floor':>8}{'ours':>8}", *(f"{name[:11]:>12}" for name in names))
    for row in rows:
        cells = (f"{fastest(row, [name]):12.1f}" for name in names)
        ratios = (f"x{row[key] or math.nan:.2f}" for key in ("tree_ratio", "chain_ratio"))
        print(
            f"{row['shape'][:36]:36}{row['rows']:5}{row['floor']:8.1f}{row['ours']:8.1f}",
            *cells,
            *ratios,
            f"diff {row.get('differing', '-')} err {row.get('error', math.nan):.0e}",
            f"tax {row['tax']['exact_over_free']:.3f}" if "tax" in row else "",
        )
    for row in rows:
        for name, reason in row["missing"].items():
            print(f"missing at {row['shape']}: {name}: {reason}")
    for key, value in summary.items():
        print(f"{key}: {value}")


def compile_ahead(part: int, parts: int) -> None:
    """Compile the kernels of every parts-th shape, into Triton's cache."""
    backend = TritonBackend()
    for shape in (TUNED + HELD_OUT)[part::parts]:
        case, _ = make_copy(shape)
        backend.attend(case.call, case.q, case.pages)
        if shape.num_bytes < LARGEST_CHECKED:
            differing_rows(backend, backend, case, some_nodes(shape))
    for shape in TAXED:
        compile_choices(shape, part, parts)
    for shape in QUANTISED_SHAPES:
        case, _ = make_copy(Shape(shape.model, (300,) * len(shape.lengths), shape.rows))
        for dtype in QUANTISED[part::parts]:
            codes = quantised(case, dtype)
            backend.attend(codes.call, codes.q, codes.pages, scales=codes.scales)
    torch.cuda.synchronize()


def main() -> None:
    """Compile in several processes, then measure shape by shape."""
    parser = argparse.ArgumentParser(prog="benchmarks.attention_gpu")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--compile-peers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        return compile_ahead(*args.compile)
    if args.compile_peers:
        return peers.compile_all()
    begun = time.monotonic()
    workers = max(1, min(12, (os.cpu_count() or 2) - 3))
    command = [sys.executable, "-m", "benchmarks.attention_gpu"]
    for_peers = subprocess.Popen(["nice", *command, "--compile-peers"])
    started = [
        subprocess.Popen([*command, "--compile", str(i), str(workers)]) for i in range(workers)
    ]
    facts = about(device="cuda")
    for process in started:
        try:
            process.wait(max(0.0, begun + COMPILING * args.limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    bandwidth = read_bandwidth()
    facts |= {"dtype": "bf16", "read TB/s": bandwidth / 1e6, "page size": 64}
    rows: list[Row] = []
    found: list[Row] = []

    def left() -> bool:
        return time.monotonic() - begun < args.limit

    def save() -> None:
        add_ratios(rows, max(bandwidth, 4.63e6))
        data = {"rows": rows, "quantised": found, "summary": summarise(rows, found)}
        write(args.json, "attention_gpu", facts, **data)

    by_name: dict[str, Row] = {}
    for shape in TUNED + HELD_OUT:
        if left():
            rows.append(measure(shape))
            by_name[shape.name] = rows[-1]
            save()
    print(f"measured at {time.monotonic() - begun:.0f} s", flush=True)
    for shape in TAXED:
        if left():
            by_name[shape.name]["tax"] = tax(shape, make_copies(shape)[0])
            save()
    for shape in QUANTISED_SHAPES:
        if left():
            found += measure_quantised(shape)
            save()
    while left() and for_peers.poll() is None:
        time.sleep(0.5)
    print(f"peers compiled at {time.monotonic() - begun:.0f} s", flush=True)
    for shape in SLOW:
        if left():
            measure_compiled(shape, by_name[shape.name])
            save()
    for_peers.kill()
    show(rows, summarise(rows, found))
    print(f"done in {time.monotonic() - begun:.0f} s")
    return None


if __name__ == "__main__":
    main()
