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
from multiprocessing.connection import Connection
from pathlib import Path

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


class Tiny:
    """The program with the tiny model, in a process forked off one that has imported everything."""

    kind = "tiny"
    longest_s = 1.2

    def __init__(self) -> None:
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["fakes", "chatkv.engine", "sessions.service"])

    def start(self, folder: Path, number: int) -> tuple[int, threading.Thread, list[str]]:
        read, write = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_child, args=(folder, number, write), daemon=True)
        process.start()
        write.close()
        fd = os.dup(read.fileno())
        read.close()
        return process.pid or 0, *_reader(fd)


def _child(folder: Path, number: int, write: Connection) -> None:
    os.dup2(write.fileno(), 1)
    sys.stdout = os.fdopen(1, "w")
    scripted.play(folder, number, "tiny")


class Real:
    """The program as users run it: a front, and the engine in a child process."""

    kind = "real"
    longest_s = 6.0

    def start(self, folder: Path, number: int) -> tuple[int, threading.Thread, list[str]]:
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, HERE / "scripted.py", folder, str(number), "real"], stdout=write
        )
        os.close(write)
        return process.pid, *_reader(read)


def _reader(fd: int) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def read() -> None:
        with os.fdopen(fd) as stream:
            lines.extend(line.strip() for line in iter(stream.readline, ""))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, lines


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_loop(program: Tiny | Real, folder: Path, kills: int, seed: int) -> int:
    """Kill `kills` times; returns the turns that were acknowledged in all."""
    dice = random.Random(seed)
    reference = folder / "reference"
    reference.mkdir(mode=0o700)
    number = done = acknowledged = 0
    while done < kills:
        number += 1
        pid, reader, _ = program.start(reference, number)
        reader.join(120)
        expected = texts(reference, number)
        assert [state for _, _, state in expected] == ["done"] * len(scripted.PROMPTS)
        acks: set[int] = set()
        while True:
            pid, reader, lines = program.start(folder, number)
            reader.join(dice.uniform(0.0, program.longest_s) if done < kills else 120)
            alive = reader.is_alive()
            if alive:
                done += 1
                victims = [pid, *(children(pid) if dice.random() < 0.7 else [])]
                for victim in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                reader.join(10)
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
