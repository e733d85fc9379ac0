"""What loading a model says on stderr, for commands without a screen. Knows engine states only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from sessions.port import EnginePort, EngineState
from tui import output
from tui.command import Globals

PATIENCE_S = 1.0
"""A model that is ready sooner is not worth a line."""


def show_loading(engine: EnginePort, found: Globals, *, always: bool = False) -> None:
    """Say each stage of the loading that takes longer than a second, on a terminal."""
    if not found.quiet and (always or output.is_terminal(sys.stderr)):
        engine.watch(Loading(output.note, patience_s=0.0 if always else PATIENCE_S))


class Loading:
    """Called with each state; says a stage once."""

    def __init__(self, say: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> None:
        self._say, self._patience_s = say, patience_s
        self._said: set[str] = set()
        self._timer: threading.Timer | None = None

    def __call__(self, state: EngineState) -> None:
        text = f"loading: {state.detail}" if state.phase == "loading" else ""
        if text and text in self._said:
            return
        if self._timer is not None:
            self._timer.cancel()
        if text:
            self._said.add(text)
            self._timer = threading.Timer(self._patience_s, self._say, (text,))
            self._timer.daemon = True
            self._timer.start()
