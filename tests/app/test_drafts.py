"""What is typed and not sent outlives the screen: by chat, for its owner, until it is sent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from app.fakes import FakeChats
from app.stage import stage

from tui.drafts import Drafts


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "drafts"


def test_a_draft_is_a_private_file_until_it_is_empty(folder):
    drafts = Drafts(folder)
    drafts.save("chat", "")
    assert not folder.exists()
    drafts.save("chat", "half a thought\n  über 日本 \ud83d")
    (path,) = folder.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == ("chat", 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Drafts(folder).load("chat") == "half a thought\n  über 日本 ?"
    assert Drafts(folder).load("other") == ""
    drafts.save("chat", "")
    assert list(folder.iterdir()) == []


def test_two_terminals_write_what_was_changed_there_only(folder):
    one, two = Drafts(folder), Drafts(folder)
    one.save("chat", "from one")
    assert two.load("chat") == "from one"
    one.save("chat", "")  # it was sent there
    two.save("chat", "from one")  # and is left untouched here
    assert Drafts(folder).load("chat") == ""
    two.save("chat", "from two")
    one.save("chat", "")
    assert Drafts(folder).load("chat") == "from two"
    one.save("chat", "later")
    two.save("chat", "")  # not what two knows of
    assert Drafts(folder).load("chat") == "later"


def test_the_draft_of_a_new_chat_is_taken_over_once_its_process_has_ended(folder):
    code = "import sys; from tui.drafts import Drafts; from pathlib import Path; "
    code += "Drafts(Path(sys.argv[1])).save('', 'never sent')"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    (path,) = folder.iterdir()
    alive = folder / f"new.{os.getppid()}"
    alive.write_text("typed in another terminal")
    drafts = Drafts(folder)
    assert drafts.load("") == "never sent"
    assert not path.exists()
    drafts.keep("", "chat7", "goes on")  # its first message has given it an id
    assert sorted(each.name for each in folder.iterdir()) == ["chat7", alive.name]
    assert Drafts(folder).load("") == ""


def test_drafts_of_chats_that_are_gone_are_swept(folder):
    drafts = Drafts(folder)
    for name in ("here", "gone", ""):
        drafts.save(name, "text")
    writing = f".{os.getppid()}.tmp"
    for name in (writing, f".{2**22 + 1}.tmp"):
        (folder / name).write_text("half")
    drafts.sweep(lambda chat_id: chat_id == "here")
    left = [writing, "here", f"new.{os.getpid()}"]
    assert sorted(path.name for path in folder.iterdir()) == left


def test_a_folder_that_cannot_be_written_costs_the_draft_alone(tmp_path):
    (tmp_path / "file").write_text("")
    drafts = Drafts(tmp_path / "file" / "drafts")
    drafts.save("chat", "text")
    assert drafts.load("chat") == ""


async def test_a_draft_comes_back_when_the_chat_is_opened_again(folder):
    chats = FakeChats(auto="answer")
    chat = chats.add("notes", ("hi", "hello"))
    async with stage(chats, chat, drafts=Drafts(folder)) as on:
        on.type("and one more")
        await on.until(lambda: Drafts(folder).load(chat.id) == "and one more")
        on.type(" thing")
        on.app.leave(0)
    async with stage(chats, chats.open("notes"), drafts=Drafts(folder)) as on:
        assert on.chat_screen.prompt.text == "and one more thing"
        await on.press("enter")
        await on.idle()
        await on.until(lambda: list(folder.iterdir()) == [])
        on.app.leave(0)
    async with stage(chats, chats.open("notes"), drafts=Drafts(folder)) as on:
        assert on.chat_screen.prompt.text == ""


async def test_the_first_message_of_a_chat_takes_its_draft_along(folder):
    chats = FakeChats()
    async with stage(chats, drafts=Drafts(folder)) as on:
        on.type("first")
        await on.until(lambda: Drafts(folder).load("") == "first")
        await on.press("enter")
        await on.until(lambda: "send first" in on.chats.calls)
        on.type("second")
        on.chats.script.finish(text="answer")
        await on.idle()
        (chat_id,) = chats.rows
        await on.until(lambda: [path.name for path in folder.iterdir()] == [chat_id])
        assert Drafts(folder).load(chat_id) == "second"


async def test_a_message_that_waits_is_a_draft_and_the_edit_of_a_turn_is_none(folder):
    chats = FakeChats()
    chat = chats.add("notes", ("hi", "hello"))
    async with stage(chats, chat, drafts=Drafts(folder)) as on:
        on.type("mine")
        await on.press("ctrl+e")
        await on.until(lambda: on.chat_screen.prompt.text == "hi")
        on.type(" there")
        await on.until(lambda: Drafts(folder).load(chat.id) == "mine")
        await on.pilot.pause(0.5)
        assert Drafts(folder).load(chat.id) == "mine"
        await on.press("escape")
        on.chat_screen.again(on.chat_screen.turns[-1])
        await on.until(lambda: "again 1" in " ".join(on.chats.calls) or on.chat_screen.busy)
        await on.press("enter")
        await on.shows("queued 1: mine")
        on.type("and then")
        await on.until(lambda: Drafts(folder).load(chat.id) == "mine\nand then")
        on.chats.script.finish(text="other")
        await on.until(lambda: "send mine" in on.chats.calls)
        await on.until(lambda: Drafts(folder).load(chat.id) == "and then")
        on.chats.script.finish(text="answer")
        await on.idle()


async def test_nothing_is_written_where_no_folder_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with stage() as on:
        on.type("secret")
        await on.pilot.pause(0.5)
        on.app.leave(0)
    assert list(tmp_path.iterdir()) == []
