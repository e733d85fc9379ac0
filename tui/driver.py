"""The way to a terminal that may go away while the screen is drawn. Knows Textual's driver only."""

from __future__ import annotations

import contextlib
import os
import signal
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
    """Textual's driver, but a terminal that is closed cannot stop the program from leaving, and one
    that suspends takes those along who wait for it."""

    def __init__(
        self,
        app: App,
        *,
        debug: bool = False,
        mouse: bool = True,
        size: tuple[int, int] | None = None,
    ) -> None:
        self._continued = False
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        if self._file is not None:
            self._file = cast(TextIO, Lasting(self._file))

    def _sigtstp_application(self, *_: object) -> None:
        """Stop the whole job, as the terminal does it: a `make chat` that went on waiting would
        keep the shell from seeing that anything stopped. Where no shell could continue it, the
        kernel stops nothing."""
        if self._auto_restart:
            self.suspend_application_mode()
            self._must_signal_resume = True
        self._continued = False
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)  # returns when the job is continued
        signal.signal(signal.SIGTSTP, self._sigtstp_application)
        if not self._continued:
            self._sigcont_application()

    def _sigcont_application(self, *_: object) -> None:
        self._continued = True
        super()._sigcont_application()
