"""A model's steps and prompts on one GPU, beside libraries and transformers in the same process.

`python -m benchmarks.gpu_step random:llama3-8b --prompt 100 1000 8192 --peers --json FILE`

Milliseconds, medians: of a captured step alone (graph replays), with our products and with the
library's; of the plain step that a careful user builds from libraries; of a whole step with inputs
sent and ids back; of a token in the engine's loop; of prompts through the engine's chunks. With
`--peers` also of transformers' forward pass and of its generate (static cache, compiled).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from benchmarks.gpu_peers import make_peer, peer_generate, peer_prompts
from benchmarks.gpu_time import device_ms, show_kernels, wall_ms
from benchmarks.library_loop import ATTENTIONS, library_step
from chatkv.batch import tree_batch
from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable
from chatkv.models import catalog
from chatkv.models.catalog import DEFAULT_MODEL
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.cuda_layers import Linear
from chatkv.models.devices import expect_cuda
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.tree import DraftTree

Line = dict[str, Any]
LINEARS: tuple[Linear, ...] = ("triton", "library")


def random_tree(rows: int, vocab: int, depth: int = 15) -> DraftTree:
    """Any tree of so many rows."""
    draw = random.Random(rows)
    parents, depths = [0], [0]
    while len(parents) < rows:
        parent = draw.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return DraftTree.of(draw.sample(range(vocab), rows), parents)


def filled_table(pool: PagePool, length: int) -> PageTable:
    """A sequence whose pages hold noise, on scattered pages."""
    table = PageTable(pool)
    pages = pool.take(pool.pages_for(length))
    random.Random(0).shuffle(pages)
    table.adopt(pages, length)
    return table


def random_ids(decoder: CudaDecoder, count: int) -> list[int]:
    draw = random.Random(1)
    return [draw.randrange(decoder.spec.vocab_size) for _ in range(count)]


def measure_steps(
    decoder: CudaDecoder, pool: PagePool, context: int, *, profile: bool = False
) -> list[Line]:
    """The plain step, and steps of trees."""
    table = filled_table(pool, context)
    sampler = Sampler(SamplingParams(seed=1))
    found: list[Line] = []
    for rows in (1, 16, 63):
        tree = random_tree(rows, decoder.spec.vocab_size)
        with table.reserve(rows) as reserved:
            batch = tree_batch([table], [tree], [reserved.slots])

            def whole(batch: Any = batch) -> None:
                decoder.step(batch, pool).sample([sampler])

            for _ in range(3):
                whole()
            step = decoder.graphs.run(batch, pool)
            step_graph, pick_graph = step.step.graph, step.picking.graph
            assert step_graph is not None
            assert pick_graph is not None
            line: Line = {
                "linear": decoder.layers.linear,
                "context": context,
                "rows": rows,
                "captured_step_ms": device_ms(step_graph.replay),
                "picking_ms": device_ms(pick_graph.replay),
                "whole_step_ms": wall_ms(whole),
            }
            print(
                f"  {rows:3d} rows at {context}: captured step {line['captured_step_ms']:.3f} ms, "
                f"picking {line['picking_ms']:.3f} ms, whole step {line['whole_step_ms']:.3f} ms"
            )
            found.append(line)
            if profile:
                show_kernels(step_graph.replay)
    table.release()
    return found


def measure_library_loop(decoder: CudaDecoder, context: int) -> list[Line]:
    """The plain step from libraries, by attention."""
    found: list[Line] = []
    for attention in ATTENTIONS:
        try:
            graph = library_step(decoder.layers, context, attention)
        except RuntimeError as error:
            print(f"  library loop, {attention}: {str(error).splitlines()[0]}")
            continue
        ms = device_ms(graph.replay)
        print(f"  library loop, 1 row at {context}, {attention}: captured step {ms:.3f} ms")
        found.append({"attention": attention, "context": context, "captured_step_ms": ms})
    return found


def measure_engine(decoder: CudaDecoder, context: int) -> Line:
    """A token of a plain reply in the engine's own loop."""
    tokens = 200
    config = EngineConfig(spec="none", drafters=(), pool_tokens=context + 2 * tokens)
    engine = Engine(decoder, config, costs={1: 1.0}, guard=False)
    ids = random_ids(decoder, context)
    params = SamplingParams(seed=1, max_tokens=4 * tokens)
    seq = engine.add(ids, [False] * len(ids), params)
    seq.eos_ids = frozenset()
    for _ in engine.prefill(seq):
        pass
    times: list[float] = []
    for _ in range(tokens):
        begun = time.perf_counter()
        engine.step([seq])
        times.append(1000 * (time.perf_counter() - begun))
    engine.finish(seq)
    engine.close()
    ms = median(times[20:])
    print(f"  engine, plain, 1 sequence at {context}: {ms:.3f} ms a token")
    return {"context": context, "ms_a_token": ms}


def measure_prompt(decoder: CudaDecoder, pool: PagePool, length: int) -> Line:
    """A prompt of random ids, its last logits on the host."""
    ids = random_ids(decoder, length)

    def run() -> None:
        table = PageTable(pool)
        while (known := table.length) < length:
            first, size = decoder.chunk(known)
            stop = min(first + size, length)
            with table.reserve(stop - known) as reserved:
                decoder.prefill(
                    ids[known:stop],
                    first,
                    known,
                    reserved.slots,
                    table.entries(),
                    pool,
                    chunk_rows=size,
                    want_logits=stop == length,
                )
                reserved.keep(range(stop - known))
        table.release()

    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first_ms = 1000 * (time.perf_counter() - begun)
    ms = wall_ms(run, 9)
    print(
        f"  prompt of {length}: {ms:.2f} ms, {1000 * length / ms:.0f} tok/s "
        f"(the first time {first_ms:.0f} ms)"
    )
    return {"tokens": length, "ms": ms, "first_ms": first_ms}


def measure(name: str, options: argparse.Namespace) -> Line:
    """All numbers of one model."""
    found: Line = {"model": name, "steps": [], "library_loop": [], "prompts": []}
    for linear in LINEARS:
        begun = time.perf_counter()
        decoder = CudaDecoder.load(catalog.find(name), expect_cuda(), linear=linear)
        limit = decoder.spec.context_limit
        pool = decoder.new_pool(max(*options.prompt, *options.context, 4096) + 256)
        pool.data.normal_()
        print(f"{name}, {linear} ({time.perf_counter() - begun:.1f} s to load)")
        for context in options.context:
            found["steps"] += measure_steps(decoder, pool, context, profile=options.profile)
        if linear == "library":
            continue
        print(f"  {decoder.backend_name}")
        found["backend"] = decoder.backend_name
        for context in options.context:
            found["library_loop"] += measure_library_loop(decoder, context)
        for length in options.prompt:
            found["prompts"].append(measure_prompt(decoder, pool, min(length, limit)))
        found["engine"] = measure_engine(decoder, options.context[0])
        spec = decoder.spec
        del decoder, pool
        torch.cuda.empty_cache()
        if options.peers:
            peer = make_peer(spec)
            found["peer_prompts"] = peer_prompts(peer, min(max(options.prompt), limit))
            found["peer_generate"] = peer_generate(peer, options.context[0])
            del peer
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[DEFAULT_MODEL, "random:llama3-8b"])
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--prompt", type=int, nargs="+", default=[100, 1000, 8000])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--peers", action="store_true")
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
        "command": f"python -m benchmarks.gpu_step {' '.join(sys.argv[1:])}",
        "models": [],
    }
    print(f"{results['device']}, torch {torch.__version__}")
    for name in options.names:
        results["models"].append(measure(name, options))
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
