"""What is out of the model's sight is seen, priced and brought back on the screen."""

from __future__ import annotations

from app.fake_engine import FakeEngine
from app.fakes import FakeChat, FakeChats
from app.stage import Stage, stage

from chatkv.errors import ContextFull, UsageError
from chatkv.events import ForgetEvent, ForgetPlanned, RecallEvent

PLAN = ForgetPlanned("turns", "limit", (1, 2, 3), (), 612, 3600, 2988, 4096, 0, 0)
EVENT = ForgetEvent("turns", "limit", (1, 2), (), 400, 3600, 3200, 4096, {"turns": [1, 2]})


def told(turns: int = 4, *, gone: tuple[int, ...] = ()) -> tuple[FakeChats, FakeChat]:
    chats = FakeChats()
    chat = chats.add("ada-notes", *((f"prompt {n}", f"answer {n}") for n in range(1, turns + 1)))
    for number in gone:
        chats.path(chat.id)[number - 1].why = "turns"
    return chats, chat


def gone(on: Stage) -> list[bool]:
    """Which of the mounted turns are dim."""
    cards = on.chat_screen.transcript.cards
    heads = [on.chat_screen.transcript.head(index) for index in range(len(cards))]
    return [head is not None and head.has_class("-gone") for head in heads]


async def test_a_banner_and_marks_while_turns_are_out_of_sight() -> None:
    chats, chat = told(gone=(1, 2))
    async with stage(chats, chat, size=(80, 40)) as on:
        await on.shows("FORGOTTEN turns 1-2 · 400 tok · the model cannot see them")
        await on.shows("F6 why, bring back", "not in context", "░ 1 you", "prompt 1", "answer 1")
        assert gone(on) == [True, True, False, False]
        await on.snapshot("forgotten")


async def test_the_moment_is_shown_when_it_comes_and_stays() -> None:
    chats, chat = told()
    async with stage(chats, chat, size=(80, 40)) as on:
        assert not on.chat_screen.banner.display
        await on.enter("more")
        await on.until(lambda: on.chat_screen.live is not None)
        chats.script.event(EVENT)
        await on.until(lambda: gone(on)[:4] == [True, True, False, False])
        chats.script.say("some words")
        rule = "2 oldest turns left the model's context (400 tokens). Still in history."
        await on.shows(rule, "some words")
        chats.script.finish()
        await on.idle()
        await on.shows(rule, "FORGOTTEN turns 1-2")
        assert gone(on) == [True, True, False, False, False]


async def test_what_comes_back_is_said_too() -> None:
    chats, chat = told(gone=(1,))
    async with stage(chats, chat, size=(80, 40)) as on:
        await on.enter("more")
        await on.until(lambda: on.chat_screen.live is not None)
        chats.script.event(RecallEvent((1,), 200, 600, 800, 4096))
        await on.until(lambda: not gone(on)[0])
        chats.script.finish(text="done")
        await on.idle()


async def test_the_status_line_warns_from_85_percent_on() -> None:
    chats, chat = told()
    chats.limit, chats.plans = 960, (PLAN,)
    async with stage(chats, chat) as on:
        await on.shows("next turn will forget 3 turns (612 tokens): /pin, /context")
        assert on.chat_screen.status.level == "warning"
        await on.snapshot("warned")
    chats, chat = told()
    chats.limit, chats.plans = 4096, (PLAN,)
    async with stage(chats, chat) as on:
        assert "will forget" not in on.text


async def test_a_turn_that_will_not_fit_is_foretold() -> None:
    chats, chat = told()
    chats.warning = "The next turn will not fit. It needs more."
    async with stage(chats, chat) as on:
        await on.shows("the next turn will not fit: /forget, /context")


async def test_forget_waits_for_the_next_turn_and_is_taken_back() -> None:
    chats, chat = told()
    async with stage(chats, chat) as on:
        await on.enter("/forget 1-2")
        await on.shows("From the next turn on the model does not see turns 1-2.")
        await on.shows("next turn forgets 1-2: /context")
        await on.enter("/forget --before 3")
        await on.until(lambda: chats.calls.count("forget [1, 2]") == 2)
        await on.enter("/recall 1")
        await on.shows("Bring back turn 1?", "read from disk")
        await on.press("y")
        await on.shows("From the next turn on the model sees turn 1 again.")


async def test_recall_shows_its_price_before() -> None:
    chats, chat = told(gone=(1, 2))
    async with stage(chats, chat) as on:
        await on.enter("/recall --all")
        await on.shows("Bring back turns 1-2?", "on 641 tokens: 400 tokens computed (about")
        await on.shows("0.3 s) · 200 read from disk · 41 in memory.")
        assert "price [] [1, 2]" in chats.calls
        await on.press("escape")
        assert "recall [1, 2]" not in chats.calls


async def test_f6_toggles_prices_and_applies() -> None:
    chats, chat = told(6, gone=(1, 2))
    async with stage(chats, chat) as on:
        await on.press("f6")
        await on.shows("What the model sees", "window full", "[ ]", "[x]", "newest")
        await on.shows("After this: 241/4,096. The next turn: 0 tokens computed · 200 read from")
        await on.press("space", "down", "down", "space")
        await on.shows("comes back", "goes", "200 tokens computed (about 0.2 s)")
        assert "price [3] [1]" in chats.calls
        await on.press("enter")
        await on.until(lambda: "recall [1]" in chats.calls)
        assert "forget [3]" in chats.calls
        await on.shows("next turn forgets 3, brings back 1: /context")


async def test_f6_pins_at_once_and_esc_changes_nothing_else() -> None:
    chats, chat = told(3)
    async with stage(chats, chat, size=(80, 40)) as on:
        await on.press("f6")
        await on.shows("What the model sees")
        await on.press("up", "p")
        await on.shows("★   2")
        await on.press("space", "escape")
        await on.shows("★ pinned")
        assert "pin [2] True" in chats.calls
        assert not any(call.startswith("forget") for call in chats.calls)


async def test_f6_tells_what_cannot_be_and_all_comes_back() -> None:
    chats, chat = told(4, gone=(1, 2))
    chats.path(chat.id)[2].redacted = True
    async with stage(chats, chat) as on:
        await on.press("f6")
        await on.shows("redacted")
        await on.press("down", "down", "space")
        await on.shows("A redacted turn never comes back.")
        chats.error = ContextFull(used=4000, needed=513, limit=4096)
        await on.press("a")
        await on.shows("this turn needs 513 more")
        await on.press("enter")
        await on.until(lambda: "recall [1, 2]" in chats.calls)


async def test_while_the_engine_works_the_price_waits() -> None:
    chats, chat = told(2, gone=(1,))
    async with stage(chats, chat, engine=FakeEngine(ready=False)) as on:
        await on.press("f6")
        await on.shows("The price is shown when the engine is free.")


async def test_pin_by_command_and_key_warns_when_it_is_too_much() -> None:
    chats, chat = told()
    async with stage(chats, chat) as on:
        await on.enter("/pin 1-3")
        await on.shows("Pins hold 3000 of 4096 tokens.")
        await on.enter("/unpin 1")
        await on.shows("No longer pinned: 1.")
        await on.press("alt+up", "p")
        await on.until(lambda: "pin [4] True" in chats.calls)
        await on.press("x")
        await on.until(lambda: "forget [4]" in chats.calls)


async def test_an_error_is_told_and_the_words_stay() -> None:
    chats, chat = told()
    async with stage(chats, chat) as on:
        await on.enter("/forget 9")
        await on.shows("There is no turn 9.")
        assert on.chat_screen.prompt.text == "/forget 9"
        on.chat_screen.prompt.clear()
        chats.error = UsageError("Turn 1 is forgotten already.", hint="See /context.")
        await on.enter("/forget 1")
        await on.shows("Turn 1 is forgotten already.")
