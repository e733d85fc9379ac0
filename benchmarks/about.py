"""What a number was measured on: printed above every table."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import numba
import torch


def about(model: Any = None) -> None:
    """Print device, threads, versions, commit and model."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    print(
        f"{_processor()}, {numba.get_num_threads()} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numba {numba.__version__}, commit {commit or 'none'}"
    )
    if model is not None:
        print(f"{model.spec.name}, {model.backend_name}")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
