"""What runs in processes that a test kills. Here, since a child has to import it by name."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from app.fake_engine import FakeEngine
from conversation import Conversation
from fakes import TinyModel
from faulty import Countdown, Faulty
from forked import CONTEXT, Child
from program import COSTS, PROMPTS, SAMPLING

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import ChatKVError
from chatkv.events import Delta
from sessions import build, worker
from sessions.pages import SqlitePageStore
from sessions.service import EngineService
from sessions.store import ChatStore
from tui import cli, output, wiring

LONG = {**SAMPLING, "max_tokens": 120}


class SlowModel(TinyModel):
    def step(self, *args):
        time.sleep(0.02)
        return super().step(*args)


def reply_slowly(folder: Path) -> None:
    """Says after each token how long the reply is by now."""
    told = Conversation(folder, 1.0)
    told.start(model=SlowModel(), sampling=LONG)
    said = 0
    for event in told.chat.send(PROMPTS[0]):
        if isinstance(event, Delta):
            said += len(event.text)
            sys.stdout.write(f"{said} {time.monotonic()}\n")
            sys.stdout.flush()


class Deadly(Countdown):
    """Kills its own process at the n-th statement."""

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_write(folder: Path, statements: int) -> None:
    told = Conversation(folder, 1.0)
    program = told.start()
    file = program.pages._disk._file
    file.writer = Faulty(file.writer, Deadly(statements))
    told.play(2)
    told.stop()
    sys.stdout.write("lived\n")


class SlowDisk:
    """A page store that takes its time to write."""

    def __init__(self, pages: SqlitePageStore, seconds: float) -> None:
        self.real, self.seconds = pages, seconds
        self.asked = 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def write(self, images):
        self.asked += 1
        time.sleep(self.seconds)
        return self.real.write(images)


def build_tiny(options, progress) -> EngineService:
    model = TinyModel()
    pages = SqlitePageStore(Path(options["kv_path"]), model.identity(16), limit_bytes=1 << 30)
    slow = SlowDisk(pages, 0.1)
    config = EngineConfig(spec="none")
    engine = Engine(model, config, store=slow, salt=pages.salt, costs=COSTS, guard=False)
    return EngineService(engine, pages)


def work_tiny(stdin: Connection, stdout: Connection) -> None:
    """The engine's process, with the tiny model in it."""
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    build.build_service = build_tiny
    worker.main()


class TinyWorker:
    """Takes the place of `subprocess.Popen` where the engine's process is started."""

    def __init__(self, args: list[str], **_: Any) -> None:
        assert args[1:] == ["-m", "sessions.worker"]
        requests, self._in = CONTEXT.Pipe(duplex=False)
        self._out, answers = CONTEXT.Pipe(duplex=False)
        self._child = Child(work_tiny, requests, answers)
        self.pid = self._child.pid
        self.stdin = os.fdopen(os.dup(self._in.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(self._out.fileno()), "rb")
        for end in (requests, answers, self._in, self._out):
            end.close()

    def poll(self) -> int | None:
        return None if self._child.running else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._child.wait(60 if timeout is None else timeout)
        except AssertionError:
            raise subprocess.TimeoutExpired("worker", timeout or 0) from None

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def look_and_ask(folder: Path) -> None:
    """Read the chat, then ask something on the command line; as a user who may not write."""
    with ChatStore(folder / "chat.db") as store:
        path = store.path(store.sessions()[0].id)[1:]
        texts = [message.row.content for turn in path for message in turn.messages]
    _say(texts)
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    errors: list[ChatKVError] = []
    output.write_error = lambda error, **_: errors.append(error)
    wiring.make_engine = lambda *_, **__: FakeEngine()  # it is not asked
    wiring.Workspace.start = lambda _: None
    code = cli.run(["--data-dir", str(folder), "ask", "-c", "hello"])
    _say([code, errors[0].message, errors[0].hint])


def play_without_saving(folder: Path, temperature: float, expected: list[str]) -> None:
    told = Conversation(folder, temperature)
    told.expected = expected
    ends = told.play(4)
    _say(sum(done.usage.restored_pages for done in ends))
    _say(told.running.pages.take_notices() + told.notices(ends))
    told.close()


def hold(path: Path) -> None:
    """Write to a store and never end."""
    if path.name == "chat.db":
        store = ChatStore(path)
        connection = store._db
        store._writer_id()
    else:
        connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    sys.stdout.write("held\n")
    time.sleep(60)


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def start_at_once(folder: Path, go: Path, name: str) -> None:
    sys.stdout.write("ready\n")
    while not go.exists():
        pass
    with ChatStore(folder / "chat.db") as store:
        row = store.create_session(name)
        store.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "hello", {})
    pages = SqlitePageStore(folder / "kv.db", limit_bytes=1 << 30)
    sys.stdout.write(f"{pages.salt.hex()} {pages.saving} {pages.take_notices()}\n")
    pages.close()
