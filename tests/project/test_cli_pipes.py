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


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [("ask", 2, b"chatkv: The prompt is empty."), ("chat --plain", 0, b"")],
)
def test_no_stdin_is_no_input(tmp_path, args, code, said):
    program = f"exec {PROGRAM[0]} -c 'from tui.cli import main; main()'"
    process = subprocess.Popen(
        ["sh", "-c", f"{program} --data-dir {tmp_path} {args} <&-"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    _, told = process.communicate(timeout=120)
    assert (process.returncode, told.partition(b"\n")[0]) == (code, said), told


@pytest.mark.parametrize("module", ["tui", "tui.cli"])
def test_python_m_is_the_program(module):
    shown = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, cwd=ROOT, timeout=30
    )
    assert (shown.returncode, shown.stdout[:7], shown.stderr) == (0, b"chatkv ", b"")
