"""Runs the interpreted_*.py files with Triton's interpreter on: that is set before the import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(*files: str) -> None:
    here = Path(__file__).parent
    # Without the fixtures of this folder: they import transformers, which takes seconds.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    done = subprocess.run(
        [*command, *(here / file for file in files)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_kernels_in_the_interpreter():
    run(
        "interpreted_fused.py",
        "interpreted_pick.py",
        "interpreted_walk.py",
        "interpreted_growth.py",
        "interpreted_eagle_growth.py",
    )


@pytest.mark.slow
def test_the_whole_pass_in_the_interpreter():
    run("interpreted_decoder.py", "interpreted_eagle.py", "interpreted_windows.py")
