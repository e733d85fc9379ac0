"""Rows 1, 2, 3 and 30: processes that end in the middle of something."""

from __future__ import annotations

import random
import shutil
import signal
import time

import pytest
from conversation import Conversation
from forked import Child
from program import PROMPTS, SAMPLING, say
from victims import LONG, SlowDisk, TinyWorker, die_in_a_write, reply_slowly

from chatkv.errors import EngineLost
from chatkv.events import Done
from sessions import client
from sessions.chat import Chats
from sessions.reply import PARTIAL_S
from sessions.store import ChatStore
from sessions.upkeep import verify


def test_01_killed_in_mid_decode(sampled, tmp_path):
    child = Child(reply_slowly, sampled.folder)
    begun = time.monotonic()
    while child.running and (not child.lines or time.monotonic() - begun < 1.5):
        child.sleep(0.01)
        begun = begun if child.lines else time.monotonic()
    child.kill()
    said = [(int(count), float(at)) for count, at in map(str.split, child.lines)]
    assert len(said) > 20
    sampled.expected = None
    sampled.start(sampling=LONG)
    (turn,) = sampled.chat.turns()
    assert (turn.prompt, turn.state) == (PROMPTS[0], "interrupted")
    old_enough = [count for count, at in said if at < said[-1][1] - PARTIAL_S - 0.2]
    assert len(turn.reply) >= max(old_enough)
    whole = Conversation(tmp_path / "whole", 1.0)
    expected = say(whole.start(kv=False, sampling=LONG).chats.new(), PROMPTS[0]).text
    whole.close()
    assert expected.startswith(turn.reply)
    assert turn.reply != expected
    # The cut reply can be gone on with, and answered again.
    assert say(sampled.chat, "go on").finish_reason in ("stop", "length")
    fork = sampled.chat.fork(turn.id)
    (*_, done) = fork.again()
    assert done.text == expected


@pytest.mark.parametrize(
    "step", [pytest.param(23, id="some"), pytest.param(1, id="every", marks=pytest.mark.slow)]
)
def test_02_killed_in_a_page_write(sampled, tmp_path, step):
    for statements in range(3, 400, step):
        told = Conversation(tmp_path / f"killed {statements}", 1.0)
        told.expected = sampled.expected
        child = Child(die_in_a_write, told.folder, statements)
        status = child.wait()
        disk = told.start().pages._disk  # pyright: ignore
        found = verify(disk)
        assert (found.bad, found.quarantined, found.damaged) == ({}, 0, False)
        ends = told.play(3)
        assert told.notices(ends) == []
        told.close()
        if child.lines == ["lived"]:
            assert status == 0
            break
        assert status == -signal.SIGKILL
    assert 30 < statements < 399  # pyright: ignore


@pytest.mark.parametrize(
    "cuts", [pytest.param(4, id="4"), pytest.param(100, id="100", marks=pytest.mark.slow)]
)
def test_03_torn_wal(told, tmp_path, monkeypatch, cuts):
    """The journal as a power failure may leave it: cut anywhere, or with other bytes from there."""
    dice = random.Random(3)
    pages = told.start().pages
    monkeypatch.setattr(pages, "end_turn", lambda: None)  # no checkpoint: it is all in the journal
    for turns in (1, 2):
        told.play(turns)
        told.running.flush()
    while_open = tmp_path / "open"
    shutil.copytree(told.folder, while_open)
    told.stop()
    length = (while_open / "kv.db-wal").stat().st_size
    assert length > 1 << 20
    counts = set()
    for number in range(cuts):
        folder = tmp_path / str(number)
        shutil.copytree(while_open, folder)
        (folder / "kv.db-shm").unlink()  # lost with the power
        torn = Conversation(folder, told.temperature)
        torn.expected = told.expected
        wal = folder / "kv.db-wal"
        cut = dice.randrange(length) if number else length
        rest = b"" if number % 2 else dice.randbytes(min(length - cut, 70_000))
        wal.write_bytes(wal.read_bytes()[:cut] + rest)
        before = torn.chat_db.read_bytes()
        program = torn.start()
        assert torn.chat_db.read_bytes() == before
        counts.add(program.pages.stats().pages)  # pyright: ignore
        found = verify(program.pages._disk)  # pyright: ignore
        assert (found.bad, found.damaged) == ({}, False)
        assert torn.notices(torn.play(3)) == []
        torn.close()
        shutil.rmtree(folder)
    assert len(counts) > 1  # some of it was lost


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_30_exit_in_write_behind(sampled, seconds):
    program = sampled.start(wrap=lambda pages: SlowDisk(pages, seconds))
    (*_, done) = sampled.chat.send(PROMPTS[0])
    begun = time.monotonic()
    program.engine.close()
    assert time.monotonic() - begun < 2.5
    assert isinstance(done, Done)
    assert program.core.saver.store.asked >= 1
    sampled.play(4)


def test_30_engine_crash_in_write_behind(sampled, monkeypatch):
    monkeypatch.setattr(client.subprocess, "Popen", TinyWorker)
    engine = client.ChildEngine({"model": "tiny", "kv_path": str(sampled.kv_db)}, None)
    engine.start()
    sampling = {**SAMPLING, "temperature": 1.0}
    with ChatStore(sampled.chat_db) as store:
        chat = Chats(store, engine, settings={"sampling": sampling}).new()
        say(chat, PROMPTS[0])
        engine._process.kill()  # its pages are still in the queue  # pyright: ignore
        with pytest.raises(EngineLost, match="signal 9"):
            list(chat.send(PROMPTS[1]))
        assert [(turn.prompt, turn.state) for turn in chat.turns()] == [
            (PROMPTS[0], "done"),
            (PROMPTS[1], "interrupted"),
        ]
        engine.start()  # by the front that stayed up
        (*_, done) = chat.again()
        assert done.text == sampled.expected[1]  # pyright: ignore
        engine.close()
    sampled.play(4)
