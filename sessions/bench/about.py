"""What a number was measured on. Knows devices, versions and the checkout; times nothing."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import chatkv

PACKAGES = ("torch", "triton", "numba", "transformers")


def about(
    device: str = "cpu",
    *,
    threads: int | None = None,
    model: str | None = None,
    dtype: str | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """Device, versions, commit and command line, for the `about` of a result.

    Args:
        device: As torch spells it.
        threads: Of the CPU; None is as many as torch uses.
        model, dtype, backend: None where there is none, or more than one.
    """
    return {
        **device_facts(device, threads),
        "model": model,
        "dtype": dtype,
        "backend": backend,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit(),
        "command": command(),
    }


def device_facts(device: str, threads: int | None = None) -> dict[str, Any]:
    """The device's name, and how many threads where it is a CPU. Arguments as of `about`."""
    import torch

    is_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else processor(),
        "threads": None if is_cuda else threads or torch.get_num_threads(),
    }


def summary(facts: dict[str, Any]) -> str:
    """An `about` on one line."""
    parts = [str(facts["device"])]
    if facts.get("threads"):
        parts.append(f"{facts['threads']} threads")
    parts += [str(facts[name]) for name in ("model", "backend") if facts.get(name)]
    parts += [f"{name} {number}" for name, number in facts.get("versions", {}).items()]
    parts.append(f"commit {facts.get('commit') or 'not recorded'}")
    return ", ".join(parts)


def processor() -> str:
    """The processor's name, and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{cores()} cores of {name}"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """Short id of the checkout this code is in, with `-dirty` if a file differs; else None."""
    here = Path(chatkv.__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty", "--exclude", "*")


def command() -> str:
    """The command line as one would type it; of absolute paths the last part alone."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "tui.cli":
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        name = Path(sys.argv[0]).name
        words = ["chatkv" if name in ("-c", "cli.py") else name]
    for word in sys.argv[1:]:
        option, equals, value = word.rpartition("=")
        words.append(option + equals + (Path(value).name if value.startswith("/") else value))
    return shlex.join(words)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False, cwd=folder
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
