"""The view holds still while one reads, follows while one does not, and mounts a bounded window."""

from __future__ import annotations

import re

from app.fakes import FakeChats
from app.stage import Stage, stage

from tui.widgets.window import MAX_TURNS, MAX_WEIGHT

REPLY = "Some **words** about it:\n\n- one\n- two\n\n```python\nx = {n}\n```\n\nreply {n} ends."


def _long_chat(turns: int) -> tuple[FakeChats, object]:
    chats = FakeChats()
    texts = [(f"prompt {n}", REPLY.replace("{n}", str(n))) for n in range(1, turns + 1)]
    return chats, chats.add("long", *texts)


def _bounded(on: Stage) -> None:
    """The widgets really mounted stay within the bounds."""
    transcript = on.chat_screen.transcript
    window = transcript.window
    turns = {turn for turn, _ in window.parts[window.start : window.stop]}
    assert len(turns) <= MAX_TURNS
    assert len(list(transcript.walk_children())) <= MAX_WEIGHT + 10
    assert len(transcript._mounted) == window.stop - window.start


async def test_opens_at_the_end_with_few_turns_and_pages_to_the_start() -> None:
    chats, chat = _long_chat(10)
    async with stage(chats, chat) as on:
        await on.shows("reply 10 ends.", "10 you")
        transcript = on.chat_screen.transcript
        await on.calm()
        assert 0 < 10 - transcript.window.turns_above <= MAX_TURNS
        _bounded(on)
        seen = 10
        for _ in range(60):
            top = [int(n) for n in re.findall(r"reply (\d+) ends", on.text)]
            if top:
                assert min(top) >= seen - 3  # no turn is jumped over
                seen = min(top)
            if seen == 1 and transcript.scroll_y == 0:
                break
            transcript.page(-1)
            await on.pilot.pause()
            await on.until(lambda: transcript.scroll_y > 0 or transcript.window.start == 0)
            _bounded(on)
        assert seen == 1
        await on.shows("1 you", "prompt 1")
        await on.press("end")
        await on.shows("reply 10 ends.")
        _bounded(on)


async def test_home_and_end_swap_the_window() -> None:
    chats, chat = _long_chat(300)
    async with stage(chats, chat) as on:
        await on.shows("reply 300 ends.")
        await on.press("home")
        await on.shows("1 you", "prompt 1")
        await on.calm()
        await on.shows("1 you")
        _bounded(on)
        await on.press("end")
        await on.shows("reply 300 ends.")
        assert on.chat_screen.transcript.following


async def test_the_line_under_the_eye_stays_while_turns_are_mounted_above() -> None:
    chats, chat = _long_chat(40)
    async with stage(chats, chat) as on:
        await on.calm()
        transcript = on.chat_screen.transcript
        start, end = transcript.window.start, transcript.scroll_y
        transcript.scroll_lines(-40)
        await on.until(lambda: transcript.scroll_y < end)
        await on.pilot.pause()
        before = [line[:79].rstrip() for line in on.lines[1:18]]
        await on.until(lambda: transcript.window.start < start)
        await on.calm()
        assert [line[:79].rstrip() for line in on.lines[1:18]] == before


async def test_scrolling_up_in_a_stream_holds_still_and_counts() -> None:
    chats, chat = _long_chat(6)
    async with stage(chats, chat) as on:
        await on.calm()
        await on.enter("more")
        on.chats.script.say("start of the stream\n\n")
        await on.shows("start of the stream")
        await on.press("pageup")
        await on.calm()
        before = [line[:79].rstrip() for line in on.lines[1:17]]
        on.chats.script.say(*[f"streamed {n}\n\n" for n in range(30)])
        await on.until(lambda: on.chat_screen.transcript.missed >= 60)
        assert [line[:79].rstrip() for line in on.lines[1:17]] == before
        await on.shows("new lines · End follows")
        await on.press("end")
        await on.shows("streamed 29")
        await on.hides("new lines")
        on.chats.script.say("and the last")
        await on.shows("and the last")
        on.chats.script.finish()
        await on.idle()


async def test_scrolling_to_the_end_follows_again() -> None:
    chats, chat = _long_chat(6)
    async with stage(chats, chat) as on:
        await on.calm()
        transcript = on.chat_screen.transcript
        await on.press("shift+up", "shift+up")
        assert not transcript.following
        await on.press("shift+down", "shift+down")
        await on.until(lambda: transcript.following)


async def test_resize_in_a_stream_keeps_the_end_in_sight() -> None:
    async with stage() as on:
        await on.enter("go")
        on.chats.script.say(*[f"word{n} " * 30 + "\n\n" for n in range(8)])
        await on.shows("word7")
        await on.pilot.resize_terminal(50, 16)
        on.chats.script.say("after the resize")
        await on.shows("after the resize")
        await on.pilot.resize_terminal(100, 30)
        on.chats.script.say(" and again")
        await on.shows("after the resize and again", "word7")
        on.chats.script.finish()
        await on.idle()
        assert all(len(line) <= 100 for line in on.lines)


async def test_a_very_long_reply_streams_in_parts_within_the_bound() -> None:
    async with stage() as on:
        await on.enter("list everything")
        script = on.chats.script
        for chunk in range(0, 150, 50):
            script.say(*[f"- item {n}\n" for n in range(chunk, chunk + 50)])
            await on.shows(f"item {chunk + 49}")
            await on.pilot.pause(0.05)
            _bounded(on)
        assert len(on.chat_screen.transcript.cards[-1].reply) > 3
        script.finish()
        await on.idle()
        text = "".join(f"- item {n}\n" for n in range(150))
        assert on.chat_screen.turns[-1].reply == text
        assert on.chat_screen.transcript.cards[-1].text == text
        await on.press("home")
        await on.shows("1 you", "item 0")
        _bounded(on)


async def test_a_new_turn_past_the_bound_pushes_the_first_one_out() -> None:
    chats = FakeChats()
    chat = chats.add("short", *[(f"prompt {n}", f"reply {n}") for n in range(MAX_TURNS)])
    async with stage(chats, chat) as on:
        transcript = on.chat_screen.transcript
        while transcript.window.start > 0:
            transcript.page(-1)
            await on.pilot.pause(0.05)
        await on.press("end")
        await on.calm()
        assert transcript.window.stop - transcript.window.start == 2 * MAX_TURNS
        await on.enter("one more")
        on.chats.script.finish(text="answer")
        await on.idle()
        await on.until(lambda: transcript.window.start > 0)
        await on.calm()
        _bounded(on)
        await on.shows("13 you", "answer")


async def test_a_reply_that_starts_while_one_reads_far_above_is_followed() -> None:
    chats, chat = _long_chat(40)
    async with stage(chats, chat) as on:
        await on.press("home")
        await on.shows("prompt 1")
        await on.enter("new question")
        on.chats.script.say("new answer")
        await on.shows("41 you", "new question", "new answer")
        _bounded(on)
        on.chats.script.finish()
        await on.idle()


async def test_cursor_moves_over_turns_that_are_not_mounted() -> None:
    chats, chat = _long_chat(30)
    async with stage(chats, chat, size=(80, 16)) as on:
        for _ in range(7):
            await on.press("alt+up")
        await on.shows("▶ 24 you", "turn 24")
        await on.press("escape")
        await on.hides("▶")
        await on.press("alt+up", "alt+down")
        assert on.chat_screen.prompt.has_focus


async def test_streamed_markdown_looks_like_markdown_at_once() -> None:
    text = (
        "Intro *words*\nsecond line\n\n1. one\n2. two\n   - nested\n   - more\n3. three\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n> quote\n\n"
        "~~~js\nlet a = 1\n~~~\n\n# Head\n\nlast & <b>raw</b> [l](http://x.test)"
    )
    chats = FakeChats()
    async with stage(chats, chats.add("a", ("q", text)), size=(80, 50)) as on:
        await on.shows("last & <b>raw</b> l")
        whole = on.lines[2:40]
    async with stage(size=(80, 50)) as on:
        await on.enter("q")
        for place in range(0, len(text), 7):
            on.chats.script.say(text[place : place + 7])
            if place % 35 == 0:
                await on.pilot.pause(0.06)
        on.chats.script.finish()
        await on.idle()
        await on.shows("last & <b>raw</b> l")
        assert on.lines[2:40] == whole
