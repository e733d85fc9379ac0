"""The engine in a child process, as its front sees it."""

from __future__ import annotations

import pytest
from program import PROMPTS, SAMPLING, say
from victims import TinyWorker

from chatkv.errors import EngineLost
from chatkv.events import Failed
from sessions import client, frames
from sessions.chat import Chats
from sessions.store import ChatStore


@pytest.fixture
def chats(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(client.subprocess, "Popen", TinyWorker)
    engine = client.ChildEngine({"model": "tiny", "kv_path": str(tmp_path / "kv.db")}, None)
    engine.start()
    with ChatStore(tmp_path / "chat.db") as store:
        yield Chats(store, engine, settings={"sampling": SAMPLING})
        engine.close()


def test_a_conversation_too_large_to_send_is_refused_and_the_chat_goes_on(chats, monkeypatch):
    chat = chats.new()
    first = say(chat, PROMPTS[0])
    with monkeypatch.context() as patch:
        patch.setattr(frames, "LIMIT_BYTES", 20_000)
        (*_, failed) = chat.send("x" * 30_000)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.exit) == ("context_full", 5)
    assert "the limit is 20000" in failed.message
    assert [turn.prompt for turn in chat.turns()] == [PROMPTS[0]]
    assert chats.engine._answers == {}
    assert say(chat, PROMPTS[1]).usage.cached_tokens > first.usage.prompt_tokens
    (found,) = chats.store.search("x" * 100)
    assert found.role == "user"  # it is not lost


def test_an_engine_that_dies_in_a_reply_is_lost_until_it_is_started_again(chats):
    chat, engine = chats.new(), chats.engine
    say(chat, PROMPTS[0])
    answer = chat.send(PROMPTS[1])
    next(answer)
    engine._process.kill()
    with pytest.raises(EngineLost):
        list(answer)
    assert engine.state.phase == "lost"
    engine.start()
    assert say(chat, PROMPTS[2]).text
