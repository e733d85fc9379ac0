"""All chats: fork tree, search, new, fork, rename, trash. Says which chat to open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from chatkv.errors import ChatKVError, plural
from sessions.port import ChatPort, ChatRow
from tui.actions import actions, bindings
from tui.answer import preview_words
from tui.safe_text import SafeText, safe_line
from tui.screens.dialogs import AskLine, ask_fork_name
from tui.screens.tree import TreeScreen, open_turn
from tui.threads import in_thread
from tui.widgets.prompt import Field
from tui.widgets.status_bar import KeyLine, Notice, SplitLine, key_hints
from tui.wording import clip, clock, count, error_text, pad

if TYPE_CHECKING:
    from tui.app import ChatApp

DEBOUNCE_S = 0.15

Opener = Callable[[], ChatPort]
"""Makes the chat to show; may block."""


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the list and where it hangs."""

    row: ChatRow
    lead: str
    """Branches before the name."""
    root: bool


def tree(rows: list[ChatRow]) -> list[Line]:
    """The rows with forks under what they were forked from; newest first, ends on a fork's line."""
    ids = {row.id for row in rows}
    children: dict[str | None, list[ChatRow]] = {}
    for row in rows:
        parent = row.forked_from if row.forked_from in ids and row.forked_from != row.id else None
        children.setdefault(parent, []).append(row)
    lines: list[Line] = []
    seen: set[str] = set()

    def add(row: ChatRow, lead: str, below: str, root: bool) -> None:
        if row.id in seen:
            return
        seen.add(row.id)
        lines.append(Line(row, lead, root))
        forks = children.get(row.id, [])
        for fork in forks:
            last = fork is forks[-1]
            add(fork, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), False)

    for row in children.get(None, []):
        add(row, "", "", True)
    for row in rows:  # a circle of forks hangs nowhere
        add(row, "", "", True)
    return lines


class ChatsScreen(Screen[Opener | None]):
    """F2. Returns what makes the chat to show, or None."""

    # What is typed right behind the key of the search is meant for it: were the key to wait in the
    # list's queue, a `d` behind it would trash a chat.
    BINDINGS: ClassVar = [
        replace(binding, priority=binding.id == "chats.search") for binding in bindings("chats")
    ]
    AUTO_FOCUS = "#list"

    app: ChatApp

    def __init__(self, open_id: str) -> None:
        super().__init__()
        self._open_id = open_id
        self._lines: list[Line] = []
        self._trashed: str | None = None
        self._debounce: Timer | None = None
        self._head = SplitLine(SafeText("Chats"), id="header")
        self._search = Field(placeholder="/ searches names and messages", id="search", compact=True)
        self._titles = Static("", markup=False, id="titles")
        self._list = OptionList(id="list", markup=False, compact=True)
        self._preview = Static("", markup=False, id="preview")
        self._cost = Static("", markup=False, id="cost")
        self._notice = Notice(id="notice")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._search
        yield self._titles
        yield self._list
        yield self._preview
        yield self._cost
        yield self._notice
        keys = KeyLine(id="keys")
        # Taking a chat back out of the trash is said where one is put there.
        shown = [action.id for action in actions("chats") if action.id != "chats.undo"]
        keys.keys = key_hints(*shown)
        yield keys

    def on_mount(self) -> None:
        self.find("")

    def on_resize(self, event: events.Resize) -> None:
        self._write()

    # Finding.

    @on(Input.Changed, "#search")
    def typed(self, event: Input.Changed) -> None:
        event.stop()
        if self._debounce is not None:
            self._debounce.stop()
        self._debounce = self.set_timer(DEBOUNCE_S, partial(self.find, event.value))

    @on(Input.Submitted, "#search")
    def found(self, event: Input.Submitted) -> None:
        event.stop()
        self._list.focus()

    @work(exclusive=True, group="find")
    async def find(self, query: str) -> None:
        """Read the list; what was typed since makes an older answer void."""
        try:
            rows = await in_thread(self.app.chats.chats, query.strip())
        except ChatKVError as error:
            self._notice.say(*error_text(error), kind="error")
            return
        chosen = self._chosen()
        self._lines = tree(rows)
        self._write(chosen.id if chosen else self._open_id)
        self._head.right = SafeText(plural(len(rows), "match" if query.strip() else "chat"))

    def _write(self, choose: str = "") -> None:
        chosen = choose or (row.id if (row := self._chosen()) else "")
        width = self.size.width - 2
        self._titles.update(Content(_columns("  name", "turns", "tok", "updated", "model", width)))
        self._list.clear_options()
        self._list.add_options(Option(self._prompt(line, width)) for line in self._lines)
        places = [i for i, line in enumerate(self._lines) if line.row.id == chosen]
        if self._lines:
            self._list.highlighted = places[0] if places else 0
        self._show_preview()

    def _prompt(self, line: Line, width: int) -> Content:
        row = line.row
        name = safe_line(row.name) or SafeText("no name")
        if not line.root:
            name = safe_line(row.fork) or name
        at = f"  forked at {row.forked_at}" if row.forked_at is not None and width >= 70 else ""
        mark = "● " if row.id == self._open_id else "  "
        return Content(
            _columns(
                f"{mark}{line.lead}{name}{at}", count(row.turns), count(row.tokens),
                clock(row.updated_at), safe_line(row.model), width,
            )
        )  # fmt: skip

    @on(OptionList.OptionHighlighted)
    def _show_preview(self) -> None:
        row = self._chosen()
        if row is None:
            empty = "Nothing matches." if self._search.value else "No chats yet. n starts one."
            self._preview.update(Content(empty))
            return
        self._show_cost(row.id)
        words = safe_line(row.match) if row.match else safe_line(row.name)
        where = f"{safe_line(row.name)} › {safe_line(row.fork)} · {plural(row.turns, 'turn')}"
        head = clip(SafeText(where), max(1, self.size.width - 2))
        self._preview.update(Content.assemble((f"{head}\n", "$foreground-muted"), words))

    @work(exclusive=True, group="cost")
    async def _show_cost(self, chat_id: str) -> None:
        """What reopening costs, below the words; nothing where the engine has no time to tell."""
        self._cost.update("")
        await asyncio.sleep(DEBOUNCE_S)
        if not self.app.engine_free:
            return
        chats = self.app.chats
        with contextlib.suppress(ChatKVError):  # the list is of use without it
            cost = await in_thread(lambda: chats.open(chat_id).preview())
            words = clip(SafeText(f"reopening: {preview_words(cost)}"), self.size.width - 2)
            self._cost.update(Content(words))

    def _chosen(self) -> ChatRow | None:
        place = self._list.highlighted
        return self._lines[place].row if place is not None and place < len(self._lines) else None

    # Doing.

    @on(OptionList.OptionSelected)
    def open_chosen(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if (row := self._chosen()) is not None:
            self.dismiss(partial(self.app.chats.open, row.id))

    def action_new(self) -> None:
        self.dismiss(self.app.chats.new)

    def action_fork(self) -> None:
        chats, row = self.app.chats, self._chosen()
        if row is None or not row.turns:
            return
        chat_id = row.id

        def named(name: str | None) -> None:
            if name is not None:
                self.dismiss(lambda: chats.open(chat_id).fork(None, name))

        self.app.push_screen(ask_fork_name(row.turns), named)

    @work(exclusive=True, group="tree")
    async def action_tree(self) -> None:
        """The turns of the chosen chat; leads to one of them, or to a fork after it."""
        row = self._chosen()
        if row is None:
            return
        try:
            chat = await in_thread(self.app.chats.open, row.id)
        except ChatKVError as error:
            self._notice.say(*error_text(error), kind="error")
            return
        choice = await self.app.push_screen_wait(TreeScreen(chat))
        if choice is None:
            return
        turn, fork, chats = choice.turn, choice.fork, self.app.chats
        if fork is not None:
            self.dismiss(lambda: chat.fork(turn.id, fork))
        else:
            self.dismiss(partial(open_turn, chats, turn, chat))

    def action_rename(self) -> None:
        row = self._chosen()
        if row is not None:
            chats = self.app.chats
            ask = AskLine(SafeText("Name of this chat"), safe_line(row.name))

            def named(name: str | None) -> None:
                if name:
                    self._change(chats.rename, row.id, name)

            self.app.push_screen(ask, named)

    def action_trash(self) -> None:
        row = self._chosen()
        if row is None:
            return
        running = self.app.reply
        if running is not None and running.chat.id == row.id:
            self._notice.say(SafeText("A reply is being written in this chat."))
            return
        self._trashed = row.id
        self.app.trashed(row.id)
        self._change(self.app.chats.trash, row.id)
        name = clip(safe_line(row.name), 30)
        self._notice.say(SafeText(f"{name} is in the trash."), SafeText("u takes it back out."))

    def action_undo(self) -> None:
        if self._trashed is not None:
            self._change(self.app.chats.restore, self._trashed)
            self._trashed = None
            self._notice.clear()

    @work(group="change")
    async def _change(self, act: Callable[..., Any], *args: Any) -> None:
        try:
            await in_thread(act, *args)
        except ChatKVError as error:
            self._notice.say(*error_text(error), kind="error")
        self.find(self._search.value)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "search" or self.focused is not self._search

    def action_search(self) -> None:
        self.set_focus(self._search)

    def action_close(self) -> None:
        if self._search.has_focus and self._search.value:
            self._search.value = ""
        elif self._search.has_focus:
            self._list.focus()
        else:
            self.dismiss(None)


def _columns(name: str, turns: str, tok: str, updated: str, model: str, width: int) -> SafeText:
    """One row: the name takes the room that the columns leave; narrow lists have fewer columns."""
    rest = f"{turns:>6}{tok:>7}"
    if width >= 50:
        rest += "  " + pad(SafeText(updated), 8)
    if width >= 70:
        rest += "  " + pad(SafeText(model), 22 if width >= 90 else 15)
    return SafeText(pad(SafeText(name), max(1, width - len(rest) - 2)) + "  " + rest)
