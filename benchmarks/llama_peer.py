"""llama.cpp as a peer: loads a GGUF and answers timed calls, one JSON line each way.

Run by `benchmarks.decode` and `benchmarks.drafting` under the Python that has llama-cpp-python;
needs nothing of chatkv.
"""

from __future__ import annotations

import json
import resource
import sys
from time import perf_counter
from typing import Any

import numpy as np

BATCH = 512
"""Tokens of a prompt that llama.cpp is given at once."""


def serve(player: Any) -> None:
    """Answer `{"call": name, "args": [...]}` lines from stdin until it closes."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        result = getattr(player, request["call"])(*request["args"])
        answers.write(json.dumps(result) + "\n")
        answers.flush()


def peak_mb() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class LlamaCpp:
    """One context of llama.cpp, driven below its sampling loop."""

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        begun = perf_counter()
        self.llama = llama_cpp.Llama(
            model_path=path,
            n_ctx=context,
            n_batch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        system = llama_cpp.llama_print_system_info().decode().strip()
        return {
            "load_s": perf_counter() - begun,
            "about": f"llama-cpp-python {llama_cpp.__version__}; {system}",
        }

    def prefill(self, ids: list[int]) -> float:
        self.length = 0
        begun = perf_counter()
        for start in range(0, len(ids), BATCH):
            self.next = int(self._run(ids[start : start + BATCH])[-1].argmax())
        return 1000 * (perf_counter() - begun)

    def decode(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begun = perf_counter()
            self.next = int(self._run([self.next])[-1].argmax())
            times.append(1000 * (perf_counter() - begun))
        return times

    def rows(self, count: int, repeats: int) -> list[float]:
        times, length = [], self.length
        for _ in range(repeats):
            begun = perf_counter()
            self._run([self.next] * count, all_logits=True)
            times.append(1000 * (perf_counter() - begun))
            self.length = length
        return times

    def peak(self) -> float:
        return peak_mb()

    def _run(self, ids: list[int], all_logits: bool = False) -> np.ndarray:
        """Logits of the last id, or of all, after forgetting what lies behind `length`."""
        llama = self.llama
        llama._ctx.kv_cache_seq_rm(-1, self.length, -1)
        llama._batch.set_batch(batch=ids, n_past=self.length, logits_all=all_logits)
        llama._ctx.decode(llama._batch)
        self.length += len(ids)
        rows = len(ids) if all_logits else 1
        return np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(rows, llama.n_vocab()))


if __name__ == "__main__":
    serve(LlamaCpp())
