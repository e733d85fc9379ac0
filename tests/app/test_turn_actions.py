"""What is done to a turn: again, edit, fork, copy. The app with scripted ports."""

from __future__ import annotations

import pytest
from app.fakes import FakeChats
from app.stage import stage


def _two_turns() -> tuple[FakeChats, object]:
    chats = FakeChats()
    chat = chats.add("ada-notes", ("first question", "first answer"), ("second", "second answer"))
    return chats, chat


async def test_reply_again_makes_a_sibling() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        await on.press("ctrl+r")
        on.chats.script.finish(text="another answer")
        await on.until(lambda: "again" in chats.calls)
        await on.idle()
        await on.shows("another answer", "‹ 2/2 ›")
        assert "second answer" not in on.text
        await on.press("alt+up", "left_square_bracket")
        await on.shows("second answer", "‹ 1/2 ›")
        assert "another answer" not in on.text
        await on.press("right_square_bracket")
        await on.shows("another answer", "‹ 2/2 ›")


async def test_again_at_temperature_zero_offers_a_temperature() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        await on.enter("/set temperature 0")
        await on.shows("temperature is 0")
        await on.press("ctrl+r")
        await on.shows("would be the same", "/set temperature 0.7")
        assert "again" not in chats.calls


async def test_edit_the_last_prompt_and_leave_the_edit() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        on.type("draft")
        await on.press("ctrl+e")
        await on.shows("editing turn 2")
        assert on.chat_screen.prompt.text == "second"
        await on.press("escape")
        assert on.chat_screen.prompt.text == "draft"
        await on.press("ctrl+e", "!", "enter")
        on.chats.script.finish(text="edited answer")
        await on.until(lambda: "edit 2 second!" in chats.calls)
        await on.idle()
        await on.shows("second!", "edited answer", "‹ 2/2 ›")
        assert on.chat_screen.prompt.text == "draft"


async def test_edit_an_earlier_turn_drops_what_followed() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        await on.press("alt+up", "alt+up")
        await on.shows("▶ 1 you", "turn 1", "f Fork here")
        await on.press("e", "?", "enter")
        on.chats.script.finish(text="new start")
        await on.until(lambda: "edit 1 first question?" in chats.calls)
        await on.idle()
        await on.shows("first question?", "new start")
        assert "second answer" not in on.text


async def test_again_on_an_earlier_turn_asks_its_prompt_anew() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        await on.press("alt+up", "alt+up", "r")
        on.chats.script.finish(text="redone")
        await on.until(lambda: "edit 1 first question" in chats.calls)
        await on.idle()
        await on.shows("redone")
        assert "second answer" not in on.text


@pytest.mark.parametrize(
    ("keys", "call", "shared"),
    [
        (["ctrl+f"], "fork 2 i", 2),
        (["alt+up", "alt+up", "f"], "fork 1 i", 1),
        ([], "fork 1 ideas", 1),
    ],
    ids=["key", "on a turn", "slash"],
)
async def test_fork_leaves_its_origin_alone(keys: list[str], call: str, shared: int) -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        if keys:
            await on.press(*keys)
            await on.shows(f"Name of the fork after turn {shared}", "a name is made")
            await on.press("i", "enter")
        else:
            await on.enter("/fork 1 ideas")
        await on.until(lambda: call in chats.calls)
        await on.shows(f"A fork that shares {'turns 1-2' if shared == 2 else 'turn 1'}.")
        await on.enter("only here")
        on.chats.script.finish(text="forked answer")
        await on.until(lambda: "send only here" in chats.calls)
        await on.idle()
        await on.shows("forked answer")
        assert [turn.prompt for turn in chats.path("chat0000")] == ["first question", "second"]


async def test_copy_takes_the_source_of_the_reply() -> None:
    chats = FakeChats()
    code = "Here:\n\n```python\nx  = 1\n```\n\n```\ny\n```\n"
    async with stage(chats, chats.add("a", ("q", code))) as on:
        await on.enter("/copy")
        assert on.app.clipboard == code
        await on.enter("/copy code 2")
        assert on.app.clipboard == "y\n"
        await on.press("alt+up", "C")
        assert on.app.clipboard == "x  = 1\n"
        await on.press("C")
        assert on.app.clipboard == "y\n"
        await on.press("c")
        assert on.app.clipboard == code
