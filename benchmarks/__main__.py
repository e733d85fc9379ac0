"""All CPU benchmarks, one after the other; `$LLAMA_PYTHON` names the peer's interpreter."""

from __future__ import annotations

import subprocess
import sys

for name in ("decode", "reopen", "screen"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False)
