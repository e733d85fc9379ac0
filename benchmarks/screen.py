"""What the screen costs: the same reply through `chatkv ask` and through the running screen.

    python -m benchmarks.screen [--tokens 300] [--rounds 2] [--json FILE]

Needs tmux. Both use the same prompt, seed and settings and so give the same tokens; the rate is the
engine's own, as stored with the turn. ABBA order, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.about import about, write

PROMPT = "Tell me a long story about a lighthouse."


def main() -> None:
    """Run both ways and print rates and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    args = parser.parse_args()
    facts = about()
    rates: dict[str, list[float]] = {"ask": [], "screen": []}
    for _ in range(args.rounds):
        for way in ("ask", "screen", "screen", "ask"):
            folder = Path(tempfile.mkdtemp(prefix="chatkv-bench-"))
            folder.chmod(0o700)
            try:
                rates[way].append(RUN[way](folder, args.tokens))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    ask, screen = median(rates["ask"]), median(rates["screen"])
    write(
        args.json,
        "screen",
        facts,
        tokens=args.tokens,
        ask_tok_s=ask,
        screen_tok_s=screen,
        cost=1 - screen / ask,
        samples_tok_s=rates,
    )
    print(f"ask    {ask:7.1f} tok/s   {[round(rate) for rate in rates['ask']]}")
    print(f"screen {screen:7.1f} tok/s   {[round(rate) for rate in rates['screen']]}")
    print(f"the screen costs {100 * (1 - screen / ask):.1f} %")


def _command(*words: str, tokens: int) -> list[str]:
    options = ["-o", "seed", "7", "-o", "max_tokens", str(tokens)]
    return [str(Path(sys.executable).with_name("chatkv")), *words, *options, "--spec", "none"]


def _ask(folder: Path, tokens: int) -> float:
    env = {**os.environ, "CHATKV_DATA_DIR": str(folder)}
    command = _command("ask", PROMPT, "--json", tokens=tokens)
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    return float(json.loads(out)["timings"]["predicted_per_second"])


def _screen(folder: Path, tokens: int) -> float:
    session = f"chatkv-{os.getpid()}"
    shell = " ".join(
        ["env", f"CHATKV_DATA_DIR={folder}", *_command("chat", f"'{PROMPT}'", tokens=tokens)]
    )
    subprocess.run(
        ["tmux", "new-session", "-d", "-s", session, "-x", "100", "-y", "40", shell], check=True
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            time.sleep(1)
            if usage := _finished(folder / "chat.db"):
                return 1000 * usage["predicted_n"] / usage["predicted_ms"]
        raise RuntimeError("the screen did not finish the reply")
    finally:
        subprocess.run(["tmux", "kill-session", "-t", session], check=False)


def _finished(path: Path) -> dict[str, float] | None:
    if not path.exists():
        return None
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        row = db.execute("SELECT usage FROM turns WHERE depth = 1 AND state = 'done'").fetchone()
    db.close()
    return None if row is None else json.loads(row[0])


RUN = {"ask": _ask, "screen": _screen}

if __name__ == "__main__":
    main()
