"""What one can do in a chat, by key, palette or slash command. Knows ports; draws nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from textual import on, work

from chatkv.errors import ChatKVError
from sessions.port import ChatPort
from tui.actions import bindings
from tui.chat_view import Drafting
from tui.messages import LinkChosen
from tui.safe_text import NOTHING, SafeText, safe_line
from tui.screens.commands import run_command
from tui.screens.dialogs import AskLine, ShowLink, ShowTable
from tui.screens.turn_actions import TurnActions
from tui.slash import Slash
from tui.threads import in_thread
from tui.wording import usage_rows

AGAIN_S = 2.0
"""A second Ctrl+C within this time quits."""


class ChatScreen(TurnActions):
    """The screen of a chat."""

    BINDINGS: ClassVar = [*bindings("box", priority=True), *bindings("transcript")]

    def __init__(self) -> None:
        super().__init__()
        self._interrupted_at = 0.0
        self._goal: int | None = None
        """The turn the cursor is on its way to."""

    # Stopping and leaving.

    def action_leave(self) -> None:
        """Esc: stop; else take the waiting message back; else leave edit, turn or notice."""
        if self.stop():
            return
        if self.waiting is not None:
            text, self.waiting, self.held = self.waiting.text, None, False
            self.give_back(text)
        elif self.editing is not None:
            self.stop_editing()
        elif self.chosen is not None:
            self.prompt.focus()
        else:
            self.notice.clear()
        self.refresh_lines()

    def stop(self) -> bool:
        """Stop the reply of this chat. False if none runs or it is stopping already."""
        reply = self.live.reply if self.live else None
        if reply is None or not reply.stop():
            return False
        self.held = self.waiting is not None
        self.app.cancel(reply)
        self.refresh_lines()
        return True

    def action_interrupt(self) -> None:
        """Ctrl+C: copy a selection; else stop; else clear the box; else, twice, quit."""
        selected = self.prompt.selected_text or self.get_selected_text()
        if selected:
            self.copy(selected)
            self.clear_selection()
        elif self.stop():
            pass
        elif self.prompt.text:
            self.prompt.clear()
        elif time.monotonic() - self._interrupted_at < AGAIN_S:
            self.app.action_quit_soon()
        else:
            self._interrupted_at = time.monotonic()
            self.say("Ctrl+C again quits.", kind="leaving")

    # The chat.

    def action_new(self, name: str = "") -> None:
        self.open(partial(self.app.chats.new, name))

    def action_rename(self) -> None:
        if self.view is not None:
            ask = AskLine(SafeText("Name of this chat"), safe_line(self.view.name))
            self.app.push_screen(ask, self._named)

    def _named(self, name: str | None) -> None:
        if name:
            self.rename(name)

    @work(group="change")
    async def rename(self, name: str) -> None:
        await self.change(lambda chat: chat.rename(name), NOTHING)

    @work(group="change")
    async def action_stats(self) -> None:
        usage = self.view.usage if self.view else None
        rows = usage_rows(usage)
        engine: dict[str, Any] = {}
        if self.app.engine_free:
            try:
                engine = await in_thread(self.app.engine.call, "kv_stats")
            except ChatKVError as error:
                self.tell(error)
        rows += [(safe_line(name.replace("_", " ")), safe_line(v)) for name, v in _flat(engine)]
        self.app.push_screen(ShowTable(SafeText("Numbers of the last reply"), rows))

    def action_restart(self) -> None:
        if self.app.engine.state.phase == "lost":
            self.app.start_engine()
        else:
            self.say("The engine is not lost.")

    # The view.

    def action_scroll_by(self, unit: str, step: int) -> None:
        if unit == "page":
            self.transcript.page(step)
        else:
            self.transcript.scroll_lines(step)

    @work(group="view")
    async def action_view_start(self) -> None:
        await self.transcript.go_to_start()

    @work(group="view")
    async def action_view_end(self) -> None:
        await self.transcript.go_to_end()

    def action_turn(self, step: int) -> None:
        """Move the cursor over turns; below the last is the box."""
        count = len(self.transcript.cards)
        here = self.chosen if self._goal is None else self._goal
        index = (count if here is None else here) + step
        if index >= count:
            self._goal = None
            self.prompt.focus()
            self.action_view_end()
        elif index >= 0 and self._goal is None and (head := self.transcript.head(index)):
            self.point_at(head)
        elif index >= 0:
            self._goal = index
            self._move_cursor(index)

    @work(group="view")
    async def _move_cursor(self, index: int) -> None:
        head = await self.transcript.reveal(index)
        if self._goal == index:  # else the key was pressed again meanwhile
            self.point_at(head)
            self._goal = None

    @on(LinkChosen)
    def show_link(self, event: LinkChosen) -> None:
        event.stop()
        self.app.push_screen(ShowLink(event.address))

    # Slash commands.

    def obey(self, command: Slash) -> None:
        try:
            run_command(self, command)
        except ChatKVError as error:
            self.give_back(f"/{command.name} {command.rest}".rstrip())
            self.tell(error)

    @work(group="change")
    async def set_sampling(self, key: str, value: Any) -> None:
        """Change a sampling setting."""
        said = SafeText(f"{safe_line(key)} is {safe_line(str(value))} from the next turn on.")
        if not await self.change(lambda chat: chat.set(key, value), said):
            self.give_back(f"/set {key} {value}")

    @work(group="change")
    async def set_spec(self, mode: str) -> None:
        """Change how replies are drafted."""
        if isinstance(self.chat, Drafting):
            said = SafeText(f"Drafting is {safe_line(mode)} from the next turn on.")
            await self.change(partial(_set_spec, mode=mode), said)
        else:
            self.say("This chat cannot change how it drafts.")

    @work(group="change")
    async def explain_spec(self) -> None:
        """Say who drafts and what comes of it."""
        if not isinstance(self.chat, Drafting) or not self.app.engine_free:
            self.say("The engine is busy; ask when the reply is there.")
            return
        try:
            self.say(safe_line(await in_thread(self.chat.explain_spec)))
        except ChatKVError as error:
            self.tell(error)


def _set_spec(chat: ChatPort, *, mode: str) -> None:
    if isinstance(chat, Drafting):
        chat.set_spec(mode)


def _flat(found: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, those of a part behind its name."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        elif value is not None:
            shown = f"{value:,.0f}" if isinstance(value, float) else str(value)
            yield prefix + name, shown
