"""Times tree attention on a CUDA device against its peers, after checking values and bits.

    python -m benchmarks.attention_gpu [--out FOLDER] [--limit SECONDS]

Median over replays of a CUDA graph that holds one call for each rotated copy of the data, which
exceed the L2 cache together. Host planning, and our plan of a step, are outside the time. Prints a
line a shape and geometric means; writes attention_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_peers as peers
from benchmarks.attention_shapes import HEADS, HELD_OUT, QUOTED, TUNED, Shape
from chatkv.attention.call import AttentionCall
from chatkv.attention.reference import ancestor_words
from chatkv.attention.triton_check import Case, differing_rows, errors, random_tree
from chatkv.attention.triton_check import Shape as LayerShape
from chatkv.attention.triton_tree import TritonBackend

PAGE = 64
L2_BYTES = 200_000_000
FLEX_SHAPES = ("llama-3-8b B8 16384 T16", "llama-3-8b B1 16384 T16")
"""It compiles for a quarter of a minute a shape."""


def make_copy(shape: Shape, parents: tuple[int, ...]) -> tuple[Case, peers.Data]:
    """Random tensors on scattered pages: as a call of ours and for the peers."""
    heads, kv_heads, dim = HEADS[shape.model]
    entries = -(-max(shape.lengths) // PAGE)
    count = entries * len(shape.lengths)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pages = torch.randn(count, 2, kv_heads, PAGE, dim, **options)
    table = torch.randperm(count, device="cuda").int().view(-1, entries)
    q = torch.randn(len(shape.lengths) * shape.rows, heads, dim, **options)
    starts = tuple(range(0, len(q) + 1, shape.rows))
    words = ancestor_words(parents)
    call = AttentionCall(
        page_table=table,
        q_start=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        kv_len=torch.tensor(shape.lengths, dtype=torch.int32, device="cuda"),
        ancestors=words.repeat(len(shape.lengths), 1).cuda(),
        q_start_host=starts,
        kv_len_host=shape.lengths,
    )
    layer = LayerShape(heads, kv_heads, dim, PAGE, torch.bfloat16, device="cuda")
    case = Case(layer, call, q, pages, None, (parents,) * len(shape.lengths))
    bits = torch.arange(shape.rows)
    seen = (words[:, bits // 64] >> (bits % 64)) & 1 == 1
    data = peers.Data(q, pages, table, call.kv_len, shape.lengths, shape.rows, seen.cuda())
    return case, data


def graph_time(runs: Sequence[Callable[[], object]], budget: float = 0.02) -> float:
    """Microseconds of one run: median over replays of a graph that holds them all."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    replays = 3
    while len(times) < replays:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
        replays = max(5, min(30, int(budget * 1e6 / times[0])))
    return statistics.median(times) / len(runs)


def read_bandwidth() -> float:
    """Bytes a microsecond that a plain reduction reads: the floor is against this or 4.63e6."""
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return data.numel() * 4 / graph_time([lambda: data.sum()] * 2)


def ours(cases: Sequence[Case]) -> tuple[float, str]:
    """Our time, with the plan of the step made beforehand, and what served."""
    backend = TritonBackend()
    runs = []
    for case in cases:
        layer = case.shape
        plan = backend.plan(case.call, layer.num_heads, layer.num_kv_heads, layer.head_dim, PAGE)
        runs.append(lambda case=case, plan=plan: serve(backend, case, plan))
    return graph_time(runs), backend.kernel or ""


def serve(backend: TritonBackend, case: Case, plan: Any) -> object:
    """One call."""
    return backend.attend(case.call, case.q, case.pages, plan=plan)


def measure(shape: Shape, *, check: bool) -> dict[str, Any]:
    """All numbers of a shape. What cannot run is under `missing`, with its reason."""
    copies = max(2, min(40, -(-L2_BYTES // shape.num_bytes)))
    parents = random_tree(shape.rows, 8 if shape.rows > 1 else 1, random.Random(shape.rows))
    made = [make_copy(shape, parents) for _ in range(copies)]
    cases, data = [case for case, _ in made], [data for _, data in made]
    row: dict[str, Any] = {"shape": shape.name, "rows": shape.group_rows, "bytes": shape.num_bytes}
    row["missing"] = {}
    if check and shape.num_bytes < 1_100_000_000:
        row["error"], row["lse_error"] = errors(TritonBackend(), cases[0])
        row["differing"] = differing_rows(TritonBackend(), TritonBackend(), cases[0])
    row["ours"], row["kernel"] = ours(cases)
    for name, build in {**peers.TREE, **peers.CHAIN}.items():
        if name == "FlexAttention" and shape.name not in FLEX_SHAPES:
            continue
        try:
            few = data[: 2 if name == "FlexAttention" else copies]
            row[name] = graph_time([build(copy) for copy in few])
        except Exception as error:  # noqa: BLE001 (any peer may fail in any way)
            row["missing"][name] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.synchronize()
    row.update({f"{name} (quoted)": us for name, us in QUOTED.get(shape.name, {}).items()})
    # Once before the peers and once after, since a device warms up.
    row["ours"] = (row["ours"] + ours(cases)[0]) / 2
    return row


def fastest(row: dict[str, Any], names: Sequence[str]) -> float:
    """The fastest of those peers that ran, or was quoted; NaN if none did."""
    found = [row[key] for key in row for name in names if key in (name, f"{name} (quoted)")]
    return min(found, default=math.nan)


def mean(values: Sequence[float]) -> float:
    """Geometric, over what is a number."""
    found = [value for value in values if not math.isnan(value)]
    return math.exp(statistics.fmean(map(math.log, found))) if found else math.nan


def report(rows: Sequence[dict[str, Any]], bandwidth: float) -> None:
    """Print the table and the geometric means of peer time over ours."""
    for row in rows:
        row["tree_ratio"] = fastest(row, list(peers.TREE)) / row["ours"]
        row["chain_ratio"] = fastest(row, ["FA3 chain", "FlashInfer chain"]) / row["ours"]
        row["floor"] = row["bytes"] / bandwidth
    names = [*peers.TREE, *peers.CHAIN]
    print(f"{'us':36}{'rows':>5}{'floor':>8}{'ours':>8}", *(f"{name[:11]:>12}" for name in names))
    for row in rows:
        cells = (f"{fastest(row, [name]):12.1f}" for name in names)
        print(
            f"{row['shape'][:36]:36}{row['rows']:5}{row['floor']:8.1f}{row['ours']:8.1f}",
            *cells,
            f" tree x{row['tree_ratio']:.2f} chain x{row['chain_ratio']:.2f}",
            f"diff {row.get('differing', '-')} err {row.get('error', math.nan):.0e}",
        )
    for held in (False, True):
        for title, choose in (
            ("rows <= 64, T > 1", lambda row: row["rows"] <= 64 and row["shape"][-3:] != " T1"),
            ("T = 1", lambda row: row["shape"][-3:] == " T1"),
            ("rows > 64", lambda row: row["rows"] > 64),
        ):
            some = [row for row in rows if row["held_out"] == held and choose(row)]
            if not some:
                continue
            worst = min(row["tree_ratio"] for row in some)
            print(
                f"{'held out' if held else 'tuned':9}{title:18} n {len(some)}",
                f"tree x{mean([row['tree_ratio'] for row in some]):.3f} (worst {worst:.2f})",
                f"chain x{mean([row['chain_ratio'] for row in some]):.3f}",
            )
    large = [row["floor"] / row["ours"] for row in rows if row["bytes"] > 5e8 and row["rows"] <= 64]
    print("share of read bandwidth, K + V >= 0.5 GB:", " ".join(f"{x:.2f}" for x in large))


def compile_ahead(part: int, parts: int) -> None:
    """Compile the kernels of every parts-th shape, into Triton's cache."""
    for index, shape in enumerate(TUNED + HELD_OUT):
        if index % parts != part:
            continue
        tree = random_tree(shape.rows, 8 if shape.rows > 1 else 1, random.Random(shape.rows))
        case, _ = make_copy(shape, tree)
        TritonBackend().attend(case.call, case.q, case.pages)
        if shape.num_bytes < 1_100_000_000:
            differing_rows(TritonBackend(), TritonBackend(), case)
    torch.cuda.synchronize()


def main() -> None:
    """Compile in several processes, then measure shape by shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--compile", nargs=2, type=int)
    options = parser.parse_args()
    if options.compile:
        compile_ahead(*options.compile)
        return
    begun = time.monotonic()
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    command = [sys.executable, "-m", "benchmarks.attention_gpu", "--compile"]
    started = [subprocess.Popen([*command, str(i), str(workers)]) for i in range(workers)]
    for process in started:
        process.wait()
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    bandwidth = read_bandwidth()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read TB/s": bandwidth / 1e6,
    }
    print(about, flush=True)
    rows: list[dict[str, Any]] = []
    for shape in HELD_OUT + TUNED:
        if time.monotonic() - begun > options.limit:
            print("out of time before", shape.name)
            break
        row = measure(shape, check=True)
        row["held_out"] = shape in HELD_OUT
        rows.append(row)
        text = json.dumps({"about": about, "rows": rows}, indent=1)
        Path(options.out, "attention_gpu.json").write_text(text)
    missing = {name: reason for row in rows for name, reason in row["missing"].items()}
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    report(rows, max(bandwidth, 4.63e6))
    print(f"done in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
