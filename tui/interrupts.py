"""What Ctrl-C, TERM, HUP and a time limit do while a reply is made. Knows signals; no engine.

The first one stops the reply, whose partial text is saved, and names the exit status; the second
leaves at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGALRM: 124}
TIMEOUT = EXIT[signal.SIGALRM]


class Stopped(BaseException):
    """Raised in the main thread when there is no running reply that could end by itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Interrupts:
    """Handles the signals inside a `with` block of the main thread.

    Args:
        timeout_s: Seconds until the block is stopped as by a signal.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._before: dict[int, Any] = {}
        self._cancel: Callable[[], None] = _nothing
        self._replying: Callable[[], bool] = bool
        self.exit_code = 0
        """0 until a signal came, then its exit status."""

    def guard(self, cancel: Callable[[], None], replying: Callable[[], bool]) -> None:
        """From here on a signal asks a reply to stop.

        Args:
            cancel: Asks the running reply to stop; called from a thread, may block.
            replying: Whether a reply runs that will end after `cancel`. While none does (the model
                is being loaded), `Stopped` is raised instead.
        """
        self._cancel, self._replying = cancel, replying

    def remind(self) -> None:
        """Cancel once more if a signal came: the first may have been too early for the reply."""
        if self.exit_code:
            self._cancel()

    def __enter__(self) -> Interrupts:
        for number in EXIT:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` mean what they say
                self._before[number] = signal.signal(number, self._handle)
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        code = EXIT[signal.Signals(number)]
        if self.exit_code:
            if code == TIMEOUT:
                return
            os._exit(code)
        self.exit_code = code
        if not self._replying():
            raise Stopped(code)
        # Not in the handler itself: it may have interrupted the very lock that cancel takes.
        threading.Thread(target=self._cancel, name="stop", daemon=True).start()


def _nothing() -> None:
    pass
