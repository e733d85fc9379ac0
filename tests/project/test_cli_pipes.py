"""Ends of pipes: a reader that leaves, a full disk, no stdout at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-c", "from tui.cli import main\nmain()"]


def start(*args: str, **where) -> subprocess.Popen:
    return subprocess.Popen([*PROGRAM, *args], stderr=subprocess.PIPE, cwd=ROOT, **where)


@pytest.mark.parametrize("args", [("--help",), ("config", "show"), ("models", "list", "--json")])
def test_a_closed_pipe_ends_quietly(args):
    read, write = os.pipe()
    os.close(read)
    try:
        process = start(*args, stdout=write)
        _, said = process.communicate(timeout=30)
    finally:
        os.close(write)
    assert (process.returncode, said) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("args", [("config", "show"), ("config", "show", "--json")])
def test_a_full_disk_behind_stdout_is_one_sentence(args):
    with open("/dev/full", "wb") as full:
        process = start(*args, stdout=full)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said == b"chatkv: The output cannot be written: No space left on device.\n"


def test_no_stdout_is_no_error():
    process = subprocess.Popen(
        ["sh", "-c", f"exec {PROGRAM[0]} -c 'from tui.cli import main; main()' config path >&-"],
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, b"")
