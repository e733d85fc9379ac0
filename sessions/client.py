"""The engine in a child process, as its front sees it. Knows frames and processes; no torch, no
database.

A crash or an out-of-memory kill of the engine leaves the front and the conversation alive; a cancel
that is not answered ends in a kill; and torch loads while the user types.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from chatkv.errors import Cancelled, ChatKVError, ContextFull, EngineLost, ModelError
from chatkv.events import Done, Event, Failed, Loading, Prefill, Ready, from_json
from sessions.frames import PROTOCOL, FrameError, FrameWriter, read_frame
from sessions.port import EngineState, Watchers
from sessions.request import Request

SOFT_S, TERM_S = 3.0, 2.0
"""Seconds a cancelled reply gets before its process is asked to end, and then is killed."""

LOG_BYTES = 1 << 20


class ChildEngine:
    """Implements `sessions.port.EnginePort`.

    Args:
        options: What `sessions.worker` builds the engine from; JSON values.
        log_path: Where the child's stderr goes (kept under a megabyte, one older file), or None.
    """

    def __init__(self, options: Mapping[str, Any], log_path: Path | None = None) -> None:
        self._options = dict(options)
        self._log_path = log_path
        self._watchers = Watchers()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: FrameWriter | None = None
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failure: Failed | None = None
        self._next_id = 0
        self._running: int | None = None
        self._closing = False
        self._cancelled_wait = False

    @property
    def state(self) -> EngineState:
        return self._watchers.state

    def watch(self, callback: Callable[[EngineState], None]) -> None:
        self._watchers.callbacks.append(callback)

    def start(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._failure, self._closing = None, False
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "sessions.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._open_log(),
                env=_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is the front's to handle
            )
            assert process.stdin is not None
            assert process.stdout is not None
            self._writer = FrameWriter(process.stdin)
            self._move(EngineState("starting"))
            threading.Thread(
                target=self._read, args=(process, process.stdout), name="engine-events", daemon=True
            ).start()
        self._send({"op": "start", "protocol": PROTOCOL, "options": self._options})

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        with self._changed:
            self._cancelled_wait = False
            self._changed.wait_for(
                lambda: (
                    self._cancelled_wait
                    or self.state.ready is not None
                    or self.state.phase in ("lost", "absent")
                ),
                timeout_s,
            )
            if self._cancelled_wait:
                raise Cancelled
            if self.state.ready is not None and self.state.phase != "lost":
                return self.state.ready
            if self._failure is not None:
                raise _as_error(self._failure)
            if self.state.phase in ("lost", "absent"):
                raise _lost(self.state.detail or "it was not started")
        raise EngineLost(
            f"The model was not ready after {timeout_s:.0f} s.", hint="Try again, or see the log."
        )

    def generate(self, request: Request) -> Iterator[Event]:
        ready = self.wait_ready()
        try:
            answers = self._ask("generate", request=asdict(request))
        except FrameError as error:
            yield Failed(
                ContextFull.code,
                ContextFull.exit_code,
                f"The conversation is larger than any context: {error}",
                "Shorten the prompt, fork from an earlier turn, or start a new chat.",
            )
            return
        with self._lock:
            self._running = self._next_id
        self._move(EngineState("prefill", ready=ready))
        try:
            for data in answers:
                event = from_json(data)
                if isinstance(event, Prefill):
                    self._move(EngineState("prefill", "", event.done, event.total, ready))
                elif event.type == "delta" and self.state.phase == "prefill":
                    self._move(EngineState("generating", ready=ready))
                elif isinstance(event, Done | Failed):
                    self._running = None
                    self._move(EngineState("ready", ready=ready))
                yield event
                if isinstance(event, Done | Failed):
                    return
        finally:
            if self.state.phase == "lost":  # nobody is left to stop, and it must stay lost
                self._running = None
            if self._running is not None:
                self.cancel()
                for data in answers:  # the engine takes the next request only after this one's end
                    if data["type"] in ("done", "failed"):
                        self._move(EngineState("ready", ready=ready))
                        break
                self._running = None

    def cancel(self) -> None:
        with self._lock:
            running, process = self._running, self._process
            if running is None or process is None:
                self._cancelled_wait = True
                self._changed.notify_all()
                return
            self._move(EngineState("stopping", ready=self.state.ready))
        with contextlib.suppress(EngineLost):
            self._send({"op": "cancel", "id": running})
        threading.Thread(
            target=self._insist, args=(running, process), name="engine-cancel", daemon=True
        ).start()

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        self.wait_ready()
        for data in self._ask("call", name=op, args=args):
            if data["type"] == "result":
                return data["value"]
            raise _as_error(Failed(**{key: data[key] for key in data if key != "type"}))
        raise _lost(self.state.detail)

    def close(self) -> None:
        with self._lock:
            process, self._closing = self._process, True
        if process is None or process.poll() is not None:
            return
        if self.state.ready is None:
            process.kill()  # nothing was computed, so there is nothing to save
        with contextlib.suppress(EngineLost):
            self._send({"op": "close"})
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        _end(process, 5.0)

    def _ask(self, op: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Send a request and yield its answers.

        Raises:
            EngineLost: They stop.
            FrameError: The request is too large to send.
        """
        with self._lock:
            self._next_id += 1
            request_id = self._next_id
            answers = self._answers[request_id] = queue.SimpleQueue()
        try:
            self._send({"op": op, "id": request_id, **fields})
        except BaseException:  # a Ctrl-C too: no answer will come for it
            del self._answers[request_id]
            raise

        def stream() -> Iterator[dict[str, Any]]:
            try:
                while (data := answers.get()) is not None:
                    yield data
            finally:
                self._answers.pop(request_id, None)
            raise _lost(self.state.detail)

        return stream()

    def _send(self, frame: dict[str, Any]) -> None:
        writer = self._writer
        try:
            if writer is None:
                raise BrokenPipeError
            writer.send(frame)
        except (OSError, ValueError) as error:
            raise _lost(self.state.detail or "its pipe is closed") from error

    def _read(self, process: subprocess.Popen[bytes], stream: IO[bytes]) -> None:
        """Runs in a thread: sorts what the child says until it ends."""
        reason = ""
        try:
            while (frame := read_frame(stream)) is not None:
                self._receive(frame)
        except (FrameError, ValueError, OSError) as error:
            reason = f"unreadable answer: {error}"
            process.kill()
        code = process.wait()
        stream.close()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it may hold a request that nobody will read
            process.stdin.close()
        with self._changed:
            if self._process is not process:
                return
            detail = reason or (f"signal {-code}" if code < 0 else f"exit status {code}")
            self._move(EngineState("absent") if self._closing else EngineState("lost", detail))
            for answers in list(self._answers.values()):
                answers.put(None)
            self._changed.notify_all()

    def _receive(self, frame: dict[str, Any]) -> None:
        request_id = frame.pop("id", None)
        if request_id is not None:
            if answers := self._answers.get(request_id):
                answers.put(frame)
            return
        if frame["type"] == "hello":
            if frame["protocol"] != PROTOCOL:
                raise FrameError(f"protocol {frame['protocol']}, not {PROTOCOL}")
            return
        event = from_json(frame)
        with self._changed:
            match event:
                case Loading(stage, done, total):
                    self._move(EngineState("loading", stage, done, total))
                case Ready():
                    self._move(EngineState("ready", ready=event))
                case Failed():
                    self._failure = event
                    self._move(EngineState("lost", event.message))
                case _:
                    pass
            self._changed.notify_all()

    def _insist(self, request_id: int, process: subprocess.Popen[bytes]) -> None:
        """Runs in a thread: ends a child that does not answer a cancel."""
        with self._changed:
            if self._changed.wait_for(lambda: self._running != request_id, SOFT_S):
                return
        if self._running == request_id:
            _end(process, TERM_S)

    def _move(self, state: EngineState) -> None:
        with self._changed:
            self._watchers.move(state)
            self._changed.notify_all()

    def _open_log(self) -> int:
        if self._log_path is None:
            return subprocess.DEVNULL
        self._log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):
            if self._log_path.stat().st_size > LOG_BYTES:
                self._log_path.replace(self._log_path.with_suffix(".old.log"))
        return os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _environment() -> dict[str, str]:
    """The child's environment: ours, and no second guess about colour or hubs."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait, then ask, then kill."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            stop()
    process.wait()


def _lost(detail: str) -> EngineLost:
    return EngineLost(
        f"The engine process ended ({detail or 'no reason given'}).",
        hint="The conversation is saved. In the chat F5 starts it again; or start chatkv again.",
    )


def _as_error(failed: Failed) -> ChatKVError:
    """The error that crossed the pipe, with its own code and exit status."""
    error = (ModelError if failed.exit == ModelError.exit_code else ChatKVError)(
        failed.message, hint=failed.hint
    )
    error.code, error.exit_code = failed.code, failed.exit
    return error
