"""What each slash command does to a chat screen. One `match`; the work is in the screen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from chatkv.errors import UsageError
from tui import schema, slash
from tui.safe_text import SafeText, safe_line
from tui.screens.dialogs import ShowTable
from tui.screens.help import HelpScreen
from tui.slash import Slash
from tui.turns import turn_numbers

if TYPE_CHECKING:
    from tui.screens.chat import ChatScreen


def run_command(screen: ChatScreen, command: Slash) -> None:
    """Do what a command line says. Raises UsageError when it makes no sense."""
    app, rest = screen.app, command.rest
    match command.name:
        case "help":
            app.push_screen(HelpScreen(SafeText(slash.topic(command))))
        case "new":
            screen.action_new(rest)
        case "open" if rest:
            screen.open(partial(app.chats.open, rest))
        case "open":
            app.action_chats()
        case "rename" if rest:
            screen.rename(rest)
        case "rename":
            screen.action_rename()
        case "fork":
            number, name = slash.turn_and_name(command)
            screen.fork(None if number is None else screen.numbered(number), name)
        case "tree":
            screen.action_tree()
        case "again":
            screen.action_again()
        case "edit" if rest:
            screen.edit(screen.numbered(_whole(rest)))
        case "edit":
            screen.action_edit()
        case "set" if rest:
            screen.set_sampling(*slash.setting(command))
        case "set":
            _show_settings(screen)
        case "spec" if rest:
            screen.set_spec(schema.read("spec.mode", rest))
        case "spec":
            screen.explain_spec()
        case "stats":
            screen.action_stats()
        case "forget" | "recall" | "pin" | "unpin":
            _context_command(screen, command)
        case "context":
            screen.action_context()
        case "redact":
            turns = [word for word in command.words if word != "--purge"]
            numbers = turn_numbers(" ".join(turns), len(screen.turns))
            screen.redact(numbers, purge="--purge" in command.words)
        case "copy":
            _copy(screen, command.words)
        case "restart":
            screen.action_restart()
        case _:
            app.action_quit_soon()


def _show_settings(screen: ChatScreen) -> None:
    sampling = screen.view.sampling if screen.view else {}
    rows = [(safe_line(key), safe_line(str(value))) for key, value in sampling.items()]
    screen.app.push_screen(ShowTable(SafeText("Sampling, from the next turn on"), rows))


def _context_command(screen: ChatScreen, command: Slash) -> None:
    """Turns by number; `--before N` and `--all` are short for many."""
    turns, words = screen.turns, command.words
    if command.name == "forget" and words[:1] == ["--before"]:
        before = turn_numbers(" ".join(words[1:]), len(turns))[0]
        seen = [turn.number for turn in turns if turn.seen == "live" and not turn.pinned]
        numbers = [number for number in seen if number < before]
    elif command.name == "recall" and words == ["--all"]:
        view = screen.view.context if screen.view else None
        numbers = list(view.missing) if view else []
    else:
        numbers = turn_numbers(command.rest, len(turns))
    match command.name:
        case "forget":
            screen.forget(numbers)
        case "recall":
            screen.recall(numbers)
        case name:
            screen.pin(numbers, pinned=name == "pin")


def _copy(screen: ChatScreen, words: list[str]) -> None:
    if words[:1] == ["code"]:
        screen.copy_code(screen.numbered(-1), _whole(words[1]) if len(words) > 1 else None)
    else:
        turn = screen.numbered(_whole(words[0]) if words else -1)
        screen.copy(turn.reply or turn.prompt)


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"{safe_line(word)[:40]} is no number.", hint="Write 3, or -1.") from None
