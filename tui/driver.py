"""The way to a terminal that may go away while the screen is drawn. Knows Textual's driver only."""

from __future__ import annotations

import contextlib
from typing import TextIO, cast

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver


class Lasting:
    """A file whose writes go nowhere once its other end is gone.

    Textual draws through a queue of 30 writes that a thread empties. A write that raises ends the
    thread; the next 30 then fill the queue, and the program would wait for room for ever, deaf to
    the HUP it was sent.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


class TerminalDriver(LinuxDriver):
    """Textual's driver, but a terminal that is closed cannot stop the program from leaving."""

    def __init__(
        self,
        app: App,
        *,
        debug: bool = False,
        mouse: bool = True,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        if self._file is not None:
            self._file = cast(TextIO, Lasting(self._file))
