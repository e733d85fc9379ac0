"""All CPU benchmarks, one after the other; `$LLAMA_PYTHON` names the peer's interpreter.

    python -m benchmarks [--save]

With `--save` the raw results go to benchmarks/results, and docs/performance.md is written again.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.about import RESULTS

MODULES = ("decode", "reopen", "screen")
ATTENTION = {
    "decode": ("--kv-len", "512,2048,8192"),
    "tree": ("--kv-len", "512,2048,8192"),
    "prefill": ("--kv-len", "512,2048,4096", "--runs", "5"),
}


def main() -> None:
    """Run them in processes of their own."""
    save = "--save" in sys.argv[1:]
    commands = {name: ["-m", f"benchmarks.{name}"] for name in MODULES}
    chatkv = "import sys; from tui.cli import main; main()"
    for kind, more in ATTENTION.items():
        words = ["bench", "attention", "--device", "cpu", "--shape", kind, *more]
        commands[f"bench_{kind}"] = ["-c", chatkv, *words]
    for name, words in commands.items():
        print(f"== {name}", flush=True)
        target = ["--json", str(RESULTS / f"{name}_cpu.json")] if save else []
        subprocess.run([sys.executable, *words, *target], check=False)
    if save:
        subprocess.run([sys.executable, "-m", "benchmarks.report"], check=True)


if __name__ == "__main__":
    main()
