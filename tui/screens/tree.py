"""All turns of one chat with its forks and siblings. Says which turn to go to, or to fork after."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.content import Content
from textual.screen import Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from chatkv.errors import ChatKVError, plural
from sessions.port import ChatPort, ChatsPort, TreeTurn, TurnView
from tui.actions import actions, bindings
from tui.answer import preview_words
from tui.safe_text import SafeText, safe_line
from tui.screens.dialogs import ask_fork_name
from tui.threads import in_thread
from tui.turn_tree import TreeLine, tree_lines
from tui.widgets.status_bar import KeyLine, Notice, SplitLine, key_hints
from tui.wording import clip, error_text

if TYPE_CHECKING:
    from tui.app import ChatApp


DEBOUNCE_S = 0.15


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen in a tree."""

    turn: TreeTurn
    fork: str | None = None
    """Name of the fork to make after the turn, maybe empty; None to go to the turn."""


def open_turn(chats: ChatsPort, turn: TreeTurn, chat: ChatPort | None = None) -> ChatPort:
    """The chat that leads through that turn, with its branch open. May block.

    Args:
        chats: All of them.
        turn: Where to go.
        chat: The one whose tree it was: it stays if its open path leads there.
    """
    if chat is not None and turn.on_path:
        return chat
    chat = chats.open(turn.chat_id)
    if turn.id not in [known.id for known in chat.turns()]:
        chat.select(turn.id)
    return chat


class TreeScreen(Screen[Choice | None]):
    """The tree of a chat. Returns the turn that was chosen, or None."""

    BINDINGS: ClassVar = [*bindings("tree")]
    AUTO_FOCUS = "#list"

    app: ChatApp

    def __init__(self, chat: ChatPort, at: TurnView | None = None) -> None:
        super().__init__()
        self._chat, self._at = chat, at
        self._lines: list[TreeLine] = []
        self._head = SplitLine(SafeText("Turns"), id="header")
        self._list = OptionList(id="list", markup=False, compact=True)
        self._preview = Static("", markup=False, id="preview")
        self._cost = Static("", markup=False, id="cost")
        self._notice = Notice(id="notice")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._list
        yield self._preview
        yield self._cost
        yield self._notice
        keys = KeyLine(id="keys")
        keys.keys = key_hints(*(action.id for action in actions("tree")))
        yield keys

    def on_mount(self) -> None:
        self._read()

    def on_resize(self, event: events.Resize) -> None:
        self._write(self._list.highlighted)

    @work(exclusive=True, group="tree")
    async def _read(self) -> None:
        try:
            name = await in_thread(lambda: self._chat.name)
            self._lines = tree_lines(await in_thread(self._chat.tree))
        except ChatKVError as error:
            self._notice.say(*error_text(error), kind="error")
            return
        self._head.left = SafeText(f"Turns of {safe_line(name) or 'this chat'}")
        self._head.right = SafeText(plural(len(self._lines), "turn"))
        here = [place for place, line in enumerate(self._lines) if line.turn.on_path]
        if self._at is not None:
            here = [p for p, line in enumerate(self._lines) if line.turn.id == self._at.id] or here
        self._write(here[-1] if here else None)

    def _write(self, highlight: int | None) -> None:
        width = max(1, self.size.width - 3)
        self._list.clear_options()
        self._list.add_options(
            Option(Content(clip(SafeText(line.lead + safe_line(line.words())), width)))
            for line in self._lines
        )
        self._list.highlighted = highlight if self._lines else None
        self._show_preview()

    @on(OptionList.OptionHighlighted)
    def _show_preview(self) -> None:
        turn = self._chosen()
        self._preview.update(Content("" if turn is None else safe_line(turn.prompt[:1000])))
        if turn is not None:
            self._show_cost(turn.id)

    @work(exclusive=True, group="cost")
    async def _show_cost(self, turn_id: int) -> None:
        """What going on after the turn costs; nothing where the engine has no time to tell."""
        self._cost.update("")
        await asyncio.sleep(DEBOUNCE_S)
        if not self.app.engine_free:
            return
        with contextlib.suppress(ChatKVError):  # the tree is of use without it
            cost = await in_thread(self._chat.preview, turn_id)
            words = clip(SafeText(f"going on here: {preview_words(cost)}"), self.size.width - 2)
            self._cost.update(Content(words))

    def _chosen(self) -> TreeTurn | None:
        place = self._list.highlighted
        return self._lines[place].turn if place is not None and self._lines else None

    @on(OptionList.OptionSelected)
    def open_chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if (turn := self._chosen()) is not None:
            self.dismiss(Choice(turn))

    def action_fork(self) -> None:
        turn = self._chosen()

        def named(name: str | None) -> None:
            if turn is not None and name is not None:
                self.dismiss(Choice(turn, name))

        if turn is not None:
            self.app.push_screen(ask_fork_name(turn.number), named)

    def action_close(self) -> None:
        self.dismiss(None)
