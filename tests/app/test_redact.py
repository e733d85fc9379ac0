"""/redact in the chat: asked about, done, shown."""

from __future__ import annotations

from app.fakes import FakeChat, FakeChats
from app.stage import stage

from chatkv.errors import StoreError


def _told() -> tuple[FakeChats, FakeChat]:
    chats = FakeChats()
    chat = chats.add("ada-notes", ("first", "one"), ("my secret", "two"), ("third", "three"))
    chats.add("ada-notes", fork="side", forked_from=chat.id)
    return chats, chat


async def test_a_turn_is_redacted_after_a_question_that_names_the_forks() -> None:
    chats, chat = _told()
    async with stage(chats, chat) as on:
        await on.enter("/redact 2")
        await on.shows("Redact turn 2? Nothing brings them back.", "Shared with ada-notes:side")
        await on.press("y")
        await on.shows(
            "Redacted: 2 (200 tokens).",
            "3 stored pages deleted.",
            "░ 2 you",
            "redacted",
            "my secret",
        )
        assert "redact [2] False" in chats.calls
        second, third = (on.chat_screen.transcript.head(index) for index in (1, 2))
        assert second is not None
        assert second.has_class("-gone")
        assert third is not None
        assert not third.has_class("-gone")


async def test_esc_changes_nothing() -> None:
    chats, chat = _told()
    async with stage(chats, chat) as on:
        await on.enter("/redact 1-2 --purge")
        await on.shows("Redact and purge turns 1-2?", "Their text goes too")
        await on.press("escape")
        await on.hides("Nothing brings")
        assert not any(call.startswith("redact") for call in chats.calls)


async def test_a_purged_turn_says_so_and_an_error_is_told() -> None:
    chats, chat = _told()
    async with stage(chats, chat) as on:
        chats.error = None
        await on.enter("/redact 2 --purge")
        await on.shows("Redact and purge")
        chats.error = StoreError("Redacted, but stored pages are still there: busy.")
        await on.press("y")
        await on.shows("stored pages are still there")
        await on.enter("/redact 2 --purge")
        await on.shows("Redact and purge")
        await on.press("y")
        await on.shows("(the text was purged)")
        await on.hides("my secret")


async def test_turns_that_are_not_there_are_named() -> None:
    chats, chat = _told()
    async with stage(chats, chat) as on:
        await on.enter("/redact 7")
        await on.shows("There is no turn 7.", "This chat has 3 turns")
        assert on.chat_screen.prompt.text == "/redact 7"
