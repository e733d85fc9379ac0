"""The box one types in. Knows text, chips and earlier prompts; nothing of chats or engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.reactive import reactive
from textual.widgets import Input, TextArea
from textual.widgets.text_area import EditResult

from tui.actions import bindings
from tui.messages import Submitted, Typed
from tui.safe_text import SafeText, pasted, safe_line, safe_text

CHIP_LINES = 200
CHIP_CHARS = 20_000
"""A paste longer than either becomes a chip: a short stand-in for the exact text."""
MAX_CHIPS = 50

_CHIP = re.compile(r"\[paste \d+: [\d,]+ (?:lines|characters)\]")


class PromptBox(TextArea):
    """A box of one to eight lines. Enter posts `Submitted`; every change posts `Typed`."""

    BINDINGS: ClassVar = [*bindings("typing", priority=True)]

    dimmed = reactive(False, toggle_class="dimmed")
    """Whether the box edits an earlier prompt."""

    def __init__(self, *, id: str = "prompt") -> None:
        super().__init__(
            id=id, compact=True, highlight_cursor_line=False, show_line_numbers=False,
            tab_behavior="focus", soft_wrap=True,
        )  # fmt: skip
        self.cursor_blink = False
        self._chips: dict[str, str] = {}
        self._earlier: Sequence[str] = ()
        self._place: int | None = None
        self._draft = ""
        self._put: str | None = None
        self.completer: Callable[[str], SafeText | None] = lambda text: None

    @property
    def draft(self) -> str:
        """The text as it would be sent."""
        return _CHIP.sub(lambda chip: self._chips.get(chip[0], chip[0]), self.text)

    def put(self, text: str) -> None:
        """Show a text to be sent or changed; a huge one as a chip. Undo brings the old one back."""
        self._put = self._shown(text)
        self._replace_all(self._put)
        self._place = None

    def clear(self) -> EditResult:
        """Empty the box, as a step of its own for undo."""
        self.history.checkpoint()
        return super().clear()

    def earlier(self, prompts: Sequence[str]) -> None:
        """What Up goes back to, oldest first."""
        self._earlier, self._place = prompts, None

    # The app runs these actions before keys that were typed earlier and wait in this box's queue;
    # behind them in the same queue they act on what was typed.

    def action_send(self) -> None:
        self.call_later(self._send)

    def action_newline(self) -> None:
        self.call_later(self.insert, "\n")

    def action_complete(self) -> None:
        self.call_later(self._complete)

    def _send(self) -> None:
        text = self.draft
        self.clear()
        self._place = None
        self.post_message(Submitted(text))

    def _complete(self) -> None:
        whole = self.completer(self.text)
        if whole is not None:
            self._replace_all(whole)

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        if self.text != self._put:
            self.post_message(Typed(self.text))
        self._put = None

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        done = self.replace(self._shown(pasted(event.text)), *self.selection)
        self.move_cursor(done.end_location)

    async def _on_key(self, event: events.Key) -> None:
        step = {"up": -1, "down": 1}.get(event.key, 0)
        at_edge = self.cursor_at_first_line if step < 0 else self.cursor_at_last_line
        if step and at_edge and self._recall(step):
            taken = True
        elif event.key in ("pageup", "pagedown", "shift+up", "shift+down"):
            taken = await self._scroll_transcript(event.key)
        elif event.key == "home" and not self.text:
            taken = await self._run("screen.view_start")
        elif event.key == "end" and self.cursor_at_end_of_text:
            taken = await self._run("screen.view_end")
        elif event.key == "ctrl+d" and not self.text:
            taken = await self._run("app.quit")
        else:
            taken = False
        if taken:
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    async def _scroll_transcript(self, key: str) -> bool:
        unit, step = ("page" if "page" in key else "line"), (-1 if key.endswith("up") else 1)
        return await self._run(f"screen.scroll_by({unit!r}, {step})")

    async def _run(self, action: str) -> bool:
        await self.app.run_action(action, default_namespace=self)
        return True

    def _recall(self, step: int) -> bool:
        """Show the prompt before or after; past the newest one, what was being typed."""
        place = len(self._earlier) if self._place is None else self._place
        goal = place + step
        if not 0 <= goal <= len(self._earlier) or (self._place is None and step > 0):
            return False
        if self._place is None:
            self._draft = self.draft
        if goal == len(self._earlier):
            self.put(self._draft)
        else:
            self.put(self._earlier[goal])
            self._place = goal
        return True

    def _shown(self, text: str) -> SafeText:
        lines = text.count("\n") + 1
        if lines <= CHIP_LINES and len(text) <= CHIP_CHARS:
            return safe_text(text)
        size = f"{lines:,} lines" if lines > CHIP_LINES else f"{len(text):,} characters"
        chip = f"[paste {len(self._chips) + 1}: {size}]"
        if len(self._chips) >= MAX_CHIPS:
            self._chips.pop(next(iter(self._chips)))
        self._chips[chip] = text
        return SafeText(chip)

    def _replace_all(self, text: SafeText) -> None:
        self.replace(text, (0, 0), self.document.end, maintain_selection_offset=False)
        self.move_cursor(self.document.end)


class Field(Input):
    """An input of one line that shows and takes only safe text."""

    def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.insert_text_at_cursor(safe_line(pasted(event.text)))
