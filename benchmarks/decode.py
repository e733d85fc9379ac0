"""Prefill, plain decoding and steps of several rows, against llama.cpp in the same run.

    python -m benchmarks.decode --peer PYTHON [--rounds 5] [--threads N] [--json FILE]

PYTHON is an interpreter that has llama-cpp-python, built for this processor; `$LLAMA_PYTHON` names
it as well. Without one only chatkv is measured. Both load the same GGUF with the same threads, each
in a process of its own that sleeps while the other works, in ABBA order; medians, and ratios of
medians (above 1: chatkv is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

from benchmarks.llama_peer import peak_mb, serve

PROMPT, TOKENS, CONTEXT = 512, 200, 1024
TEXT = (
    "The harbour was quiet when the first boats came in, and nobody on the quay asked them where "
    "they had been. A ledger lay open on the table; its columns went back eleven years, 1987 to "
    "1998, and every page was signed twice. def total(rows): return sum(r.price for r in rows). "
)


class Chatkv:
    """Our decoder, driven as the engine drives it."""

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        begun = perf_counter()
        import torch  # noqa: F401 - timed apart from our own loading

        imported = perf_counter()
        import numpy as np

        from benchmarks.about import about
        from chatkv.models import catalog
        from chatkv.models.decoder import Decoder

        self.model = Decoder.load(catalog.find(path), threads=threads)
        loaded = perf_counter()
        self.pool = self.model.new_pool(context)
        self.pages = np.array(self.pool.take(self.pool.num_pages), np.int32)
        return {
            "load_s": loaded - imported,
            "torch_s": imported - begun,
            "about": about(self.model),
        }

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text)

    def prefill(self, ids: list[int]) -> float:
        begun, size, logits = perf_counter(), self.model.chunk_tokens, None
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            stop = start + len(part)
            logits = self.model.prefill(
                part, start, start, self._slots(start, stop), self.pages, self.pool,
                chunk_rows=size, want_logits=stop == len(ids),
            )  # fmt: skip
        assert logits is not None
        self.length, self.next = len(ids), int(logits.argmax())
        return 1000 * (perf_counter() - begun)

    def decode(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begun = perf_counter()
            self.next = int(self._step([self.next])[-1].argmax())
            self.length += 1
            times.append(1000 * (perf_counter() - begun))
        return times

    def rows(self, count: int, repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            begun = perf_counter()
            self._step([self.next] * count)
            times.append(1000 * (perf_counter() - begun))
        return times

    def peak(self) -> float:
        return peak_mb()

    def _slots(self, start: int, stop: int) -> Any:
        import numpy as np

        at = np.arange(start, stop)
        return self.pages[at // self.pool.page_size].astype(np.int64) * self.pool.page_size + (
            at % self.pool.page_size
        )

    def _step(self, ids: list[int]) -> Any:
        import numpy as np
        import torch

        from chatkv.attention.call import AttentionCall
        from chatkv.models.model import ForwardBatch

        stop = self.length + len(ids)
        table = torch.from_numpy(self.pages[None])
        batch = ForwardBatch(
            tokens=np.array(ids, np.int32),
            positions=np.arange(self.length, stop, dtype=np.int32),
            slots=self._slots(self.length, stop),
            call=AttentionCall.of(table, [len(ids)], [stop]),
        )
        return self.model.step(batch, self.pool).logits


class Player:
    """One of the two, in its own process."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )

    def call(self, name: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended; its message is above.")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def play(player: Player, ids: list[int], into: dict[str, list[float]]) -> None:
    """One round: prefill, decode, steps of one to eight rows at the prompt's end."""
    sleep(0.3)  # threads of the other process may still spin
    into.setdefault("prefill", []).append(player.call("prefill", ids))
    for rows in (1, 2, 4, 8):
        into.setdefault(f"{rows} rows", []).append(median(player.call("rows", rows, 20)))
    into.setdefault("decode", []).append(median(player.call("decode", TOKENS)))


def table(results: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A line for each measurement: medians in ms, and the peer's divided by ours."""
    lines = []
    ours = results["chatkv"]
    names = {
        "prefill": f"prefill of {PROMPT} tokens",
        "decode": f"a token, plain, {TOKENS} after the prompt",
        **{f"{n} rows": f"a step of {n} at {PROMPT}" for n in (1, 2, 4, 8)},
    }
    for key, name in names.items():
        line = {"key": key, "what": name, "chatkv_ms": median(ours[key])}
        if "llama.cpp" in results:
            line["llama_ms"] = median(results["llama.cpp"][key])
            line["ratio"] = line["llama_ms"] / line["chatkv_ms"]
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.decode")
    parser.add_argument("--peer", default=os.environ.get("LLAMA_PYTHON"))
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Chatkv())
        return
    from benchmarks.about import write
    from chatkv.models import catalog
    from sessions.bench.about import command

    load_average = os.getloadavg()[0]
    file = catalog.find(options.model or catalog.DEFAULT_MODEL)
    players = [Player("chatkv", [sys.executable, "-m", "benchmarks.decode", "--serve"])]
    if options.peer:
        script = Path(__file__).with_name("llama_peer.py")
        players.append(Player("llama.cpp", [options.peer, str(script)]))
    loads = {p.name: p.call("load", str(file.path), options.threads, CONTEXT) for p in players}
    ids = players[0].call("encode", TEXT * 12)[:PROMPT]
    assert len(ids) == PROMPT, f"the text gives {len(ids)} tokens"
    for player in players:  # once unseen: compiles, first touches, page faults
        play(player, ids, {})
    results: dict[str, dict[str, list[float]]] = {p.name: {} for p in players}
    for turn in range(options.rounds):
        for player in players if turn % 2 == 0 else players[::-1]:
            play(player, ids, results[player.name])
    lines, peaks = table(results), {p.name: p.call("peak") for p in players}
    for player in players:
        player.close()
    ours = results["chatkv"]
    four = median(ours["4 rows"]) / median(ours["1 rows"])
    write(
        options.json,
        "decode",
        {**loads["chatkv"]["about"], "command": command()},
        peer=loads["llama.cpp"]["about"] if "llama.cpp" in loads else None,
        rounds=options.rounds,
        load_average=load_average,
        rows=lines,
        samples_ms=results,
        load_s=loads["chatkv"]["load_s"],
        torch_s=loads["chatkv"]["torch_s"],
        peak_mb=peaks,
    )
    if "llama.cpp" in loads:
        print(loads["llama.cpp"]["about"])
    print(f"{file.path.name}, {options.threads} threads, {options.rounds} rounds, load average "
          f"{load_average:.1f} at the start")  # fmt: skip
    for line in lines:
        peer = f"{line['llama_ms']:10.2f} {line['ratio']:7.2f}" if "ratio" in line else ""
        print(f"{line['what']:42s} {line['chatkv_ms']:9.2f} {peer}")
    print(f"a step of 4 costs {four:.2f} times a step of 1")
    print(f"prefill {1000 * PROMPT / median(ours['prefill']):.0f} tokens/s")
    load = loads["chatkv"]
    print(f"load {load['load_s']:.2f} s and the import of torch {load['torch_s']:.2f} s")
    print("peak memory " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in peaks.items()))


if __name__ == "__main__":
    main()
