"""What a user does in a chat, key by key, on scripted ports."""

from __future__ import annotations

import pytest
from app.fake_engine import FakeEngine
from app.fakes import FakeChats
from app.stage import Stage, stage
from textual import events
from textual.keys import _character_to_key

from chatkv.errors import ContextFull, EngineLost, StoreBusy
from chatkv.events import Failed
from tui.app import ChatApp

LONG = "".join(f"line {n}\n\n" for n in range(60))


def _two_turns() -> tuple[FakeChats, object]:
    chats = FakeChats()
    chat = chats.add("ada-notes", ("first question", "first answer"), ("second", "second answer"))
    return chats, chat


async def _sending(on: Stage, text: str) -> None:
    await on.enter(text)
    await on.until(lambda: on.app.reply is not None and on.chat_screen.live is not None)


async def test_send_streams_markdown_and_settles() -> None:
    async with stage() as on:
        on.type("hi")
        await on.press("enter")
        await on.shows("reading 1904/1904 tok", "prefill 100%")
        on.chats.script.say("It is **bold", "** and\n\n", "- one\n", "- two")
        await on.shows("It is bold and", "• one", "• two", "generating · 12 tok")
        on.chats.script.finish()
        await on.idle()
        await on.shows("142 tok · 168 tok/s · 3.4 tok/step", "reused 1848/1904", "computed 56")
        assert on.chats.calls == ["new", "send hi"]
        assert "ctx █████░░░░░ 2046/4096" in on.text


async def test_one_message_queues_while_a_reply_runs() -> None:
    async with stage() as on:
        await _sending(on, "one")
        on.chats.script.say("first")
        await on.enter("two")
        await on.shows("queued 1: two")
        await on.enter("three")
        await on.shows("One message is waiting already")
        assert on.chat_screen.prompt.text == "three"
        on.chats.script.finish()
        await on.until(lambda: "send two" in on.chats.calls)
        on.chats.script.finish(text="second")
        await on.idle()
        assert on.chat_screen.prompt.text == "three"
        await on.hides("queued 1")


async def test_leaving_says_once_that_a_message_waits() -> None:
    async with stage(engine=FakeEngine(ready=False)) as on:
        await on.enter("mind me")
        await on.press("ctrl+q")
        await on.shows("One message is not sent yet.", "Ctrl+Q again leaves; it will be in")
        assert on.app.is_running
        await on.press("ctrl+q")
        await on.until(lambda: on.app.return_code == 0)


async def test_a_model_that_loads_for_long_says_why(monkeypatch) -> None:
    monkeypatch.setattr("tui.screens.layout.SLOW_S", 0.3)
    async with stage(engine=FakeEngine(ready=False)) as on:
        on.engine.move("loading")
        await on.shows("The first start on a")
        on.engine.become_ready()
        await on.hides("The first start on a")


async def test_what_is_refused_comes_back_into_the_box() -> None:
    async with stage() as on:
        await on.enter("/spec tree:99")
        await on.shows("or tree:N with N from")
        assert on.chat_screen.prompt.text == "/spec tree:99"


async def test_keys_from_before_the_box_had_the_focus_reach_it() -> None:
    async with stage() as on:
        on.chat_screen.set_focus(None)
        keys = [events.Key(_character_to_key(char), char) for char in "hi you"]
        for key in [*keys, events.Key("ctrl+j", "\n"), events.Key("x", "x")]:
            on.chat_screen._forward_event(key)
        on.chat_screen.prompt.focus()
        await on.until(lambda: "send hi you" in on.chats.calls)
        await on.until(lambda: on.chat_screen.prompt.text == "x")
        on.chats.script.finish()
        await on.idle()


async def test_stop_keeps_what_came_and_holds_the_queue() -> None:
    async with stage() as on:
        await _sending(on, "one")
        on.chats.script.say("kept words")
        await on.shows("kept words")
        await on.enter("two")
        await on.press("escape")
        await on.idle()
        await on.shows(
            "interrupted after 142 tok", "kept words", "Enter sends it. Esc takes it back."
        )
        assert on.chats.calls[-1] == "cancel"
        await on.press("escape")
        assert on.chat_screen.prompt.text == "two"
        await on.hides("queued 1")
        await on.press("enter")
        await on.until(lambda: "send two" in on.chats.calls)
        await on.press("ctrl+c")
        await on.idle()


async def test_deltas_of_a_stopped_reply_are_dropped_at_once() -> None:
    async with stage() as on:
        await _sending(on, "one")
        on.chats.script.say("shown ")
        await on.shows("shown")
        reply = on.app.reply
        assert reply is not None
        reply.stop()  # as Esc does, but the engine goes on talking
        on.chats.script.say("late ")
        await on.shows("stopping")
        await on.pilot.pause(0.15)
        assert "late" not in on.text
        on.chats.script.finish("cancelled")
        await on.idle()
        await on.shows("shown late")  # what Done says is what was saved


async def test_typing_while_the_model_loads_is_sent_when_it_is_ready() -> None:
    engine = FakeEngine(ready=False)
    async with stage(engine=engine) as on:
        await on.until(lambda: engine.starts == 1)
        engine.move("loading", detail="loading", done=43_000_000, total=86_000_000)
        await on.shows("loading the model", "43/86 MB", "loading 50%")
        await on.enter("early")
        await on.shows("queued 1: early")
        assert "send early" not in on.chats.calls
        engine.become_ready()
        await on.until(lambda: "send early" in on.chats.calls)
        on.chats.script.finish(text="answer")
        await on.idle()
        await on.hides("loading the model")


async def test_first_prompt_is_sent_first() -> None:
    async with stage(FakeChats(auto="hello back"), first_prompt="hello") as on:
        await on.shows("hello back")
        await on.idle()


async def test_an_error_from_send_keeps_the_text() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        chats.error = StoreBusy("chat.db is locked by process 41.", hint="Try again.")
        await on.enter("precious words")
        await on.shows("chat.db is locked by process 41.", "Try again.", "second answer")
        assert on.chat_screen.prompt.text == "precious words"
        await on.press("enter")
        on.chats.script.finish(text="went through")
        await on.idle()
        await on.shows("went through")


async def test_a_reply_that_does_not_fit_gives_the_text_back() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        await _sending(on, "too long")
        on.chats.script.fail(ContextFull(used=4_000, needed=500, limit=4_096))
        await on.shows("holds 4000 tokens", "context is 4096 tokens", "Shorten")
        await on.idle()
        assert on.chat_screen.prompt.text == "too long"
        assert "second answer" in on.text


async def test_a_failed_event_is_told_and_nothing_is_lost() -> None:
    async with stage() as on:
        await _sending(on, "hello")
        on.chats.script.say("some words")
        on.chats.script.event(Failed("out_of_pages", 5, "Need 3 pages.", "Close other chats."))
        on.chats.script.fail(EngineLost("unused"))
        await on.shows("Need 3 pages.", "Close other chats.", "some words", "interrupted")


async def test_engine_lost_in_a_reply_then_restarted() -> None:
    async with stage() as on:
        await _sending(on, "hello")
        on.chats.script.say("partial words")
        await on.shows("partial words")
        on.engine.move("lost", detail="signal 9")
        on.chats.script.fail(EngineLost("The engine process ended (signal 9).", hint="Saved."))
        await on.idle()
        await on.shows("engine lost (signal 9)", "F5", "partial words", "interrupted")
        await on.enter("still there?")
        await on.shows("queued 1: still there?")
        await on.press("f5")
        await on.until(lambda: on.engine.starts == 1)
        on.engine.become_ready()
        await on.until(lambda: "send still there?" in on.chats.calls)
        await on.hides("engine lost")
        on.chats.script.finish(text="yes")
        await on.idle()


async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    engine = FakeEngine(ready=False)
    async with stage(engine=engine) as on:
        engine.failure = ContextFull(used=1, needed=2, limit=3)
        engine.move("lost", detail="exit status 4")
        await on.shows("is 3 tokens.", "F5 tries again")


@pytest.mark.parametrize("undo", ["ctrl+underscore", "ctrl+slash", "ctrl+shift+minus"])
async def test_ctrl_c_clears_then_quits_when_pressed_twice(undo) -> None:
    async with stage() as on:
        on.type("draft")
        await on.press("ctrl+c")
        assert on.chat_screen.prompt.text == ""
        await on.press(undo)
        assert on.chat_screen.prompt.text == "draft"
        await on.press("ctrl+c", undo)
        assert on.chat_screen.prompt.text == "draft"
        await on.press("ctrl+c", "ctrl+c")
        await on.shows("Ctrl+C again quits")
        await on.press("ctrl+c")
        await on.until(lambda: not on.app.is_running or on.app._exit)
        assert on.app.return_code == 0


async def test_ctrl_d_quits_only_an_empty_box() -> None:
    async with stage() as on:
        await on.press("a", "home", "ctrl+d")
        assert on.chat_screen.prompt.text == ""
        assert not on.app._exit
        await on.press("ctrl+d")
        await on.until(lambda: on.app._exit)


async def test_quitting_saves_a_running_reply_first() -> None:
    async with stage() as on:
        await _sending(on, "hello")
        on.chats.script.say("words")
        await on.shows("words")
        await on.press("ctrl+q")
        await on.until(lambda: on.app._exit)
        assert on.chats.calls[-1] == "cancel"
        assert on.chats.turns[1].state == "interrupted"
        assert on.app.return_code == 0


async def test_a_signal_leaves_with_its_own_status() -> None:
    async with stage() as on:
        on.app.leave(143)
        await on.until(lambda: on.app._exit)
        assert on.app.return_code == 143


async def test_an_unknown_command_stays_in_the_box() -> None:
    async with stage() as on:
        await on.enter("/frok 3")
        await on.shows("There is no command /frok.", "Did you mean /fork?")
        assert on.chat_screen.prompt.text == "/frok 3"
        assert on.app.reply is None
        await on.press("ctrl+c")
        await on.enter("//literal")
        await on.until(lambda: "send /literal" in on.chats.calls)
        on.chats.script.finish(text="ok")
        await on.idle()


async def test_slash_commands_that_change_the_chat() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        on.type("/re")
        await on.shows("/rename", "/restart")
        on.type("n")
        await on.press("tab")
        assert on.chat_screen.prompt.text == "/rename "
        on.type("new")
        await on.press("enter")
        await on.shows("new › main")
        await on.enter("/set nonsense 1")
        await on.shows("There is no option 'nonsense'.")
        assert on.chat_screen.prompt.text == "/set nonsense 1"
        on.chat_screen.prompt.clear()
        await on.enter("/spec none")
        await on.shows("Drafting is none")
        await on.enter("/spec")
        await on.shows("Drafting (none): ngram guessed.")
        await on.enter("/stats")
        await on.shows("1,848 tokens (new)", "42, 3.38 tokens a step", "pages total")
        await on.press("escape")
        await on.enter("/set")
        await on.shows("temperature", "0.95")
        await on.press("escape")
        await on.enter("/edit 9")
        await on.shows("There is no turn 9.", "This chat has 2 turns.")


async def test_history_goes_back_and_comes_back_to_the_draft() -> None:
    chats, chat = _two_turns()
    async with stage(chats, chat) as on:
        on.type("new")
        await on.press("up")
        assert on.chat_screen.prompt.text == "second"
        await on.press("up")
        assert on.chat_screen.prompt.text == "first question"
        await on.press("up", "down", "down")
        assert on.chat_screen.prompt.text == "new"


async def test_new_lines_and_a_growing_box() -> None:
    async with stage() as on:
        await on.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert on.chat_screen.prompt.text == "a\nb\nc"
        await on.pilot.pause()
        assert on.chat_screen.prompt.size.height == 3
        on.type("\n" * 12)
        await on.until(lambda: on.chat_screen.prompt.size.height == 8)


async def test_switching_keeps_drafts_and_a_reply_that_runs_elsewhere() -> None:
    chats, chat = _two_turns()
    other = chats.add("other", ("elsewhere", "other answer"))
    async with stage(chats, chat) as on:
        await _sending(on, "long one")
        on.chats.script.say("beginning ")
        await on.shows("beginning")
        on.type("draft")
        await on.press("f2")
        await on.until(lambda: on.app.screen is not on.chat_screen)
        on.app.screen.dismiss(lambda: other)
        await on.shows("other answer", "busy in another chat")
        assert on.chat_screen.prompt.text == ""
        await on.enter("waits")
        await on.shows("queued 1: waits")
        on.chats.script.say("and middle ")
        await on.press("escape")
        on.chat_screen.open(lambda: chats.open("ada-notes"))
        await on.shows("beginning and middle")
        assert on.chat_screen.prompt.text == "draft"
        on.chats.script.finish()
        await on.idle()
        await on.shows("beginning and middle", "142 tok")
        on.chat_screen.open(lambda: chats.open("other"))
        await on.until(lambda: on.chat_screen.prompt.text == "waits")


async def test_a_reply_that_ends_elsewhere_is_told() -> None:
    chats, chat = _two_turns()
    other = chats.add("other", ("elsewhere", "other answer"))
    async with stage(chats, chat) as on:
        await _sending(on, "long one")
        on.chat_screen.open(lambda: other)
        await on.shows("other answer")
        await on.enter("next")
        on.chats.script.finish(text="done")
        await on.shows("The reply in ada-notes is finished.")
        await on.until(lambda: "send next" in chats.calls)
        on.chats.script.finish(text="answered here")
        await on.idle()
        await on.shows("answered here")


async def _boom() -> None:
    chats = FakeChats()
    async with stage(chats) as on:
        chats.error = ZeroDivisionError("a bug")  # type: ignore[assignment]
        await on.enter("boom")
        await on.until(lambda: not on.app.is_running)


async def test_a_bug_in_a_port_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        await _boom()


async def test_notice_of_a_reply_is_shown() -> None:
    async with stage() as on:
        await _sending(on, "hello")
        on.chats.script.finish(text="hi", notice="3 pages could not be saved: the disk is full.")
        await on.idle()
        await on.shows("3 pages could not be saved")


def test_the_app_needs_no_event_loop_to_be_made() -> None:
    app = ChatApp(FakeEngine(), FakeChats())
    assert app.return_code is None


async def test_a_free_engine_is_told_which_chat_is_open() -> None:
    chats, chat = _two_turns()
    other = chats.add("other", ("a question", "an answer"))
    engine = FakeEngine(ready=False)
    async with stage(chats, chat, engine=engine) as on:
        await on.shows("second answer")
        assert not chats.expected
        engine.become_ready()
        await on.until(lambda: chats.expected == [chat.id])
        await _sending(on, "third")
        on.chats.script.finish()
        await on.idle()
        on.chat_screen.open(lambda: other)
        await on.until(lambda: chats.expected == [chat.id, other.id])
        await _sending(on, "another")
        on.chat_screen.open(lambda: chat)
        await on.shows("second answer")
        assert chats.expected == [chat.id, other.id], "it is busy"
        on.chats.script.finish()
        await on.until(lambda: chats.expected == [chat.id, other.id, chat.id])
        engine.move("lost", detail="killed")
        engine.become_ready()
        await on.until(lambda: chats.expected[3:] == [chat.id])


async def test_an_engine_that_is_lost_meanwhile_is_not_the_screens_error() -> None:
    chats, chat = _two_turns()
    chats.unexpected = EngineLost("The engine process ended.")
    async with stage(chats, chat) as on:
        await on.until(lambda: chats.expected)
        await on.shows("second answer")
        assert "ended" not in on.text
