"""Processes forked off one that has imported everything already: importing torch takes longer than
most of them live."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["warm", "program", "scripted", "sessions.exchange_import"])
CHILDREN: list[Child] = []
"""Those that a test may have left running."""
NOBODY = 65534


class Child:
    """A process that runs `work(*args)`; what it writes to stdout arrives in `lines`.

    Args:
        work: A function of a module that can be imported; an exception ends it with status 1.
        args: For `work`; they travel pickled.
        user: Run as that user, if this is root.
    """

    def __init__(self, work: Callable[..., None], *args: Any, user: int | None = None) -> None:
        with importable():
            read, write = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_run, args=(work, args, write, user))
            process.start()
        write.close()
        fd = os.dup(read.fileno())
        read.close()

        def reap(timeout_s: float) -> int | None:
            process.join(timeout_s)
            return process.exitcode

        self._follow(process.pid or 0, fd, reap)

    def _follow(self, pid: int, fd: int, reap: Callable[[float], int | None]) -> None:
        self.pid, self._reap = pid, reap
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(fd,), daemon=True)
        self._reader.start()
        CHILDREN.append(self)

    @property
    def running(self) -> bool:
        return self._reader.is_alive()

    def wait(self, timeout_s: float = 600.0) -> int:
        """Its exit status, once it ended."""
        self._reader.join(timeout_s)
        status = self._reap(timeout_s)
        assert status is not None, f"process {self.pid} runs on"
        return status

    def run(self) -> list[str]:
        """Wait until it ended well; what it wrote."""
        status = self.wait()
        assert status == 0, f"status {status}; it wrote {self.lines}"
        return self.lines

    def sleep(self, seconds: float) -> None:
        """Let it run for so long, or until it ends."""
        self._reader.join(seconds)

    def wait_for(self, line: str) -> None:
        """Wait until it wrote that line, or ended."""
        while line not in self.lines and self.running:
            self._reader.join(0.01)

    def kill(self) -> None:
        """As with kill -9."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reader.join(10)
        self._reap(10.0)

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, errors="replace") as stream:
            for line in iter(stream.readline, ""):
                if line.endswith("\n"):  # half a line was never said
                    self.lines.append(line.strip())


def _run(work: Callable[..., None], args: tuple[Any, ...], write: Any, user: int | None) -> None:
    os.dup2(write.fileno(), 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    if user is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    work(*args)
    sys.stdout.flush()


@contextlib.contextmanager
def importable() -> Any:
    """The fork server takes over no path of ours but this one."""
    before = os.environ.get("PYTHONPATH", "")
    ours = [path for path in sys.path if path.startswith(str(Path(__file__).parent))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [before])])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before
