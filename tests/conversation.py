"""A conversation that things happen to, on the tiny model."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from program import PROMPTS, SAMPLING, Program, say

from chatkv.events import Done

Replies = list[str]
_GOLDEN: dict[float, Replies] = {}


def golden(temperature: float) -> Replies:
    """The replies of a chat that never stopped and stored no page. Computed once."""
    if temperature not in _GOLDEN:
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(Conversation(Path(folder), temperature)) as told,
        ):
            told.start(kv=False)
            _GOLDEN[temperature] = [done.text for done in told.play(len(PROMPTS))]
    return _GOLDEN[temperature]


class Conversation:
    """One conversation in a folder. Every reply it gets must be the one it would have got had
    nothing ever happened."""

    def __init__(self, folder: Path, temperature: float) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.folder, self.temperature = folder, temperature
        self.expected: Replies | None = None
        self.program: Program | None = None
        self._chat: Any = None

    @property
    def chat_db(self) -> Path:
        return self.folder / "chat.db"

    @property
    def kv_db(self) -> Path:
        return self.folder / "kv.db"

    @property
    def running(self) -> Program:
        assert self.program is not None
        return self.program

    def start(self, **options: Any) -> Program:
        """Start the program, again if it runs."""
        self.stop()
        options.setdefault("sampling", {**SAMPLING, "temperature": self.temperature})
        self.program = Program(self.folder, **options)
        return self.program

    def stop(self) -> None:
        if self.program is not None:
            self.program.close()
        self.program = self._chat = None

    close = stop

    @property
    def chat(self) -> Any:
        """The conversation, open on the program that runs."""
        program = self.program or self.start()
        if self._chat is None:
            chats = program.chats
            self._chat = chats.open("@last") if chats.chats() else chats.new()
        return self._chat

    def play(self, turns: int) -> list[Done]:
        """Go on until so many turns are whole; compare the reply of each with the expected one."""
        ends = []
        while (turn := sum(t.state == "done" for t in self.chat.turns())) < turns:
            if len(self.chat.turns()) > turn:  # one that was cut
                (*_, done) = self.chat.again()
                assert isinstance(done, Done), done
            else:
                done = say(self.chat, PROMPTS[turn])
            ends.append(done)
        if self.expected is not None:
            replies = [turn.reply for turn in self.chat.turns()]
            assert replies == self.expected[: len(replies)]
        return ends

    def copy(self, folder: Path) -> Conversation:
        """The same in another folder; nothing of it may run."""
        shutil.copytree(self.folder, folder)
        other = Conversation(folder, self.temperature)
        other.expected = self.expected
        return other

    @contextmanager
    def pages(self) -> Iterator[sqlite3.Connection]:
        """kv.db, to be changed behind the back of a program that does not run."""
        with closing(sqlite3.connect(self.kv_db)) as db, db:
            yield db

    @staticmethod
    def notices(ends: list[Done]) -> list[str]:
        """What the user was told."""
        return [done.notice for done in ends if done.notice]
