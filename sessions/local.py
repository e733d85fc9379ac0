"""The engine in this process, behind the same port as the child process. For embedding, scripts and
tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from chatkv.errors import EngineLost
from chatkv.events import Done, Event, Failed, Ready
from sessions.port import EngineState, Watchers
from sessions.request import Request
from sessions.service import EngineService


class LocalEngine:
    """Implements `sessions.port.EnginePort` over a service that is loaded already.

    Args:
        service: Answers. Closed with this.
    """

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self._watchers = Watchers()
        self._cancel = threading.Event()

    @property
    def state(self) -> EngineState:
        return self._watchers.state

    def watch(self, callback: Callable[[EngineState], None]) -> None:
        self._watchers.callbacks.append(callback)

    def start(self) -> None:
        self._watchers.move(EngineState("ready", ready=self.service.ready()))

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        if self.state.ready is None:
            raise EngineLost("The engine was not started.", hint="Call start() first.")
        return self.state.ready

    def generate(self, request: Request) -> Iterator[Event]:
        ready = self.wait_ready()
        self._cancel.clear()
        self._watchers.move(EngineState("generating", ready=ready))
        try:
            for event in self.service.generate(request, self._cancel.is_set):
                yield event
                if isinstance(event, Done | Failed):
                    return
        finally:
            self._watchers.move(EngineState("ready", ready=ready))

    def cancel(self) -> None:
        self._cancel.set()

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        return self.service.call(op, args)

    def close(self) -> None:
        self.service.close()
