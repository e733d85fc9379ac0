"""Random calls of a shape, and microseconds of one. Knows no peer."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.attention_peers import Data
from benchmarks.attention_shapes import HEADS, Shape
from chatkv.attention.call import AttentionCall
from chatkv.attention.reference import ancestor_words
from chatkv.attention.triton_check import Case, random_tree
from chatkv.attention.triton_check import Shape as LayerShape
from chatkv.attention.triton_tree import TritonBackend

PAGE = 64
L2_BYTES = 200_000_000
"""All copies of the data together are more, so that none is read from the cache."""


def tree_of(shape: Shape) -> tuple[int, ...]:
    """The tree of each of its sequences."""
    return random_tree(shape.rows, 8 if shape.rows > 1 else 1, random.Random(shape.rows))


def make_copies(shape: Shape) -> tuple[list[Case], list[Data]]:
    """So many copies that they exceed the cache, as calls of ours and for the peers."""
    count = max(2, min(40, -(-L2_BYTES // shape.num_bytes)))
    made = [make_copy(shape) for _ in range(count)]
    return [case for case, _ in made], [data for _, data in made]


def make_copy(shape: Shape) -> tuple[Case, Data]:
    """Random tensors on scattered pages."""
    heads, kv_heads, dim = HEADS[shape.model]
    parents = tree_of(shape)
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
    data = Data(q, pages, table, call.kv_len, shape.lengths, shape.rows, seen.cuda())
    return case, data


def quantised(case: Case, dtype: torch.dtype) -> Case:
    """The same call on random codes: one scale a slot, for int4 one for 32 channels."""
    sizes = case.pages.shape
    if dtype == torch.uint8:
        codes = torch.randint(0, 256, (*sizes[:-1], sizes[-1] // 2), device="cuda").to(dtype)
        per_slot = sizes[-1] // 32
    else:
        codes = (case.pages.clamp(-3, 3) * 40).to(dtype)
        per_slot = 1
    scales = (torch.rand(*sizes[:-1], per_slot, device="cuda") / 40).half()
    layer = replace(case.shape, page_dtype=dtype)
    return replace(case, shape=layer, pages=codes, scales=scales)


def graph_time(runs: Sequence[Callable[[], object]], budget: float = 0.02) -> float:
    """Microseconds of one run: median over replays of a graph that holds them all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # what is timed may still be in the making
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


def our_time(backend: TritonBackend, cases: Sequence[Case]) -> float:
    """Microseconds of a call, with the plan of the step made beforehand."""
    runs = []
    for case in cases:
        layer = case.shape
        plan = backend.plan(case.call, layer.num_heads, layer.num_kv_heads, layer.head_dim, PAGE)
        runs.append(lambda case=case, plan=plan: serve(backend, case, plan))
    return graph_time(runs)


def serve(backend: TritonBackend, case: Case, plan: Any) -> object:
    """One call."""
    return backend.attend(case.call, case.q, case.pages, scales=case.scales, plan=plan)
