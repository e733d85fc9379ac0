"""The drafter `history` through a whole chat: it helps, it changes nothing, it honours deletion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Done
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.port import ChatPort
from sessions.service import EngineService
from sessions.store import MEMORY, ChatStore
from sessions.token_log import StoredLog

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
SAMPLING = {"temperature": 1.0, "max_tokens": 40, "seed": 5}
PROMPT = "the cat sat on the mat, and then?"


class Program:
    """A store, an engine and its log, without processes. `look` stands for the log's thread."""

    def __init__(self, chat_db: Path, *, ephemeral: bool = False, spec: str = "tree:6") -> None:
        model = TinyModel()
        self.log = None if ephemeral else StoredLog(chat_db, model.tokenizer.tok_fp())
        config = EngineConfig(spec=spec, drafters=("history",))
        engine = Engine(model, config, token_log=self.log, costs=COSTS, guard=False)
        self.engine = LocalEngine(EngineService(engine, log=self.log))
        self.engine.start()
        self.store = ChatStore(MEMORY if ephemeral else chat_db)
        self.chats = Chats(self.store, self.engine, settings={"sampling": SAMPLING})

    def close(self) -> None:
        self.engine.close()
        self.store.close()

    def look(self) -> None:
        assert self.log is not None
        self.log.look()


@pytest.fixture
def chat_db(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chat.db"


@pytest.fixture
def program(chat_db: Path) -> Iterator[Program]:
    program = Program(chat_db)
    yield program
    program.close()


def say(chat: ChatPort, text: str) -> Done:
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done


def test_another_chat_is_copied_from_and_the_text_stays(
    program: Program, chat_db: Path, tmp_path: Path
) -> None:
    first = say(program.chats.new(), PROMPT)
    assert first.usage.draft_n == 0
    program.look()
    again = say(program.chats.new(), PROMPT)
    assert again.text == first.text
    assert again.usage.draft_n_accepted > 20
    other = Program(tmp_path / "other" / "chat.db", spec="none")
    assert say(other.chats.new(), PROMPT).text == first.text
    other.close()


def test_a_reply_that_was_answered_again_is_there_too(program: Program) -> None:
    chat = program.chats.new()
    first = say(chat, PROMPT)
    program.look()
    (*_, done) = chat.again()
    assert isinstance(done, Done)
    assert done.text == first.text  # the seed is set
    assert done.usage.draft_n_accepted > 20


def test_a_deleted_chat_is_not_copied_from(program: Program) -> None:
    chat = program.chats.new("ada")
    say(chat, PROMPT)
    program.look()
    program.store.delete(chat.id)
    for _ in range(2):
        other = program.chats.new()
        done = say(other, PROMPT)
        assert done.usage.draft_n == 0
        program.store.delete(other.id)
        program.look()


def test_ephemeral_leaves_the_log_alone(chat_db: Path) -> None:
    kept = Program(chat_db)
    say(kept.chats.new(), PROMPT)
    kept.look()
    assert kept.log is not None
    path = kept.log.path
    kept.close()
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_atime_ns
    hidden = Program(chat_db, ephemeral=True)
    done = say(hidden.chats.new(), PROMPT)
    hidden.close()
    assert done.usage.draft_n == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before[:2]
    assert [file.name for file in chat_db.parent.glob("history-*")] == [path.name]
