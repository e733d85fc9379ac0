"""A terminal that is closed while the screen is drawn."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any, cast

import pytest
from app.fake_engine import FakeEngine
from app.fakes import FakeChats
from textual.drivers._writer_thread import WriterThread

from tui import wiring
from tui.app import ChatApp
from tui.driver import Lasting, TerminalDriver
from tui.settings import load


def test_drawing_on_a_terminal_that_is_gone_never_blocks() -> None:
    terminal, end = os.openpty()
    with contextlib.suppress(OSError), os.fdopen(end, "w") as file:
        os.close(terminal)
        writer = WriterThread(cast(Any, Lasting(file)))
        writer.start()
        drawing = threading.Thread(
            target=lambda: [writer.write("drawn") for _ in range(200)], daemon=True
        )
        drawing.start()
        drawing.join(20.0)
        assert not drawing.is_alive()
        writer.stop()


CHILD = """
import asyncio, os, signal, sys
from types import SimpleNamespace
from tui.driver import TerminalDriver
class Driver(TerminalDriver):
    def suspend_application_mode(self):
        print("left", flush=True)
    def resume_application_mode(self):
        print("back", flush=True)
async def main():
    driver = Driver(SimpleNamespace())
    for word in sys.stdin:
        os.kill(os.getpid(), signal.SIGTSTP)
        print("goes on", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("orphaned", [False, True], ids=["under a shell", "without one"])
def test_suspending_stops_the_whole_job_and_nothing_where_nobody_could_continue_it(
    orphaned,
) -> None:
    # A parent in the same group waits for the program, as `make` does.
    wrapper = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    job = subprocess.Popen(
        [sys.executable, "-c", wrapper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        **({"start_new_session": True} if orphaned else {"process_group": 0}),
    )  # fmt: skip
    assert job.stdin is not None
    assert job.stdout is not None
    with job:
        for _ in range(2):
            job.stdin.write("stop\n")
            job.stdin.flush()
            assert job.stdout.readline() == "left\n"
            if not orphaned:
                _, status = os.waitpid(job.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)
                os.killpg(job.pid, signal.SIGCONT)
            assert job.stdout.readline() == "back\n"
            assert job.stdout.readline() == "goes on\n"


def test_the_screen_draws_through_it(monkeypatch) -> None:
    drivers = []
    monkeypatch.setattr(ChatApp, "run", lambda app: drivers.append(app.driver_class))
    work = wiring.Workspace(load(env={}), cast(Any, None), FakeEngine(), FakeChats(), "")
    wiring.run_screen(work, cast(Any, None), prompt=None, pick=False)
    assert drivers == [TerminalDriver]
