"""How far a long command is: every line for a person who waits, one in a while for a log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic

from tui import output

EVERY_S = 30.0
"""Time between two lines where nobody watches: a run that is cut off tells how far it came."""


class Progress:
    """Called with lines; passes on all of them on a terminal, else one every `EVERY_S`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at = monotonic()

    def __call__(self, text: str) -> None:
        if output.is_terminal(sys.stderr) or monotonic() - self._said_at >= EVERY_S:
            self._said_at = monotonic()
            self._say(text)
