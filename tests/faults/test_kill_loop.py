"""kill -9 at random moments: nothing acknowledged is lost, no page is torn, and the replies are
those of a run that nobody killed.

`CHATKV_KILLS` sets how often the slow tests kill: the tiny model so often, the default model, front
and engine apart, a tenth of that (`make kill-1000`).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import scripted
from forked import Child
from shares import in_shares

from sessions.cachefile import CacheFile
from sessions.store import ChatStore
from sessions.upkeep import verify

KILLS = int(os.environ.get("CHATKV_KILLS", "50"))


@dataclass
class Counts:
    """What a kill loop saw."""

    kills: int = 0
    acknowledged: int = 0
    """Prompts that the program said it had."""
    lost: int = 0
    pages: int = 0
    """Checked after kills."""
    torn: int = 0
    replies: int = 0
    """Compared with those of a run that nobody killed."""
    different: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )

    def check(self, what: str) -> None:
        sys.stderr.write(
            f"\n{what}: {self.kills} kills; {self.acknowledged} acknowledged prompts, {self.lost} "
            f"lost; {self.pages} pages checked, {self.torn} torn; {self.replies} replies, "
            f"{self.different} other than those of a chat that never quit\n"
        )
        assert (self.lost, self.torn, self.different) == (0, 0, 0)
        assert self.acknowledged > 0
        assert self.pages > 0


def texts(folder: Path, number: int) -> list[tuple[str, str, str]]:
    """(prompt, reply, state) of each turn on the open path of a conversation."""
    with ChatStore(folder / "chat.db") as store:
        turns = []
        for turn in store.path(store.find(f"script {number}").id)[1:]:
            reply, prompt = turn.message("assistant"), turn.message("user")
            assert prompt is not None
            turns.append((prompt.row.content, reply.row.content if reply else "", turn.turn.state))
        return turns


class Forked:
    """The program in one process, forked off one that has imported everything."""

    def __init__(self, kind: str, start_s: float, chat_s: float) -> None:
        self.kind, self.start_s, self.chat_s = kind, start_s, chat_s

    def start(self, folder: Path, number: int) -> Any:
        return Child(scripted.play, folder, number, self.kind)


class Real(Forked):
    """The program as users run it: a front, and the engine in a child process. Some kills hit the
    front alone, whose engine then has to end by itself."""

    def start(self, folder: Path, number: int) -> Any:
        return _Front(folder, number)


class _Front(Child):
    def __init__(self, folder: Path, number: int) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, scripted.__file__, folder, str(number), "real"], stdout=write
        )
        os.close(write)
        self._follow(self.process.pid, read, self.process.wait)

    def kill(self) -> None:
        for pid in _children(self.pid) if random.random() < 0.7 else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().kill()


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_loop(program: Forked, folder: Path, kills: int, seed: int) -> Counts:
    """Kill so many times; then let the conversation come to its end."""
    dice, counts = random.Random(seed), Counts()
    folder.chmod(0o700)
    reference = folder / "reference"
    reference.mkdir(mode=0o700)
    number = 0
    while counts.kills < kills:
        number += 1
        program.start(reference, number).wait()
        expected = texts(reference, number)
        assert [state for _, _, state in expected] == ["done"] * len(scripted.PROMPTS)
        acknowledged: set[int] = set()
        whole: set[int] = set()
        ended = False
        while not ended:
            run = program.start(folder, number)
            if counts.kills == kills:
                run.wait()
            elif dice.random() < 0.2:
                run.sleep(dice.uniform(0.0, program.start_s))
            else:
                run.wait_for("ready")
                run.sleep(dice.uniform(0.0, program.chat_s))
            ended = not run.running
            if ended:
                run.wait()
            else:
                counts.kills += 1
                run.kill()
            said = [line.split() for line in run.lines if " " in line]
            acks = [int(turn) for word, turn in said if word == "ack"]
            counts.acknowledged += len(acks)
            acknowledged.update(acks)
            whole |= {int(turn) for word, turn in said if word == "done"}
            stored = texts(folder, number) if acknowledged else []
            counts.lost += sum(turn >= len(stored) for turn in acknowledged)
            counts.lost += sum(stored[turn][2] != "done" for turn in whole if turn < len(stored))
            if dice.random() < 0.2 or ended:
                _check_pages(folder / "kv.db", counts)
        counts.replies += len(expected)
        counts.different += sum(
            mine != theirs for mine, theirs in zip(texts(folder, number), expected, strict=True)
        )
    return counts


def _check_pages(path: Path, counts: Counts) -> None:
    disk = CacheFile(path, limit_bytes=1 << 30)
    found = verify(disk)
    disk.close()
    counts.pages += found.pages
    counts.torn += sum(found.bad.values()) + found.quarantined + found.damaged


def test_twelve_kills(tmp_path: Path) -> None:
    tiny = Forked("tiny", 0.2, 0.3)
    kill_loop(tiny, tmp_path, 12, int(time.time())).check("tiny model")


@pytest.mark.slow
def test_kills_of_the_tiny_model(tmp_path: Path) -> None:
    counts = in_shares(_of_the_tiny_model, KILLS, tmp_path)
    sum(counts, Counts()).check("tiny model")


@pytest.mark.slow
def test_kills_of_front_and_engine(tmp_path: Path) -> None:
    counts = in_shares(_of_front_and_engine, KILLS // 10, tmp_path)
    sum(counts, Counts()).check("default model, front and engine apart")


def _of_the_tiny_model(kills: int, share: int, folder: Path) -> Counts:
    return kill_loop(Forked("tiny", 0.2, 0.6), folder, kills, 100 + share)


def _of_front_and_engine(kills: int, share: int, folder: Path) -> Counts:
    return kill_loop(Real("real", 4.0, 3.0), folder, kills, 100 + share)
