"""A scripted engine behind the port of `sessions.port`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from chatkv.errors import ChatKVError, EngineLost
from chatkv.events import Event, Ready
from sessions.port import EngineState, Watchers
from sessions.request import Request

READY = Ready(
    model="SmolLM2-135M-Instruct", device="cpu", backend="cpu", mode="exact", context_limit=4096,
    drafting="auto", tok_fp="00" * 32,
)  # fmt: skip


class FakeEngine:
    """Moves between states when told to."""

    def __init__(self, *, ready: bool = True) -> None:
        self._watchers = Watchers()
        self.failure: ChatKVError | None = None
        self.starts = 0
        self.closed = False
        if ready:
            self.become_ready()

    @property
    def state(self) -> EngineState:
        return self._watchers.state

    def start(self) -> None:
        self.starts += 1
        self._watchers.move(EngineState("starting"))

    def watch(self, callback: Any) -> None:
        self._watchers.callbacks.append(callback)

    def move(self, phase: str, **fields: Any) -> None:
        """Go into a state, telling the watchers from another thread, as the real client does."""
        state = EngineState(phase, **fields)
        thread = threading.Thread(target=self._watchers.move, args=(state,))
        thread.start()
        thread.join()

    def become_ready(self) -> None:
        self.move("ready", ready=READY)

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        if self.state.ready is not None and self.state.phase != "lost":
            return self.state.ready
        raise self.failure or EngineLost(
            f"The engine process ended ({self.state.detail}).", hint="The conversation is saved."
        )

    def generate(self, request: Request) -> Iterator[Event]:
        raise NotImplementedError

    def cancel(self) -> None:
        raise NotImplementedError

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        return {"pages_used": 161, "pages_total": 256}

    def close(self) -> None:
        self.closed = True
