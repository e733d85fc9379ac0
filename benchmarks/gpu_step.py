"""A model's steps and prompts on one GPU, beside transformers in the same process.

`python -m benchmarks.gpu_step random:llama3-8b --context 4096 --prompt 8192 --peers`

Prints milliseconds: of a captured step alone (graph replays, medians), of a whole step with inputs
sent and ids back, of a prompt through the engine's chunks; and with `--peers` of transformers'
generate (static cache, compiled) and of its forward pass with SDPA.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from chatkv.batch import tree_batch
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable
from chatkv.models import catalog
from chatkv.models.catalog import DEFAULT_MODEL
from chatkv.models.cuda_decoder import CudaDecoder
from chatkv.models.cuda_layers import Linear
from chatkv.models.devices import expect_cuda
from chatkv.models.spec import ModelSpec
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.tree import DraftTree


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


def device_ms(work: Callable[[], None], repeats: int = 30) -> float:
    """Median milliseconds on the device."""
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[3:])


def wall_ms(work: Callable[[], None], repeats: int = 30) -> float:
    """Median milliseconds until the device is done."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    return median(times[min(3, repeats - 1) :])


def measure_steps(decoder: CudaDecoder, pool: PagePool, context: int, profile: bool) -> None:
    table = filled_table(pool, context)
    sampler = Sampler(SamplingParams(seed=1))
    for rows in (1, 16, 63):
        tree = random_tree(rows, decoder.spec.vocab_size)
        with table.reserve(rows) as reserved:
            batch = tree_batch([table], [tree], [reserved.slots])
            for _ in range(3):
                result = decoder.step(batch, pool)
                result.sample([sampler])
            step = decoder.graphs.run(batch, pool)
            assert step._step_graph is not None
            assert step._pick_graph is not None
            replay = device_ms(step._step_graph.replay)
            pick = device_ms(step._pick_graph.replay)

            def whole(batch: Any = batch) -> None:
                decoder.step(batch, pool).sample([sampler])

            print(
                f"  {rows:3d} rows at {context}: captured step {replay:.3f} ms, "
                f"picking {pick:.3f} ms, whole step {wall_ms(whole):.3f} ms"
            )
            if profile:
                show_kernels(step._step_graph.replay)
    table.release()


def show_kernels(work: Callable[[], None]) -> None:
    """Kernels of one run by time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        work()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in found.events() or ():
        times[event.name[:60]] += int(event.time_range.elapsed_us())
        counts[event.name[:60]] += 1
    for name, us in times.most_common(9):
        print(f"      {us:6d} us {counts[name]:4d} x {us / counts[name]:7.2f}  {name}")


def measure_prompt(decoder: CudaDecoder, pool: PagePool, length: int) -> float:
    """Milliseconds of a prompt of random ids, its last logits on the host."""
    ids = [random.Random(1).randrange(decoder.spec.vocab_size) for _ in range(length)]

    def run() -> None:
        table = PageTable(pool)
        while table.length < length:
            known = table.length
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
    ms = wall_ms(run, 5)
    print(
        f"  prompt of {length}: {ms:.1f} ms, {1000 * length / ms:.0f} tok/s "
        f"(the first time {first_ms:.0f} ms)"
    )
    return ms


def make_peer(spec: ModelSpec) -> Any:
    """transformers' model of the same shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=2 * spec.context_limit,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def measure_peer_prompt(peer: Any, length: int, ours: float) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ids = torch.randint(0, peer.config.vocab_size, (1, length), device="cuda")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def run(backend: Any = backend) -> None:
            with torch.inference_mode(), sdpa_kernel(backend):
                peer(ids, use_cache=True, logits_to_keep=1)

        try:
            ms = wall_ms(run, 5)
        except RuntimeError as error:
            print(f"  transformers, {backend.name}: {str(error).splitlines()[0]}")
            continue
        print(
            f"  transformers, {backend.name}: {ms:.1f} ms, {1000 * length / ms:.0f} tok/s; "
            f"ours is {ms / ours:.2f} of its rate"
        )


def measure_peer_steps(peer: Any, context: int) -> None:
    ids = torch.randint(0, peer.config.vocab_size, (1, context), device="cuda")

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begun)

    begun = time.perf_counter()
    for _ in range(2):
        run(72)
        run(8)
    warm = time.perf_counter() - begun
    ms = (min(run(72) for _ in range(2)) - min(run(8) for _ in range(2))) / 64
    print(
        f"  transformers generate, static cache, compiled: {ms:.3f} ms a token "
        f"(warm-up {warm:.0f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[DEFAULT_MODEL, "random:llama3-8b"])
    parser.add_argument("--context", type=int, nargs="*", default=[4096])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--linear", choices=("triton", "library"), nargs="*", default=["triton"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in options.names:
        spec, ours = None, 0.0
        for linear in options.linear:
            spec, ours = measure(name, linear, options)
            torch.cuda.empty_cache()
        if options.peers and spec is not None:
            peer = make_peer(spec)
            if options.prompt:
                measure_peer_prompt(peer, options.prompt, ours)
            measure_peer_steps(peer, options.context[0])
            del peer
            torch.cuda.empty_cache()


def measure(name: str, linear: Linear, options: argparse.Namespace) -> tuple[ModelSpec, float]:
    """Our own numbers of one model; its spec, and milliseconds of the prompt."""
    begun = time.perf_counter()
    decoder = CudaDecoder.load(catalog.find(name), expect_cuda(), linear=linear)
    pool = decoder.new_pool(2 * max(options.prompt, *options.context) + 256)
    pool.data.normal_()
    print(f"{name}, {linear} ({time.perf_counter() - begun:.1f} s to load)")
    print(f"  {decoder.backend_name}")
    for context in options.context:
        measure_steps(decoder, pool, context, options.profile)
    length = min(options.prompt, decoder.spec.context_limit)
    return decoder.spec, measure_prompt(decoder, pool, length) if length else 0.0


if __name__ == "__main__":
    main()
