"""Every action once: id, keys and words. Bindings, help, palette and the key line read this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Action:
    """Something a user can do."""

    id: str
    """Stable name, as in `[keys]`."""
    keys: str
    """Textual key names, comma separated; empty when only palette and slash reach it."""
    run: str
    """Textual action, `app.` or `screen.` in front."""
    label: str
    """One or two words for the key line."""
    help: str
    where: str = "anywhere"
    """`anywhere`, `box`, `typing`, `turn`, `transcript`, `tree` or `chats`."""
    palette: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command."""

    name: str
    usage: str
    help: str


ACTIONS = (
    Action("app.help", "f1", "app.help", "Help", "Keys and commands"),
    Action("app.chats", "f2", "app.chats", "Chats", "Find, open, fork, rename or trash a chat"),
    Action("app.palette", "ctrl+p", "app.command_palette", "More", "Everything", palette=False),
    Action("app.quit", "ctrl+q", "app.quit", "Quit", "Leave; what was said is saved"),
    Action("app.suspend", "ctrl+z", "app.suspend_process", "Suspend", "Go to the shell; `fg` comes "
           "back"),
    Action("chat.stop", "escape", "screen.leave", "Stop", "Stop the reply; what has come is kept",
           "box"),
    Action("chat.interrupt", "ctrl+c", "screen.interrupt", "", "Copy a selection; else stop; else "
           "clear the box; else, twice, quit", "box", palette=False),
    Action("chat.leave_empty", "ctrl+d", "", "", "Quit, when the box is empty", "typing",
           palette=False),
    Action("turn.again", "ctrl+r", "screen.again", "Again", "Another reply to the last prompt",
           "box"),
    Action("turn.edit", "ctrl+e", "screen.edit", "Edit", "Change the last prompt", "box"),
    Action("turn.fork", "ctrl+f", "screen.fork", "Fork", "Go on in a new chat that shares all this",
           "box"),
    Action("chat.tree", "", "screen.tree", "Tree", "All turns, siblings and forks of this chat",
           "box"),
    Action("chat.context", "f6", "screen.context", "Context", "What the model sees of this chat, "
           "and what a change costs", "box"),
    Action("chat.new", "", "screen.new", "New", "Start a new chat", "box"),
    Action("chat.rename", "", "screen.rename", "Rename", "Name this chat", "box"),
    Action("chat.stats", "", "screen.stats", "Numbers", "What the last reply cost and reused",
           "box"),
    Action("engine.restart", "f5", "screen.restart", "Restart", "Start a lost engine again", "box"),
    Action("box.send", "enter", "send", "Send", "Send; while a reply runs, queue", "typing",
           palette=False),
    Action("box.newline", "ctrl+j,shift+enter,alt+enter", "newline", "New line", "New line",
           "typing", palette=False),
    Action("box.complete", "tab", "complete", "", "Complete a slash command", "typing",
           palette=False),
    Action("box.undo", "ctrl+underscore,ctrl+slash,ctrl+shift+minus", "undo", "",
           "Undo, also a text that was cleared or sent", "typing", palette=False),
    Action("box.history", "up,down", "", "", "Earlier prompts, from the first and last line",
           "typing", palette=False),
    Action("view.page_up", "pageup", "screen.scroll_by('page', -1)", "", "A page up", "transcript",
           palette=False),
    Action("view.page_down", "pagedown", "screen.scroll_by('page', 1)", "", "A page down",
           "transcript", palette=False),
    Action("view.line_up", "shift+up", "screen.scroll_by('line', -1)", "", "A line up",
           "transcript", palette=False),
    Action("view.line_down", "shift+down", "screen.scroll_by('line', 1)", "", "A line down",
           "transcript", palette=False),
    Action("view.start", "home", "screen.view_start", "Start", "Go to the first turn",
           "transcript"),
    Action("view.end", "end", "screen.view_end", "End", "Go to the end and follow it",
           "transcript"),
    Action("view.turn_up", "alt+up", "screen.turn(-1)", "Turns", "Choose the turn above",
           "transcript"),
    Action("view.turn_down", "alt+down", "screen.turn(1)", "", "Choose the turn below",
           "transcript", palette=False),
    Action("turn.copy", "c", "screen.copy_turn", "Copy", "Copy the reply", "turn", palette=False),
    Action("turn.copy_code", "C", "screen.copy_code", "Code", "Copy the next code block", "turn",
           palette=False),
    Action("turn.edit_here", "e", "screen.edit_turn", "Edit", "Change this prompt", "turn",
           palette=False),
    Action("turn.again_here", "r", "screen.again_turn", "Again", "Ask this prompt again", "turn",
           palette=False),
    Action("turn.fork_here", "f", "screen.fork_turn", "Fork here", "Fork after this turn", "turn",
           palette=False),
    Action("turn.forget", "x", "screen.toggle_turn", "Forget", "Put this turn out of the model's "
           "sight, or bring it back", "turn", palette=False),
    Action("turn.pin", "p", "screen.pin_turn", "Pin", "Keep this turn from being forgotten, or not",
           "turn", palette=False),
    Action("turn.sibling_before", "left_square_bracket", "screen.sibling(-1)", "Siblings",
           "The version before", "turn", palette=False),
    Action("turn.sibling_after", "right_square_bracket", "screen.sibling(1)", "",
           "The version after", "turn", palette=False),
    Action("turn.tree", "t", "screen.tree", "Tree", "All turns, siblings and forks of this chat",
           "turn", palette=False),
    Action("tree.open", "enter", "", "Open", "Open the branch of this turn", "tree",
           palette=False),
    Action("tree.fork", "f", "screen.fork", "Fork here", "Fork after this turn", "tree",
           palette=False),
    Action("tree.close", "escape,ctrl+c", "screen.close", "Back", "Back", "tree", palette=False),
    Action("chats.open", "enter", "", "Open", "Open the chat", "chats", palette=False),
    Action("chats.new", "n", "screen.new", "New", "Start a new chat", "chats", palette=False),
    Action("chats.fork", "f", "screen.fork", "Fork", "Fork the chat and open the fork", "chats",
           palette=False),
    Action("chats.tree", "t", "screen.tree", "Tree", "All turns of the chat; fork at any", "chats",
           palette=False),
    Action("chats.rename", "r", "screen.rename", "Rename", "Name the chat", "chats", palette=False),
    Action("chats.trash", "d", "screen.trash", "Trash", "Put the chat in the trash", "chats",
           palette=False),
    Action("chats.undo", "u", "screen.undo", "Undo", "Take it back out", "chats", palette=False),
    Action("chats.search", "slash", "screen.search", "Search", "Search names and messages", "chats",
           palette=False),
    Action("chats.close", "escape,ctrl+c", "screen.close", "Back", "Back to the chat", "chats",
           palette=False),
)  # fmt: skip

COMMANDS = (
    Command("help", "/help [COMMAND]", "keys and commands"),
    Command("new", "/new [NAME]", "start a new chat"),
    Command("open", "/open NAME", "open another chat"),
    Command("rename", "/rename NAME", "name this chat"),
    Command("fork", "/fork [TURN] [NAME]", "go on in a new chat that shares everything up to here"),
    Command("tree", "/tree", "all turns, siblings and forks of this chat"),
    Command("again", "/again", "another reply to the last prompt"),
    Command("edit", "/edit [TURN]", "change a prompt, the last by default"),
    Command("set", "/set [KEY VALUE]", "show or change the sampling settings"),
    Command("spec", "/spec [none|auto|chain:N|tree:N]", "show or change how replies are drafted"),
    Command("stats", "/stats", "what the last reply cost and reused"),
    Command("forget", "/forget TURNS|--before N", "put turns out of the model's sight"),
    Command("recall", "/recall TURNS|--all", "bring turns back into it; the price is shown first"),
    Command("pin", "/pin TURNS", "keep turns from being forgotten"),
    Command("unpin", "/unpin TURNS", "let them be forgotten again"),
    Command("context", "/context", "what the model sees of this chat"),
    Command("redact", "/redact TURNS [--purge]", "take turns from the model for good"),
    Command("copy", "/copy [TURN|code N]", "copy a reply or one of its code blocks"),
    Command("restart", "/restart", "start a lost engine again"),
    Command("exit", "/exit", "leave"),
)

ALIASES = {"quit": "exit", "q": "exit", "bye": "exit", "?": "help", "clear": "new"}

_KEY_NAMES = {
    "escape": "Esc", "enter": "Enter", "tab": "Tab", "up": "Up", "down": "Down", "home": "Home",
    "end": "End", "pageup": "PgUp", "pagedown": "PgDn", "slash": "/",
    "underscore": "_", "minus": "-", "left_square_bracket": "[", "right_square_bracket": "]",
}  # fmt: skip


def actions(*where: str) -> list[Action]:
    """Those of some places, in table order."""
    return [action for action in ACTIONS if action.where in where]


def by_id(action_id: str) -> Action:
    """The action of that id."""
    return next(action for action in ACTIONS if action.id == action_id)


def bindings(*where: str, priority: bool = False) -> Iterator[Binding]:
    """Textual's bindings for the actions of some places that one can run."""
    for action in actions(*where):
        if action.keys and action.run:
            yield Binding(
                action.keys, action.run, action.label, show=False, priority=priority, id=action.id
            )


def key_name(key: str, *, short: bool = False) -> str:
    """`ctrl+r` as `Ctrl+R`, or `^R` when short."""
    *modifiers, last = key.split("+")
    last = _KEY_NAMES.get(last, last.upper() if len(key) > 1 else last)
    if short and modifiers == ["ctrl"]:
        return f"^{last}"
    return "+".join([*(modifier.capitalize() for modifier in modifiers), last])


def key_names(action: Action) -> str:
    """All keys of an action, for people."""
    return " ".join(key_name(key) for key in action.keys.split(",") if key)
