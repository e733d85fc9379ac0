"""kill -9 at random moments: nothing acknowledged is lost, and the replies are those of a run that
nobody killed.

`CHATKV_KILLS` sets how often the real program is killed in the slow test (`make kill-100`).
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import scripted

from sessions.store import ChatStore

HERE = Path(__file__).parent


def texts(folder: Path, number: int) -> list[tuple[str, str, str]]:
    """(prompt, reply, state) of each turn on the open path of a conversation."""
    with ChatStore(folder / "chat.db") as store:
        row = store.find(f"script {number}")
        turns = []
        for turn in store.path(row.id)[1:]:
            reply = turn.message("assistant")
            prompt = turn.message("user")
            assert prompt is not None
            turns.append((prompt.row.content, reply.row.content if reply else "", turn.turn.state))
        return turns


class Running(NamedTuple):
    """One run of the program."""

    pid: int
    reap: Callable[[], object]
    reader: threading.Thread
    lines: list[str]


class Tiny:
    """The program with the tiny model, in a process forked off one that has imported everything."""

    kind = "tiny"
    load_s, chat_s = 0.8, 0.4

    def __init__(self) -> None:
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["fakes", "chatkv.engine", "sessions.service"])

    def start(self, folder: Path, number: int) -> Running:
        read, write = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_child, args=(folder, number, write), daemon=True)
        process.start()
        write.close()
        fd = os.dup(read.fileno())
        read.close()
        return Running(process.pid or 0, process.join, *_reader(fd))


def _child(folder: Path, number: int, write: Connection) -> None:
    os.dup2(write.fileno(), 1)
    sys.stdout = os.fdopen(1, "w")
    scripted.play(folder, number, "tiny")


class Real:
    """The program as users run it: a front, and the engine in a child process."""

    kind = "real"
    load_s, chat_s = 4.0, 2.5

    def start(self, folder: Path, number: int) -> Running:
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, HERE / "scripted.py", folder, str(number), "real"], stdout=write
        )
        os.close(write)
        return Running(process.pid, process.wait, *_reader(read))


def _reader(fd: int) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def read() -> None:
        with os.fdopen(fd) as stream:
            for line in iter(stream.readline, ""):
                lines.append(line.strip())  # one by one: others watch

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, lines


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for(line: str, reader: threading.Thread, lines: list[str]) -> None:
    deadline = time.monotonic() + 60
    while line not in lines and reader.is_alive() and time.monotonic() < deadline:
        reader.join(0.01)


def kill_loop(program: Tiny | Real, folder: Path, kills: int, seed: int) -> int:
    """Kill `kills` times; returns the turns that were acknowledged in all."""
    dice = random.Random(seed)
    reference = folder / "reference"
    reference.mkdir(mode=0o700)
    number = done = acknowledged = 0
    while done < kills:
        number += 1
        run = program.start(reference, number)
        run.reader.join(120)
        run.reap()
        expected = texts(reference, number)
        assert [state for _, _, state in expected] == ["done"] * len(scripted.PROMPTS)
        acks: set[int] = set()
        while True:
            pid, reap, reader, lines = program.start(folder, number)
            if done == kills:
                reader.join(120)
            elif dice.random() < 0.2:  # while it starts
                reader.join(dice.uniform(0.0, program.load_s))
            else:
                wait_for("ready", reader, lines)
                reader.join(dice.uniform(0.0, program.chat_s))
            alive = reader.is_alive()
            if alive:
                done += 1
                victims = [pid, *(children(pid) if dice.random() < 0.7 else [])]
                for victim in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                reader.join(10)
            reap()
            acks |= {int(line.split()[1]) for line in lines if line.startswith("ack")}
            if acks:
                stored = texts(folder, number)
                assert len(stored) > max(acks), (acks, stored)
                whole = {int(line.split()[1]) for line in lines if line.startswith("done")}
                assert all(stored[turn][2] == "done" for turn in whole)
            if not alive:
                break
        assert texts(folder, number) == expected
        acknowledged += len(acks)
    return acknowledged


def test_twelve_kills(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert kill_loop(Tiny(), tmp_path, 12, seed=int(time.time())) > 0


@pytest.mark.slow
def test_kills_of_the_real_program(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    kills = int(os.environ.get("CHATKV_KILLS", "12"))
    turns = kill_loop(Real(), tmp_path, kills, seed=1)
    sys.stderr.write(f"\n{kills} kills, {turns} acknowledged turns, none lost\n")
