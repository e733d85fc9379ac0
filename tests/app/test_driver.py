"""A terminal that is closed while the screen is drawn."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, cast

from app.fakes import FakeChats, FakeEngine
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


def test_the_screen_draws_through_it(monkeypatch) -> None:
    drivers = []
    monkeypatch.setattr(ChatApp, "run", lambda app: drivers.append(app.driver_class))
    work = wiring.Workspace(load(env={}), cast(Any, None), FakeEngine(), FakeChats(), "")
    wiring.run_screen(work, cast(Any, None), prompt=None, pick=False)
    assert drivers == [TerminalDriver]
