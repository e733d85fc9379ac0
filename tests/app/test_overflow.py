"""`--on-overflow ask` and `stop`: nothing is sent that makes the model forget before one has seen
what."""

from __future__ import annotations

from dataclasses import replace

from app.fakes import FakeChat, FakeChats
from app.stage import stage

from chatkv.errors import ContextFull
from chatkv.events import ForgetEvent, ForgetPlanned, Summarizing

PLAN = ForgetPlanned("turns", "limit", (1, 2), (), 612, 3600, 2988, 4096, 0, 0)
SAID = "turns 1-2 would leave the model's context (612 tokens;"


def told(policy: str) -> tuple[FakeChats, FakeChat]:
    chats = FakeChats(auto="fine")
    chat = chats.add("ada-notes", ("first", "one"), ("second", "two"), ("third", "three"))
    chat.policy = policy
    return chats, chat


async def test_ask_shows_the_plan_and_sends_on_yes() -> None:
    chats, chat = told("ask")
    chats.plans = (PLAN,)
    async with stage(chats, chat) as on:
        await on.enter("more")
        await on.shows("Send it, and let the model forget?", SAID, "/forget turns of your own")
        assert "send more" not in chats.calls
        await on.press("y")
        await on.until(lambda: "send more" in chats.calls)
        await on.idle()


async def test_a_summary_is_asked_for_and_shown_while_it_is_written() -> None:
    chats, chat = told("summarize")
    chats.auto = None
    chats.plans = (replace(PLAN, policy="summarize"),)
    async with stage(chats, chat) as on:
        await on.enter("more")
        await on.shows("let the model write a summary of what it forgets?", SAID)
        await on.press("y")
        await on.until(lambda: on.chat_screen.live is not None)
        chats.script.event(Summarizing((1, 2), 17, 150))
        await on.shows("summing up 1-2 · 17 tok")
        gone = {"policy": "summarize", "reason": "limit", "turns": (1, 2), "partly": ()}
        sizes = {"num_tokens": 612, "live_before": 3600, "live_after": 3080, "limit": 4096}
        chats.script.event(ForgetEvent(**gone, **sizes, op={"turns": [1, 2]}))
        chats.script.say("some ", "words")
        await on.shows("some words", "turns 1-2 left the model's context (612 tokens)")
        chats.script.finish(text="some words")
        await on.idle()
        assert [card.number for card in on.chat_screen.transcript.cards] == [1, 2, 3, 4]
        assert on.chat_screen.turns[-1].reply == "some words"


async def test_ask_gives_the_text_back_on_esc() -> None:
    chats, chat = told("ask")
    chats.plans = (PLAN,)
    async with stage(chats, chat) as on:
        await on.enter("more")
        await on.shows("Send it, and let the model forget?")
        await on.press("escape")
        await on.until(lambda: on.chat_screen.prompt.text == "more")
        assert "send more" not in chats.calls
        assert not on.chat_screen.busy


async def test_what_fits_is_sent_without_a_question() -> None:
    chats, chat = told("ask")
    async with stage(chats, chat) as on:
        await on.enter("more")
        await on.until(lambda: "send more" in chats.calls)
        await on.idle()
        assert "plan more" in chats.calls


async def test_stop_sends_nothing_and_keeps_the_text() -> None:
    chats, chat = told("stop")
    chats.plans = (PLAN,)
    async with stage(chats, chat) as on:
        await on.enter("more")
        await on.shows("Not sent: turns 1-2 would leave", "/forget turns of your own choice")
        assert on.chat_screen.prompt.text == "more"
        assert "send more" not in chats.calls


async def test_what_can_never_fit_is_told_and_comes_back() -> None:
    chats, chat = told("ask")
    async with stage(chats, chat) as on:
        chats.error = ContextFull(used=100, needed=5000, limit=4096)
        await on.enter("much too long")
        await on.shows("this turn needs 5000 more", "4096 tokens")
        assert on.chat_screen.prompt.text == "much too long"
