"""List of chats, help, palette, dialogs; small terminals, no colour, pastes, hostile text."""

from __future__ import annotations

import subprocess
import sys

import pytest
from app.fake_engine import FakeEngine
from app.fakes import AT_MS, FakeChats
from app.stage import Stage, stage
from data.escape_corpus import CORPUS, KEPT
from textual import events
from textual.keys import _character_to_key
from textual.widgets import Input, Markdown

from chatkv.errors import StoreBusy
from sessions.port import ChatRow
from tui.screens.dialogs import ShowLink

ANSWER = (
    "We settled on **16 tokens** per page:\n\n- a fork copies at most 15 tokens\n"
    "- one page of K and V is 12 KiB per layer\n\n"
    "```python\npages = -(-n_tokens // 16)\n```\n\nThe cost is a longer page table."
)


def _library() -> FakeChats:
    chats = FakeChats()
    chats.add("bench-notes", ("Which numbers did we get?", "These."))
    chats.add("grant-letter", ("Draft a grant letter", "Dear ..."), ("Shorter", "Dear,"))
    chats.add("ada-notes", ("Hi, I am Ada", "Hello!"), ("What about the page size?", ANSWER))
    fork = chats.open("ada-notes").fork(4, "16-vs-32")
    fork.fork(None, "long-ctx")
    return chats


async def _open_list(on: Stage) -> None:
    await on.press("f2")
    await on.shows("bench-notes", "5 chats")


def _fork(on: Stage) -> str:
    return on.chat_screen.view.fork if on.chat_screen.view else ""


async def test_list_shows_the_fork_tree_and_opens() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await _open_list(on)
        await on.shows("● ada-notes", "└─ 16-vs-32", "   └─ long-ctx", "forked at 1")
        await on.shows("about 290 ms")
        await on.snapshot("chats")
        await on.press("end", "enter")
        await on.shows("Which numbers did we get?", "bench-notes › main")


async def test_what_is_typed_fast_behind_the_slash_is_searched_for() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await _open_list(on)
        for char in "/d/r":  # all before the screen comes to any
            on.app.post_message(events.Key(_character_to_key(char), char))
        await on.until(lambda: on.app.screen.query_one("#search", Input).value == "d/r")
        assert not chats.trashed


async def test_search_is_debounced_and_opens_the_match() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await _open_list(on)
        await on.press("slash", *"gra")
        on.app.screen.query_one(Input).value = "grant"
        await on.shows("1 match", "Draft a grant letter")
        assert chats.queries == ["", "grant"]
        await on.press("enter", "enter")
        await on.shows("grant-letter › main", "Shorter")


async def test_the_cost_of_reopening_is_shown_when_the_engine_has_time() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await _open_list(on)
        await on.shows("reopening: about 290 ms, pages: 150 in memory, 12 from disk")
        await on.press("end")
        await on.until(lambda: chats.previews[-1] == ("chat0000", None))
        await on.press("t")
        await on.shows("going on here: about 290 ms")
        assert chats.previews[-1] == ("chat0000", 1)
        on.engine.move("lost")
        asked = len(chats.previews)
        await on.press("escape", "up")
        await on.hides("reopening")
        assert len(chats.previews) == asked


async def test_trash_and_undo_and_rename() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await _open_list(on)
        await on.press("end", "d")
        await on.shows("bench-notes is in the trash.", "u takes it back", "4 chats")
        await on.press("u")
        await on.shows("5 chats")
        await on.press("end", "r")
        await on.shows("Name of this chat")
        on.app.screen.query_one(Input).value = "numbers"
        await on.press("enter")
        await on.shows("numbers")
        assert "rename chat0000 numbers" in chats.calls


async def test_trashing_the_open_chat_shows_a_new_one() -> None:
    chats = _library()
    async with stage(chats, chats.open("bench-notes")) as on:
        await _open_list(on)
        await on.press("d")
        await on.shows("4 chats")
        await on.press("escape")
        await on.shows("A new chat with SmolLM2-135M-Instruct.")


async def test_new_and_fork_from_the_list() -> None:
    chats = _library()
    async with stage(chats, chats.open("bench-notes")) as on:
        await _open_list(on)
        await on.press("f")
        await on.shows("Name of the fork after turn 1")
        await on.press("escape", "f", "enter")
        await on.until(lambda: _fork(on) == "fork-5")
        await on.press("f2")
        await on.shows("6 chats")
        await on.press("n")
        await on.shows("A new chat with")


async def test_the_tree_of_a_chat_leads_to_every_turn_and_forks_at_any() -> None:
    chats = _library()
    chats.begin("chat0003", 4, "What about int8?").reply = "Half."
    async with stage(chats, chats.open("ada-notes")) as on:
        await on.enter("/tree")
        await on.shows("● 1 Hi, I am Ada ← long-ctx", "├─ ○ 2 What about int8? ← 16-vs-32")
        await on.shows("about 290 ms")
        await on.snapshot("tree")
        await on.press("up", "enter")  # from where we are to the other fork
        await on.until(lambda: _fork(on) == "16-vs-32")
        await on.shows("Half.")
        await on.press("alt+up", "t", "up", "up", "f")
        await on.shows("Name of the fork after turn 1")
        await on.press("escape", "down", "down", "f", "x", "enter")
        await on.until(lambda: _fork(on) == "x")
        assert chats.calls[-1] == "fork 6 x"
        await on.press("f2", "end", "t")
        await on.shows("Turns of bench-notes", "1 turn")
        await on.press("f", "y", "enter")
        await on.until(lambda: _fork(on) == "y")


async def test_a_sibling_that_was_left_is_opened_from_the_tree() -> None:
    chats = _library()
    chat = chats.open("grant-letter")
    old = chats.heads[chat.id]
    chats.begin(chat.id, chats.turns[old].parent, "Longer")
    shown = chats.family_of(chat.id)
    async with stage(chats, chat) as on:
        chats.family_of = lambda chat_id: [*shown, ChatRow("left", "left", "left", 2, 2, AT_MS)]
        chats.heads["left"] = old
        await on.enter("/tree")
        await on.shows("├─ ○ 2 Shorter")
        await on.press("up", "enter")
        await on.shows("Dear,")
        assert chats.calls[-1] == f"select {old}"


async def test_an_error_of_the_list_is_told() -> None:
    chats = _library()
    async with stage(chats, chats.open("bench-notes")) as on:
        chats.error = StoreBusy("chat.db is locked.", hint="Try again.")
        await on.press("f2")
        await on.shows("chat.db is locked.", "Try again.")


async def test_starting_with_the_list() -> None:
    chats = _library()
    async with stage(chats, pick=True) as on:
        await on.shows("5 chats", "grant-letter")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)], ids=str)
async def test_chat_looks_as_reviewed(size: tuple[int, int]) -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes"), size=size) as on:
        await on.shows("The cost is")
        await on.calm()
        await on.snapshot("chat")
        await on.enter("and how does that change for a 128k context?")
        on.chats.script.say("It does ", "not: the *table* grows,\n\n1. slowly\n2. li")
        await on.shows("2. li")
        await on.enter("and for 1M?")
        await on.shows("queued 1")
        await on.snapshot("generating")
        on.chats.script.finish()
        await on.until(lambda: "send and for 1M?" in chats.calls)
        on.chats.script.finish(text="No.")
        await on.idle()


async def test_other_states_look_as_reviewed() -> None:
    engine = FakeEngine(ready=False)
    async with stage(engine=engine) as on:
        engine.move("loading", detail="loading", done=54_000_000, total=87_000_000)
        await on.shows("54/87 MB")
        await on.snapshot("loading")
        await on.press("f1")
        await on.shows("Keys and commands")
        await on.snapshot("help")
        await on.press("escape")
        engine.become_ready()
        await on.shows("ready", "A new chat with")
        await on.snapshot("new")
        engine.move("lost", detail="signal 9")
        await on.shows("process ended (signal 9)", "engine lost")
        await on.snapshot("lost")


async def test_chosen_turn_looks_as_reviewed() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await on.press("alt+up")
        await on.shows("▶ 2 you", "c Copy")
        await on.snapshot("turn")


async def test_the_palette_runs_an_action() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await on.press("ctrl+p")
        await on.shows("Another reply to the last prompt", "Ctrl+R")
        on.app.screen.query_one(Input).value = "reused"
        await on.shows("What the last reply cost and reused")
        await on.press("enter")
        await on.shows("Numbers of the last reply")


async def test_help_of_one_command() -> None:
    async with stage() as on:
        await on.enter("/help fork")
        await on.shows("/fork [TURN] [NAME]", "Ctrl+R")


async def test_plain_glyphs_are_ascii_and_as_wide() -> None:
    chats = _library()
    async with stage(chats, chats.open("ada-notes"), plain_glyphs=True) as on:
        await on.shows("The cost is")
        assert on.text.isascii()
        assert all(strip.cell_length == 80 for strip in on.app.screen._compositor.render_strips())
        await on.snapshot("ascii")


async def test_no_color_sends_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    chats = _library()
    async with stage(chats, chats.open("ada-notes")) as on:
        await on.shows("The cost is")
        for strip in on.app.screen._compositor.render_strips():
            for style in (segment.style for segment in strip if segment.style is not None):
                assert style.color is None or style.color.is_default
                assert style.bgcolor is None or style.bgcolor.is_default
        await on.snapshot("no-color")


async def test_too_small_a_terminal_asks_for_room_and_recovers() -> None:
    async with stage(size=(40, 12)) as on:
        await on.shows("Enter sends")
        on.type("draft")
        await on.pilot.resize_terminal(39, 12)
        await on.shows("chatkv needs 40x12 cells")
        await on.pilot.resize_terminal(60, 11)
        await on.shows("chatkv needs 40x12 cells")
        await on.pilot.resize_terminal(40, 12)
        await on.hides("chatkv needs")
        assert on.chat_screen.prompt.text == "draft"


async def test_huge_paste_becomes_a_chip_and_is_sent_whole() -> None:
    async with stage() as on:
        paste = "\r\n".join(f"row {n} \x1b[31m" for n in range(5_000))
        on.chat_screen.prompt.post_message(events.Paste(paste))
        await on.shows("[paste 1: 5,000 lines]")
        on.type(" what is this?")
        await on.press("enter")
        await on.until(lambda: on.app.reply is not None)
        sent = on.app.reply.prompt if on.app.reply else ""
        assert sent == paste.replace("\r\n", "\n") + " what is this?"
        await on.shows("more characters")
        assert "\x1b" not in on.text
        on.chats.script.finish(text="rows")
        await on.idle()
        await on.press("up")
        await on.shows("[paste 2: 5,000 lines]")


async def test_a_paste_is_shown_as_it_will_be_sent() -> None:
    async with stage() as on:
        on.chat_screen.prompt.post_message(events.Paste("a\rb\x1b[2J\u202e"))
        await on.until(lambda: on.chat_screen.prompt.text == "a\nb␛[2J‹U+202E›")


async def test_links_are_shown_and_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = FakeChats()
    opened: list[str] = []
    async with stage(chats, chats.add("a", ("q", "[x](http://a.test/\u202ey)"))) as on:
        monkeypatch.setattr(on.app, "open_url", lambda url: opened.append(url))
        markdown = on.app.screen.query_one(Markdown)
        markdown.post_message(Markdown.LinkClicked(markdown, "http://a.test/%1b[31m"))
        await on.shows("http://a.test/␛[31m", "o Open")
        assert not opened
        await on.press("o")
        assert opened == ["http://a.test/␛[31m"]
        on.app.push_screen(ShowLink("file:///etc/passwd"))  # type: ignore[arg-type]
        await on.shows("file:///etc/passwd", "c Copy   Esc")
        await on.press("o")
        assert len(opened) == 1


BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
HARMLESS = {name: text for name, text in CORPUS.items() if name != "long_line"}


async def test_hostile_text_reaches_no_widget() -> None:
    """Every entry as a reply, a prompt, a name, an error and a search hit, all at once."""
    everything = "\n\n".join([*HARMLESS.values(), *KEPT])
    one_line = "".join(text.replace("\n", " ") for text in HARMLESS.values())
    chats = FakeChats()
    turns = [(one_line[:3_000], "a"), (everything, everything)]
    chat = chats.add(one_line, *turns, fork=one_line, model=one_line)
    async with stage(chats, chat, size=(100, 200)) as on:
        await on.shows("never ends")
        _assert_harmless(on)
        chats.error = StoreBusy(one_line, hint=one_line)
        await on.enter(everything)
        await on.until(lambda: on.chat_screen.notice.kind == "error")
        await on.pilot.pause()
        _assert_harmless(on)
        await on.press("ctrl+c", "f2")
        await on.shows("1 chat")
        _assert_harmless(on)
        await on.press("r")
        await on.shows("Name of this chat")
        _assert_harmless(on)


async def test_hostile_text_streams_harmlessly() -> None:
    async with stage(size=(100, 60)) as on:
        await on.enter("go")
        for text in HARMLESS.values():
            on.chats.script.say(*text, "\n\n")
        on.chats.script.say("the end")
        await on.shows("the end")
        _assert_harmless(on)
        on.chats.script.finish()
        await on.idle()
        _assert_harmless(on)


def _assert_harmless(on: Stage) -> None:
    for strip in on.app.screen._compositor.render_strips():
        for char in strip.text:
            code = ord(char)
            assert code >= 0x20, repr(strip.text)
            assert not 0x7F <= code < 0xA0, repr(strip.text)
            assert not 0xD800 <= code < 0xE000, repr(strip.text)
            assert char not in "\u061c\u200b\u200e\u200f\u2028\u2029\u2060\ufeff", repr(strip.text)
            assert code not in BIDI, repr(strip.text)
            assert not 0xE0000 <= code < 0xE0080, repr(strip.text)


@pytest.mark.parametrize("module", ["tui.app", "tui.widgets.markdown"])
def test_the_screen_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; heavy = {{'torch', 'numpy', 'transformers', 'numba', 'tokenizers',"
        "'pydantic', 'sqlite3'} & set(sys.modules); assert not heavy, heavy; "
        f"assert {module != 'tui.app'} or 'markdown_it' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
