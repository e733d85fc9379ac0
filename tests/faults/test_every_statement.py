"""A disk that fails at the n-th statement, for every n until a whole chat succeeds.

Both stores, all kinds of failure, opening and reopening included. After each: nothing that was
acknowledged is lost, and the conversation goes on as if nothing had happened.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conversation import Conversation
from faulty import KINDS, Countdown, Faulty
from program import PROMPTS

from chatkv.errors import ChatKVError
from chatkv.events import Failed
from sessions import pagefile, storefile

FILES = {"chat.db": storefile, "kv.db": pagefile}
SHORT = {"temperature": 1.0, "max_tokens": 4, "seed": 11}


def script(told: Conversation) -> int:
    """Two turns, each in a run of its own; how many prompts were acknowledged."""
    acknowledged = 0
    try:
        for turn in range(2):
            told.start(sampling=SHORT)
            for place, event in enumerate(told.chat.send(PROMPTS[turn])):
                acknowledged += place == 0 and not isinstance(event, Failed)
            told.running.flush()
    except ChatKVError:
        pass  # said in a sentence; anything else is a bug
    finally:
        told.stop()
    return acknowledged


@pytest.fixture(scope="module")
def replies(tmp_path_factory) -> list[str]:
    told = Conversation(tmp_path_factory.mktemp("golden") / "data", 1.0)
    told.start(kv=False, sampling=SHORT)
    texts = [done.text for done in told.play(3)]
    told.close()
    return texts


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fails_at_some_statement(tmp_path, monkeypatch, replies, name):
    for number in range(0, 5000, 37):
        kind = list(KINDS)[number % len(KINDS)]
        if not fails_once(tmp_path, monkeypatch, replies, name, kind, number):
            break
    assert number > 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fails_at_every_statement(tmp_path, monkeypatch, replies, name, kind):
    for number in range(5000):
        if not fails_once(tmp_path, monkeypatch, replies, name, kind, number):
            break
    assert number > 60


def fails_once(folder, monkeypatch, replies, name, kind, number) -> bool:
    """Whether it failed: the script has at least so many statements."""
    countdown = Countdown(number, kind, once=True)
    told = Conversation(folder / "data", 1.0)
    real = FILES[name].connect
    with monkeypatch.context() as patch:
        patch.setattr(FILES[name], "connect", _counted(real, countdown))
        acknowledged = script(told)
    told.start(sampling=SHORT)
    assert told.running.store.check() == []
    assert told.running.pages.usable
    turns = told.chat.turns()
    assert [turn.prompt for turn in turns][:acknowledged] == PROMPTS[:acknowledged]
    if name == "kv.db":  # pages are never a reason not to answer
        assert [turn.reply for turn in turns] == replies[:2]
    told.expected = replies
    told.play(3)
    told.close()
    shutil.rmtree(told.folder)
    return countdown.struck


def _counted(real, countdown):
    def connect(path: Path, **more):
        opened = real(path, **more)
        try:
            countdown.count()
        except BaseException:
            opened.close()
            raise
        return Faulty(opened, countdown)

    return connect
