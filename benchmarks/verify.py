"""`chatkv verify` on a file of prompts, kept with what it ran on.

    python -m benchmarks.verify [--prompts FILE] [--json FILE] [-- more options of verify]

Without prompts the few that are built in are played.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.about import about, write


def main() -> None:
    """Run the command, print what it says, keep it."""
    parser = argparse.ArgumentParser(prog="benchmarks.verify")
    parser.add_argument("--prompts", metavar="FILE")
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    parser.add_argument("more", nargs="*", help="options of `chatkv verify`, behind --")
    args = parser.parse_args()
    chatkv = "import sys; from tui.cli import main; main()"
    words = ["verify", "--json", *args.more]
    words += [] if args.prompts is None else ["--prompts", args.prompts]
    done = subprocess.run(
        [sys.executable, "-c", chatkv, *words], stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, end="")
    found = json.loads(done.stdout)
    if "error" not in found:
        report = {key: value for key, value in found.items() if key != "v"}
        write(args.json, "verify", about(device=report["device"]), report=report)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
