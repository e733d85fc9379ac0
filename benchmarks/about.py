"""What a number was measured on, above every table and in every raw result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sessions.bench import about as facts

RESULTS = Path(__file__).with_name("results")


def about(model: Any = None, device: str = "cpu") -> dict[str, Any]:
    """Device, threads, versions, commit, command and, of a CPU model, what it is; printed too."""
    found = facts.about(device)
    if model is not None:
        found |= {
            "threads": model.threads,
            "model": model.spec.name,
            "dtype": "bf16",
            "backend": model.backend_name,
        }
    print(facts.summary(found), flush=True)
    return found


def write(path: str | None, bench: str, about: dict[str, Any], **data: Any) -> None:
    """Write a raw result as `benchmarks.report` reads it; without a path nothing."""
    if path is not None:
        text = json.dumps({"v": 1, "bench": bench, "about": about, **data}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")
