"""What is imported when: first words come fast, and the front process never loads the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numba", "numpy", "llvmlite", "transformers", "tokenizers", "triton", "jinja2"}
SCREEN = {"textual", "rich", "pydantic"}
FRONT = [
    "sessions.records",
    "sessions.store",
    "sessions.exchange",
    "sessions.client",
    "sessions.port",
    "sessions.chat",
    "sessions.pages",
    "chatkv.models.catalog",
    "chatkv.kv.store",
    "tui.wiring",
    "tui.settings",
    "tui.plain",
    "tui.safe_text",
]


def loaded_by(code: str, tmp_path: Path) -> set[str]:
    """Names of the top-level modules that a fresh interpreter holds after `code`."""
    program = f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": "/usr/bin", "HOME": str(tmp_path), "CHATKV_DATA_DIR": str(tmp_path / "d")},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def running(*args: str) -> str:
    return f"from tui import cli\nassert cli.run({list(args)!r}) == 0"


@pytest.mark.parametrize("module", ["chatkv", "tui.cli", *FRONT])
def test_modules_of_the_front_load_no_engine(tmp_path, module):
    assert not loaded_by(f"import {module}", tmp_path) & HEAVY


def test_the_screen_loads_no_engine(tmp_path):
    assert not loaded_by("import tui.app", tmp_path) & HEAVY


@pytest.mark.parametrize(
    "args",
    [("--help",), ("ask", "--help"), ("list", "--json"), ("config", "show"), ("models", "list")],
    ids=" ".join,
)
def test_quick_commands_load_neither_engine_nor_screen(tmp_path, args):
    if args[0] == "list":
        loaded_by(running("list"), tmp_path)  # the first one makes the store: sqlite_utils, once
    assert not loaded_by(running(*args), tmp_path) & (HEAVY | SCREEN)


def test_help_loads_click_and_the_standard_library_only(tmp_path):
    here = loaded_by(running("--help"), tmp_path) - loaded_by("", tmp_path)
    ours = {"tui", "chatkv", "sessions", "click"}
    assert here - set(sys.stdlib_module_names) <= ours
    assert "sqlite3" not in here
