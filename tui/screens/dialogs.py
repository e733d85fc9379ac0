"""Small windows that ask or tell one thing. Each takes safe text and returns what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import urlsplit

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from tui.safe_text import NOTHING, SafeText
from tui.widgets.prompt import Field

SCHEMES = ("http", "https", "mailto")
"""Addresses that may be opened, after a look at them."""


class AskLine(ModalScreen[str | None]):
    """Asks for one line. Returns it, or None.

    Args:
        question: What is asked.
        value: What stands there first.
        if_empty: What Enter does with nothing typed, which then returns an empty line; without it
            nothing is no answer.
    """

    BINDINGS: ClassVar = [Binding("escape,ctrl+c", "dismiss(None)", show=False)]

    def __init__(
        self, question: SafeText, value: SafeText = NOTHING, if_empty: SafeText = NOTHING
    ) -> None:
        super().__init__()
        self._question, self._value, self._if_empty = question, value, if_empty

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question), markup=False, classes="dialog-title")
            yield Field(self._value, placeholder=self._if_empty, id="answer", compact=True)
            yield Static("Enter Save   Esc Back", classes="dialog-keys")

    @on(Input.Submitted)
    def answer(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip() or ("" if self._if_empty else None))


def ask_fork_name(shared: int) -> AskLine:
    """Asks what a fork is called that shares so many turns."""
    return AskLine(
        SafeText(f"Name of the fork after turn {shared}"), if_empty=SafeText("a name is made")
    )


class Confirm(ModalScreen[bool]):
    """Asks before something that nothing brings back. Returns whether to do it."""

    BINDINGS: ClassVar = [
        Binding("escape,ctrl+c,n", "dismiss(False)", show=False),
        Binding("y", "dismiss(True)", show=False),
    ]

    def __init__(self, question: SafeText, facts: Sequence[SafeText] = ()) -> None:
        super().__init__()
        self._question, self._facts = question, facts

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(self._question), markup=False, classes="dialog-title")
            for fact in self._facts:
                yield Static(Content(fact), markup=False)
            yield Static("y Yes   Esc Back", classes="dialog-keys")


class ShowTable(ModalScreen[None]):
    """Shows names and values."""

    BINDINGS: ClassVar = [Binding("escape,enter,q,ctrl+c", "dismiss(None)", show=False)]
    AUTO_FOCUS = ".dialog-body"

    def __init__(self, title: SafeText, rows: Sequence[tuple[SafeText, SafeText]]) -> None:
        super().__init__()
        self._title, self._rows = title, rows

    def compose(self) -> ComposeResult:
        width = max((cell_len(name) for name, _ in self._rows), default=0) + 2
        lines: list[str | tuple[str, str]] = []
        for name, value in self._rows:
            lines += [(name + " " * (width - cell_len(name)), "$foreground-muted"), value, "\n"]
        with Vertical(classes="dialog"):
            yield Static(Content(self._title), markup=False, classes="dialog-title")
            with VerticalScroll(classes="dialog-body"):
                yield Static(Content.assemble(*lines[:-1]), markup=False)
            yield Static("Esc Back", classes="dialog-keys")


class ShowLink(ModalScreen[None]):
    """Shows a whole address before anything opens it."""

    BINDINGS: ClassVar = [
        Binding("escape,ctrl+c", "dismiss(None)", show=False),
        Binding("c", "copy", show=False),
        Binding("o", "open", show=False),
    ]

    def __init__(self, address: SafeText) -> None:
        super().__init__()
        self._address = address

    @property
    def _opens(self) -> bool:
        try:
            return urlsplit(self._address).scheme in SCHEMES
        except ValueError:
            return False

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("A link in the reply leads to", classes="dialog-title")
            yield Static(Content(self._address), markup=False)
            keys = "c Copy   o Open   Esc Back" if self._opens else "c Copy   Esc Back"
            yield Static(keys, classes="dialog-keys")

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._address)
        self.dismiss(None)

    def action_open(self) -> None:
        if self._opens:
            self.app.open_url(self._address)
            self.dismiss(None)


class NoRoom(ModalScreen[None]):
    """Covers a terminal that is too small."""

    def compose(self) -> ComposeResult:
        yield Static("chatkv needs 40x12 cells", id="no-room")
