"""The engine's process: frames in on stdin, frames out on stdout. Started by `sessions.client`.

The real stdout is kept for frames and fd 1 points at stderr, so that a library that prints cannot
break them. The process ends when its stdin does.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import Any

from chatkv.errors import ChatKVError
from chatkv.events import Event, Failed, Loading, to_json
from sessions.frames import PROTOCOL, FrameWriter, read_frame
from sessions.request import Request
from sessions.service import EngineService


class Worker:
    """Reads requests in a thread, answers them in the main one."""

    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer
        self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._gone = threading.Event()

    def read(self, fd: int) -> None:
        """Runs in a thread: requests go to the queue, a cancel takes effect at once."""
        with os.fdopen(fd, "rb") as stream:
            try:
                while (frame := read_frame(stream)) is not None:
                    if frame["op"] == "cancel":
                        self._cancelled.add(frame["id"])
                    else:
                        self._requests.put(frame)
            finally:
                self._gone.set()
                self._requests.put(None)

    def run(self) -> None:
        """Answer until the front leaves."""
        start = self._requests.get()
        if start is None:
            return
        service = self._load(start["options"])
        if service is None:
            return
        try:
            self._tell(service.ready())
            while (frame := self._next(service)) is not None and frame["op"] != "close":
                self._answer(service, frame)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the front is gone; what is queued may still reach the disk
        finally:
            service.close()

    def _next(self, service: EngineService) -> dict[str, Any] | None:
        """The next request; while there is none the engine prepares for one, in small pieces."""
        while self._requests.empty() and service.idle.do_some():
            pass
        return self._requests.get()

    def _load(self, options: dict[str, Any]) -> EngineService | None:
        from sessions.build import build_service  # torch is imported here

        try:
            return build_service(
                options, lambda stage, done, total: self._tell(Loading(stage, done, total))
            )
        except ChatKVError as error:
            self._tell(Failed(error.code, error.exit_code, error.message, error.hint))
        except MemoryError:
            self._tell(
                Failed(
                    "out_of_memory",
                    4,
                    "There is not enough memory to load the model.",
                    "Close other programs, or use a smaller --context.",
                )
            )
        return None

    def _answer(self, service: EngineService, frame: dict[str, Any]) -> None:
        request_id = int(frame["id"])
        if frame["op"] == "call":
            try:
                value = service.call(frame["name"], frame["args"])
                self._writer.send({"type": "result", "id": request_id, "value": value})
            except ChatKVError as error:
                self._tell(
                    Failed(error.code, error.exit_code, error.message, error.hint), request_id
                )
            return
        request = Request.from_json(frame["request"])
        for event in service.generate(
            request, lambda: request_id in self._cancelled or self._gone.is_set()
        ):
            self._tell(event, request_id)
        self._cancelled.discard(request_id)

    def _tell(self, event: Event, request_id: int | None = None) -> None:
        frame = to_json(event)
        if request_id is not None:
            frame["id"] = request_id
        self._writer.send(frame)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    writer = FrameWriter(out)
    writer.send({"type": "hello", "protocol": PROTOCOL})
    worker = Worker(writer)
    threading.Thread(target=worker.read, args=(requests,), name="requests", daemon=True).start()
    worker.run()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
