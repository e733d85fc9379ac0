"""What loading a model, and reading a long prompt, says: the words, and on stderr for commands
without a screen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from chatkv.errors import plural
from sessions.port import EnginePort, EngineState
from tui import output
from tui.command import Globals

LOADING = ("absent", "starting", "loading")
"""The phases of an engine that takes no request yet."""
PATIENCE_S = 1.0
"""A stage that is over sooner is not worth a line."""
SLOW_S = 10.0
"""A model that loads for longer has kernels to compile, as a rule."""
SLOW = "The first start on a machine compiles: a minute or two."


def stage_words(state: EngineState) -> str:
    """What an engine in one of the phases `LOADING` does."""
    if state.phase != "loading":
        return "starting the engine"
    return f"{state.detail or 'loading'} the model"


def progress_words(state: EngineState) -> str:
    """How far a stage is: `54/87 MB` of a file, `12/31` of the layers."""
    if state.total < 1_000_000:
        return f"{state.done}/{state.total}"
    return f"{state.done // 1_000_000}/{state.total // 1_000_000} MB"


def show_loading(engine: EnginePort, found: Globals, *, always: bool = False) -> None:
    """Say each stage of the loading that takes longer than a second, and that a prompt takes it, on
    a terminal."""
    if not found.quiet and (always or output.is_terminal(sys.stderr)):
        engine.watch(Loading(output.note, patience_s=0.0 if always else PATIENCE_S))


class Loading:
    """Called with each state; says a stage once, and once that all of it takes long."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
        slow_s: float = SLOW_S,
    ) -> None:
        self._say, self._patience_s, self._slow_s = say, patience_s, slow_s
        self._said: set[str] = set()
        self._stage = self._slow = _later(0.0, str, "")

    def __call__(self, state: EngineState) -> None:
        loads = state.phase in LOADING
        if not loads:
            self._slow.cancel()
        if not (loads or (state.phase == "prefill" and state.total)):
            self._stage.cancel()
            self._said.clear()
            return
        words = stage_words(state) if loads else f"reading {plural(state.total, 'token')}"
        text = f"{words} ..."
        if text in self._said:
            return
        if loads and not self._said:
            self._slow = _later(self._slow_s, self._say, SLOW)
            self._slow.start()
        self._said.add(text)
        self._stage.cancel()
        self._stage = _later(self._patience_s, self._say, text)
        self._stage.start()


def _later(delay_s: float, say: Callable[[str], object], text: str) -> threading.Timer:
    timer = threading.Timer(delay_s, say, (text,))
    timer.daemon = True
    return timer
