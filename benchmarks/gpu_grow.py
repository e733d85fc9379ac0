"""A head's tree on a GPU: the whole growth as one graph, and each of its kernels.

`python -m benchmarks.gpu_grow --json FILE`

Microseconds, medians of graph replays, for heads of the shapes that ship, with random weights.
Whole graphs are timed with weights in the second-level cache and, as behind a step, without. A
kernel alone is a graph of 64 launches of it, divided by 64: what is shared out over a growth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from safetensors import safe_open

import chatkv
from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.spec.heads import fused, fused_eagle
from chatkv.spec.heads.device_eagle import GROWTH, ROWS
from chatkv.spec.heads.file import DRAFT_IDS
from chatkv.spec.heads.fused import FusedGrower, Launches
from chatkv.spec.heads.fused_eagle import EagleMemory, FusedEagleGrower, NewRows
from chatkv.spec.heads.grow import Vocabulary
from chatkv.spec.heads.modules import WINDOW, EagleHead, RecurrentHead
from chatkv.spec.heads.shape import HeadShape

Line = dict[str, Any]
Work = Callable[[], None]
TIMES = 64
WEIGHTS = Path(chatkv.__file__).parent / "spec" / "weights"


class Recorded:
    """A kernel that notes each launch."""

    def __init__(self, name: str, kernel: Any, noted: list[tuple[str, Work]]) -> None:
        self.name, self.kernel, self.noted = name, kernel, noted

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> None:
            self.noted.append((self.name, lambda: self.kernel[grid](*args, **options)))
            self.kernel[grid](*args, **options)

        return run


class Recorder:
    """A module of kernels that note each launch."""

    def __init__(self, module: Any, noted: list[tuple[str, Work]]) -> None:
        self.module, self.noted = module, noted

    def __getattr__(self, name: str) -> Recorded:
        return Recorded(name, getattr(self.module, name), self.noted)


def shipped(kind: str) -> tuple[HeadShape, torch.Tensor]:
    """Shape and draft ids of a head that ships."""
    path = next(WEIGHTS.glob(f"*-{kind}.safetensors"))
    with safe_open(path, framework="pt") as opened:
        fields = json.loads(opened.metadata()["shape"])
        ids = opened.get_tensor(DRAFT_IDS).long()
    return HeadShape(**{**fields, "taps": tuple(fields["taps"]), "rope_factors": ()}), ids


def growth_of(shape: HeadShape, ids: torch.Tensor, launches: Launches) -> Work:
    """Stores three rows, if the kind has a memory, and grows a tree."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    number = {"dtype": torch.bfloat16, "device": device}
    embedding = torch.randn(int(ids.max()) + 1, shape.hidden, **number)
    words = Vocabulary.of(ids, 0.1 * embedding, embedding)
    start = Carried(len(shape.taps), shape.hidden, device)
    taps = torch.randn(len(shape.taps), ROWS, shape.hidden, device=device)
    start.send(taps[:, 0], 5, 700, temperature=0.7, seed=1)
    out = torch.zeros(3, GROWTH.rows, dtype=torch.int32, device=device)
    rows = TreeRows.empty(GROWTH.rows, device)
    if shape.kind == "recurrent":
        head = RecurrentHead(shape).requires_grad_(False).to(device, torch.bfloat16)
        grower = FusedGrower(head, words, GROWTH, launches=launches)
        return lambda: grower.grow(start, out, rows)
    layer = EagleHead(shape).requires_grad_(False).to(device)
    memory = EagleMemory.empty(shape, WINDOW, embedding)
    for tensor in memory.tensors():
        tensor.normal_()
    places = torch.arange(ROWS, dtype=torch.int32, device=device)
    known = torch.tensor([3, 184, 696], dtype=torch.int32, device=device)
    new = NewRows(taps, places, words.draft_ids[:ROWS].int(), known[:1], known[1:])
    eagle = FusedEagleGrower(layer, words, GROWTH, WINDOW, launches=launches)
    return lambda: eagle.grow(start, memory, new, out, rows)


def captured(work: Work) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, before: Work | None = None, times: int = 60) -> float:
    """Median over replays."""
    found: list[float] = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before is not None:
            before()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end))
    return median(found[5:])


def measure(kind: str, launches: Launches) -> Line:
    """The whole, and each kernel in its order with how often it is launched."""
    shape, ids = shipped(kind)
    modules = (fused.kernels, fused_eagle.kernels)
    noted: list[tuple[str, Work]] = []
    fused.kernels, fused_eagle.kernels = (Recorder(module, noted) for module in modules)  # type: ignore[assignment]
    try:
        work = growth_of(shape, ids, launches)
        work()
        noted.clear()
        work()
        kernels = list(noted)
        graph = captured(work)
    finally:
        fused.kernels, fused_eagle.kernels = modules
    trash = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def emptied() -> None:
        trash.zero_()

    line: Line = {
        "kind": kind,
        "launches": len(kernels),
        "warm_us": microseconds(graph),
        "cold_us": microseconds(graph, emptied),
        "kernels": [],
    }
    for name, run in kernels:

        def many(run: Work = run) -> None:
            for _ in range(TIMES):
                run()

        line["kernels"].append({"name": name, "us": microseconds(captured(many), times=20) / TIMES})
    return line


def show(line: Line) -> None:
    print(
        f"{line['kind']}: {line['launches']} launches, {line['warm_us']:.1f} us, "
        f"{line['cold_us']:.1f} us with nothing in the cache",
        flush=True,
    )
    by_name: dict[str, list[float]] = {}
    for kernel in line["kernels"]:
        by_name.setdefault(kernel["name"], []).append(kernel["us"])
    for name, times in by_name.items():
        print(f"  {name:14} {' '.join(f'{us:5.1f}' for us in times)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", nargs="+", default=["eagle", "recurrent"])
    parser.add_argument("--json", type=Path, help="where the raw results go")
    options = parser.parse_args()
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    results: Line = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "commit": head.stdout.strip(),
        "command": f"python -m benchmarks.gpu_grow {' '.join(sys.argv[1:])}",
        "growths": [],
    }
    print(f"{results['device']}, torch {torch.__version__}")
    for kind in options.kind:
        results["growths"].append(measure(kind, Launches()))
        show(results["growths"][-1])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
