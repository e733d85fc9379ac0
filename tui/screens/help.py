"""Keys and commands, read off the table of actions. Knows no chat."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget

from tui.actions import ACTIONS, COMMANDS, key_names
from tui.safe_text import NOTHING, SafeText
from tui.widgets.status_bar import SplitLine

SECTIONS = (
    ("Anywhere", ("anywhere",)),
    ("While you type", ("typing", "box")),
    ("The conversation", ("transcript",)),
    ("On a turn, chosen with Alt+Up", ("turn",)),
    ("In the tree of turns", ("tree",)),
    ("In the list of chats", ("chats",)),
)
KEY_CELLS = 26


class HelpScreen(Screen[None]):
    """F1. `command` puts one slash command first."""

    BINDINGS: ClassVar = [Binding("escape,f1,q,ctrl+c", "dismiss(None)", show=False)]
    AUTO_FOCUS = "#help"

    def __init__(self, command: SafeText = NOTHING) -> None:
        super().__init__()
        self._command = command

    def compose(self) -> ComposeResult:
        yield SplitLine(SafeText("Keys and commands"), SafeText("Esc Back"), id="header")
        with VerticalScroll(id="help"):
            yield HelpText(self._command)


class HelpText(Widget):
    """The tables, folded to the width there is."""

    DEFAULT_CSS = "HelpText { height: auto; width: 1fr; }"

    def __init__(self, command: SafeText) -> None:
        super().__init__()
        self._command = command

    def render(self) -> Content:
        return self._text(self.content_size.width or 78)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._text(width).plain.count("\n") + 1

    def _text(self, width: int) -> Content:
        lines: list[str | tuple[str, str]] = []
        for command in COMMANDS:
            if command.name == self._command:
                lines += [(command.usage, "bold"), f"\n{command.help}\n\n"]
        for title, places in SECTIONS:
            rows = [(key_names(a), a.help) for a in ACTIONS if a.where in places and a.keys]
            lines += _section(title, rows, width)
        rows = [(command.usage, command.help) for command in COMMANDS]
        lines += _section("Commands, typed into the box", rows, width)
        for words in ("//text sends a text that starts with a slash.", "Ctrl+P finds the rest."):
            lines.append(textwrap.fill(words, width) + "\n")
        return Content.assemble(*lines)


def _section(
    title: str, rows: list[tuple[str, str]], width: int
) -> Iterator[str | tuple[str, str]]:
    yield (f"{title}\n", "bold $text-accent")
    side_by_side = width >= 60
    margin = " " * (KEY_CELLS + 2 if side_by_side else 4)
    for key, words in rows:
        text = textwrap.fill(words, max(20, width), initial_indent=margin, subsequent_indent=margin)
        if side_by_side and len(key) < KEY_CELLS:
            yield f"  {key.ljust(KEY_CELLS)}"
            text = text.lstrip()
        else:
            yield f"  {key}\n"
        yield (f"{text}\n", "$foreground-muted")
    yield "\n"
