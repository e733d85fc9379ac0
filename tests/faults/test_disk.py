"""Rows 4 to 9: disks that are full or read-only, files that others hold."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from app.stage import stage
from conversation import Conversation
from forked import NOBODY, Child
from program import PROMPTS, say
from victims import hold, look_and_ask, play_without_saving

from chatkv.errors import StoreBusy, StoreError
from sessions.database import BUSY_TIMEOUT_MS


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows past that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of that size; skips where none may be mounted."""
    folder.mkdir(mode=0o700)
    options = f"size={num_bytes},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
    )
    if done.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_04_disk_full_on_kv_db(told):
    """The file may not grow: pages of turns long ago make room for new ones."""
    told.play(2)
    told.running.flush()
    writer = told.running.pages._disk._file.writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages}")
    ends = told.play(4)
    told.running.flush()
    assert told.running.pages.saving
    assert told.running.pages.stats().evicted_pages > 0
    assert told.notices(ends) == []
    told.start()
    say(told.chat, "on")


def test_04_no_room_even_after_evicting(told):
    told.start()
    told.play(1)
    told.running.flush()
    limit = 3 * 65536
    assert told.chat_db.stat().st_size < limit - 65536
    with files_of_at_most(limit):
        ends = told.play(4)
        told.running.flush()
        last = say(told.chat, "on")
    assert not told.running.pages.saving
    (notice,) = told.notices([*ends, last])
    assert notice.count("Pages are not saved any more") == 1
    assert str(told.kv_db) in notice
    told.start()
    say(told.chat, "on")
    assert told.running.pages.saving


def test_04_a_file_system_that_is_full(sampled, tmp_path):
    with small_disk(tmp_path / "small", 8 << 20):
        small = Conversation(tmp_path / "small", 1.0)
        small.expected = sampled.expected
        filler = small.folder / "filler"
        try:
            small.play(1)
            small.running.flush()
            filler.write_bytes(bytes(max(0, shutil.disk_usage(small.folder).free - 150_000)))
            with suppress(StoreError):  # there may be no room for the prompt either
                assert len(small.notices(small.play(4))) <= 1
            filler.unlink()
            assert small.play(4)
            small.start()
            assert small.running.store.check() == []
            say(small.chat, "on")
        finally:
            small.close()


def test_05_disk_full_on_chat_db(told):
    told.play(1)
    chat, engine = told.chat, told.running.engine
    real = engine.generate
    engine.generate = None  # is not asked
    limit = told.chat_db.stat().st_size + 8192
    with files_of_at_most(limit), pytest.raises(StoreError, match=r"Cannot save to .*full") as full:
        list(chat.send("x" * 50_000))
    assert "--ephemeral" in full.value.hint
    assert len(chat.turns()) == 1
    engine.generate = real
    told.play(4)
    assert told.running.store.check() == []


async def test_05_the_text_stays_in_the_editor(sampled):
    sampled.play(1)
    program = sampled.running
    async with stage(program.chats, sampled.chat, engine=program.engine) as screen:
        text = "this is not lost " * 20
        with files_of_at_most(8192):
            await screen.enter(text)
            await screen.shows("Cannot save to")
            await screen.idle()
        assert screen.chat_screen.prompt.text == text
        assert len(sampled.chat.turns()) == 1
        await screen.press("ctrl+c")
        await screen.enter(PROMPTS[1])
        await screen.until(lambda: len(sampled.chat.turns()) == 2)
        await screen.idle()
    sampled.play(4)


def given(folder: Path, user: int) -> None:
    """Hand a folder over; who is not root keeps what is its own."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user)


def test_06_read_only_folder(sampled, tmp_path):
    sampled.play(2)
    sampled.stop()
    tmp_path.chmod(0o711)
    given(sampled.folder, NOBODY)
    for file, folder in ((0o400, 0o500), (0o600, 0o500), (0o400, 0o700)):
        sampled.chat_db.chmod(file)
        sampled.folder.chmod(folder)
        child = Child(look_and_ask, sampled.folder, user=NOBODY)
        texts, asked = map(json.loads, child.run())
        sampled.folder.chmod(0o700)
        assert texts == [PROMPTS[0], sampled.expected[0], PROMPTS[1], sampled.expected[1]]
        code, message, hint = asked
        assert code == 6
        assert message == f"{sampled.chat_db} can only be read."
        assert "--ephemeral" in hint
    sampled.chat_db.chmod(0o600)
    given(sampled.folder, os.geteuid())
    sampled.play(4)


def test_07_kv_db_read_only(told, tmp_path):
    told.play(2)
    told.stop()
    before = told.kv_db.read_bytes()
    told.kv_db.chmod(0o400)
    tmp_path.chmod(0o711)
    given(told.folder, NOBODY)
    child = Child(play_without_saving, told.folder, told.temperature, told.expected, user=NOBODY)
    restored, notices = map(json.loads, child.run())
    given(told.folder, os.geteuid())
    told.kv_db.chmod(0o600)
    assert restored > 0
    assert notices == [
        f"{told.kv_db} can only be read: stored pages are used, new ones are not saved."
    ]
    assert told.kv_db.read_bytes() == before
    told.play(4)


@pytest.mark.parametrize("name", ["chat.db", "kv.db"])
def test_08_another_process_holds_the_lock(sampled, name, monkeypatch):
    assert BUSY_TIMEOUT_MS == 5000
    monkeypatch.setattr("sessions.database.BUSY_TIMEOUT_MS", 150)
    sampled.play(2)
    child = Child(hold, sampled.folder / name)
    child.wait_for("held")
    if name == "chat.db":
        with pytest.raises(StoreBusy) as busy:
            list(sampled.chat.send(PROMPTS[2]))
        assert f"{sampled.chat_db} is busy (process {child.pid}, since " in busy.value.message
        assert len(sampled.chat.turns()) == 2
        child.kill()
    else:
        written = sampled.running.pages.stats().written_pages
        sampled.play(3)  # goes on, and saves nothing meanwhile
        assert sampled.running.pages.stats().written_pages == written
        child.kill()
        sampled.running.flush()
    ends = sampled.play(4)
    assert sampled.notices(ends) == []
    if name == "kv.db":  # it was no reason to stop
        sampled.running.flush()
        assert sampled.running.pages.stats().written_pages > written


def test_09_two_processes_one_session(told):
    """Two fronts that both show the second turn; each sends its own third."""
    told.play(2)
    other = Conversation(told.folder, told.temperature)
    other.expected = told.expected
    assert len(other.chat.turns()) == 2
    told.play(3)
    done = say(other.chat, PROMPTS[2])
    assert "yours continues as a fork" in done.notice
    assert other.chat.id != told.chat.id
    assert other.chat.fork_name != "main"
    say(other.chat, "on a branch of its own")
    assert done.text == told.expected[2]
    told.play(4)
    assert len(told.chat.turns()) == 4
    assert told.running.store.check() == []
    other.close()
