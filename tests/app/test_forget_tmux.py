"""A chat of sixty turns in a context of 1,024 tokens, in a real terminal with the default model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
ROOT = Path(__file__).parents[2]
CHATKV = f"{sys.executable} -c 'from tui.cli import main; main()'"
FLAGS = "--context 1024 -o max_tokens 24 -o temperature 0"
TURNS = 60


class Pane:
    """One terminal of 100 x 40."""

    def __init__(self, folder: Path) -> None:
        self._name = f"chatkv-{os.getpid()}"
        self._env = {
            **os.environ, "CHATKV_DATA_DIR": str(folder), "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
        }  # fmt: skip

    def run(self, command: str) -> None:
        self._tmux("new-session", "-d", "-s", self._name, "-x", "100", "-y", "40", command)

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", "-t", self._name, *keys)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-t", self._name, "-l", text)
        self.keys("Enter")

    @property
    def text(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", self._name).stdout

    def until(self, *words: str, seconds: float = 200.0) -> str:
        end = time.monotonic() + seconds
        while not all(word in (shown := self.text) for word in words):
            assert time.monotonic() < end, f"{words} never came; the screen was\n{shown}"
            time.sleep(0.1)
        return shown

    def close(self) -> None:
        self._tmux("kill-session", "-t", self._name, check=False)

    def _tmux(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["tmux", "-L", self._name, "-f", "/dev/null", *args],
            env=self._env, check=check, capture_output=True, text=True,
        )  # fmt: skip


@pytest.fixture
def pane(tmp_path) -> Iterator[Pane]:
    made = Pane(tmp_path / "data")
    yield made
    made.close()


def chatkv_json(folder: Path, *args: str) -> dict:
    env = {**os.environ, "CHATKV_DATA_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from tui.cli import main; main()", *args]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


def test_sixty_turns_are_forgotten_in_the_open(pane, tmp_path):
    data = tmp_path / "data"
    pane.run(f"{CHATKV} chat {FLAGS}")
    pane.until("· ready", seconds=400)
    warned = ruled = ""
    for number in range(1, TURNS + 1):
        pane.type(f"Question {number}: say one short sentence about the number {number}.")
        shown = pane.until(f"{number} you", "· ready", seconds=400)
        warned = warned or (shown if "next turn will forget" in shown else "")
        ruled = ruled or (shown if "left the model's context" in shown else "")
    assert "/pin, /context" in warned, warned
    assert "Still in history. /context, /recall" in ruled
    last = pane.text
    assert "FORGOTTEN turns 1-" in last
    assert "the model cannot see them" in last

    found = chatkv_json(data, "context", "@last", "--json")
    gone = found["missing"]
    assert gone == list(range(1, len(gone) + 1))
    assert len(gone) > 10
    assert set(found["why"].values()) == {"turns"}
    assert found["limit"] == 1024
    assert found["used"] <= 1024

    pane.keys("Home")
    pane.until("not in context", "░ 1 you")
    pane.keys("F6")
    shown = pane.until("What the model sees", "window full", "tokens computed")
    assert "[ ]" in shown
    pane.keys("Space")  # the first that is out of sight
    pane.until("comes back")
    pane.keys("End", "Space", "Up", "Space", "Up", "Space", "Up", "Space")  # and room for it
    pane.until("goes", "The next turn: ", "tokens computed")
    pane.keys("Enter")
    pane.until("brings back 1: /context")
    pane.type("What was the first question?")
    pane.until(f"{TURNS + 1} you", "came back into the model's context", "· ready", seconds=400)
    after = chatkv_json(data, "context", "@last", "--json")
    assert 1 not in after["missing"]
    pane.keys("C-q")
    asked = chatkv_json(data, "ask", "-c", "And now?", "--json", "--max-tokens", "4")
    assert asked["context"]["missing"] == after["missing"]
    assert asked["context"]["used"] <= 1024
