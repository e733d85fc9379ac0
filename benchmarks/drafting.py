"""Replies drafted by chatkv's engine against plain decoding in llama.cpp, end to end, in one run.

    python -m benchmarks.drafting --peer PYTHON --prompts FILE [--temperature 0,0.7,1] [--json FILE]

PYTHON is as for `benchmarks.decode`. Both load the same GGUF with the same threads, each in a
process of its own that sleeps while the other works. Each prompt is played plain and drafted by the
engine, decoded by llama.cpp from the same ids for as many tokens, twice, and then drafted and plain
again. What counts is the time from the first token of each reply to its last. llama.cpp takes the
likeliest token: it is not charged for a sampler, and the engine is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path
from time import sleep
from typing import Any

from benchmarks.decode import Player

CONTEXT = 4096
SPINNING = 0.3
"""Seconds after which threads of the process that worked sleep."""


class Chatkv:
    """The engine without drafters and with those of `auto`, of one model."""

    def __init__(self, threads: int) -> None:
        from chatkv.config import EngineConfig
        from chatkv.engine import Engine
        from chatkv.models import catalog
        from chatkv.models.devices import load_model
        from chatkv.spec.drafters import AUTO

        self.file = catalog.find()
        self.model, _ = load_model(self.file, "cpu", threads=threads)
        plain = EngineConfig(spec="none", drafters=(), context_limit=CONTEXT)
        drafted = EngineConfig(spec="auto", drafters=(AUTO,), context_limit=CONTEXT)
        self.engines = {
            "plain": Engine(self.model, plain, costs={1: 1.0}),
            "drafted": Engine(self.model, drafted),
        }

    def play(self, name: str, prompt: Any, params: Any) -> tuple[float, list[tuple[int, ...]]]:
        """Milliseconds of all steps of a conversation, and the replies."""
        from sessions.bench.spec_play import play

        replies = play(self.engines[name], prompt, params)
        return sum(reply.decode_ms for reply in replies), [reply.ids for reply in replies]

    def contexts(self, prompt: Any, replies: list[tuple[int, ...]]) -> list[list[int]]:
        """The ids in front of each reply."""
        tokenizer = self.model.tokenizer
        ids, found = list(tokenizer.head_ids()), []
        for number, (turn, reply) in enumerate(zip(prompt.turns, replies, strict=False)):
            ids += tokenizer.user_ids(turn, number == 0)
            found.append(list(ids))
            ids += [*reply, *tokenizer.closing_ids(reply[-1] in tokenizer.eos_ids)]
        return found


def peer_ms(player: Player, contexts: list[list[int]], replies: list[tuple[int, ...]]) -> float:
    """Milliseconds llama.cpp takes for as many tokens behind the same ids."""
    ms = 0.0
    for ids, reply in zip(contexts, replies, strict=True):
        player.call("prefill", ids)
        ms += sum(player.call("decode", len(reply) - 1))
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.drafting")
    parser.add_argument("--peer", default=os.environ.get("LLAMA_PYTHON"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", default="0,0.7,1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    options = parser.parse_args()
    if not options.peer:
        sys.exit("Name a Python that has llama-cpp-python: --peer PYTHON.")
    from benchmarks.about import about, write
    from chatkv.sampling import SamplingParams
    from sessions.bench.about import command
    from sessions.verify import read_prompts

    load_average = os.getloadavg()[0]
    prompts = list(read_prompts((options.prompts,)))
    ours = Chatkv(options.threads)
    origin = {**about(ours.model), "command": command()}
    script = Path(__file__).with_name("llama_peer.py")
    player = Player("llama.cpp", [options.peer, str(script)])
    peer = player.call("load", str(ours.file.path), options.threads, CONTEXT)["about"]
    rows: list[dict[str, Any]] = []
    for temperature in map(float, options.temperature.split(",")):
        ms: dict[str, float] = defaultdict(float)
        tokens = 0
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=temperature, seed=number, max_tokens=options.max_tokens
            )
            if not rows and not number:  # once unseen: compiles, first touches
                for name in ours.engines:
                    ours.play(name, prompt, params)
            expected: list[tuple[int, ...]] = []
            for name in ("plain", "drafted", "llama.cpp", "llama.cpp", "drafted", "plain"):
                sleep(SPINNING)
                if name == "llama.cpp":
                    ms[name] += peer_ms(player, ours.contexts(prompt, expected), expected)
                    continue
                took, replies = ours.play(name, prompt, params)
                if expected and replies != expected:
                    sys.exit(f"{prompt.id} has another text {name}: no speed to speak of.")
                expected = replies
                ms[name] += took
            tokens += sum(len(reply) - 1 for reply in expected)
        row = {"temperature": temperature, "tokens": tokens, **{k: v / 2 for k, v in ms.items()}}
        rows.append(row)
        print(
            f"T={temperature:g}: {tokens} tokens, ms a token: "
            + ", ".join(f"{name} {value / 2 / tokens:.2f}" for name, value in ms.items())
            + f"; drafted {ms['llama.cpp'] / ms['drafted']:.2f} times llama.cpp, plain "
            f"{ms['llama.cpp'] / ms['plain']:.2f}",
            flush=True,
        )
    player.close()
    write(
        options.json, "drafting", origin, peer=peer, prompts=len(prompts), rows=rows,
        load_average=load_average,
    )  # fmt: skip


if __name__ == "__main__":
    main()
