"""F6: what the model sees of a chat, and what it costs to change that. Nothing changes before
Enter."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from chatkv.errors import ChatKVError
from chatkv.events import Usage
from sessions.port import ChatPort, ContextTurn, ContextView
from tui.safe_text import NOTHING, SafeText, safe_line
from tui.threads import in_thread
from tui.wording import clip, error_text, pad, price_text

if TYPE_CHECKING:
    from tui.app import ChatApp

SEEN = ("live", "partly")
STUCK = {
    "redacted": "A redacted turn never comes back.",
    "unanswered": "A turn without a reply is never shown to the model.",
}
WHY = {
    "user": "you",
    "turns": "window full",
    "oldest": "window full",
    "window": "window slid",
    "summarize": "summarised",
}


class ContextScreen(ModalScreen[bool]):
    """Shows each turn and whether the model sees it. Returns whether something was changed.

    Args:
        chat: Whose.
        view: One reading of it.
        usages: Numbers of earlier replies: how fast prompts were computed.
    """

    BINDINGS: ClassVar = [
        Binding("space", "toggle_turn", show=False),
        Binding("p", "pin", show=False),
        Binding("a", "all_back", show=False),
        Binding("enter", "apply", show=False, priority=True),
        Binding("escape,ctrl+c,f6", "leave", show=False),
    ]
    AUTO_FOCUS = "#context-turns"

    app: ChatApp

    def __init__(self, chat: ChatPort, view: ContextView, usages: list[Usage | None]) -> None:
        super().__init__()
        self._chat, self._view, self._usages = chat, view, usages
        self._changed = False
        self._wanted = self._now(view)
        """Numbers of the turns the model is to see."""
        self._refused = False
        self._list = OptionList(id="context-turns", markup=False, compact=True)
        self._head = Static("", markup=False, id="context-head")
        self._price = Static("", markup=False, id="context-price")

    @staticmethod
    def _now(view: ContextView) -> set[int]:
        """What it will see with the next turn as things stand."""
        seen = {turn.number for turn in view.turns if turn.state in SEEN}
        return (seen | set(view.recall)) - set(view.forget)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="context"):
            yield Static("What the model sees", classes="dialog-title")
            yield self._head
            yield self._list
            yield self._price
            keys = "Space Toggle   p Pin   a All back   Enter Apply   Esc Cancel"
            yield Static(keys, classes="dialog-keys")

    def on_mount(self) -> None:
        self._write()
        if self._view.turns:
            gone = [i for i, turn in enumerate(self._view.turns) if turn.state not in SEEN]
            self._list.highlighted = gone[0] if gone else len(self._view.turns) - 1
        self._ask_price()

    # Showing.

    def _write(self) -> None:
        """Bring head and rows up to date."""
        view, place = self._view, self._list.highlighted
        system = "" if view.system_tokens is None else f" ({view.system_tokens})"
        limit = f"{view.limit:,}" if view.limit else "unknown"
        limit += f" ({view.limit_reason})" if view.limit_reason else ""
        used = "unknown" if view.used is None else f"{view.used:,}"
        self._head.update(
            Content(
                f"Window {limit}, {view.reserved:,} kept for the reply; in sight {used}. Policy "
                f"{safe_line(view.policy)}.\nAlways kept: system prompt{system}, pinned turns, "
                "the newest 2."
            )
        )
        width = max(40, (self._list.size.width or 70) - 2)
        self._list.clear_options()
        self._list.add_options(Option(Content(self._row(turn, width))) for turn in view.turns)
        if place is not None:
            self._list.highlighted = place

    def _row(self, turn: ContextTurn, width: int) -> SafeText:
        tokens = "?" if turn.tokens is None else f"{turn.tokens:,}"
        if turn.state in STUCK:
            mark, why = " - ", turn.state
        else:
            wanted = turn.number in self._wanted
            mark = "[x]" if wanted else "[ ]"
            seen = turn.state in SEEN
            why = "" if wanted and seen else "comes back" if wanted else WHY.get(turn.why, turn.why)
            why = "goes" if seen and not wanted else why
            why = why or (f"partly, {turn.why}" if turn.state == "partly" else turn.kept)
            why = why or ("summary" if turn.summary else "")
        star = "★" if turn.pinned else " "
        rest = f"{tokens:>7}  {why:<12} {mark}"
        words = clip(safe_line(turn.prompt), max(8, width - 8 - len(rest)))
        return SafeText(
            f"{star}{turn.number:>4}  {pad(words, max(8, width - 8 - len(rest)))}{rest}"
        )

    # Changing.

    def _changes(self) -> tuple[list[int], list[int]]:
        """Turns that go and turns that come back, against what will be as things stand."""
        now = self._now(self._view)
        return sorted(now - self._wanted), sorted(self._wanted - now)

    def _chosen(self) -> ContextTurn | None:
        place = self._list.highlighted
        return None if place is None else self._view.turns[place]

    def action_toggle_turn(self) -> None:
        turn = self._chosen()
        if turn is None:
            return
        if turn.state in STUCK:
            self._say(SafeText(STUCK[turn.state]))
            return
        self._wanted ^= {turn.number}
        self._write()
        self._ask_price()

    def action_all_back(self) -> None:
        self._wanted = {turn.number for turn in self._view.turns if turn.state not in STUCK}
        self._write()
        self._ask_price()

    @work(group="pin")
    async def action_pin(self) -> None:
        turn = self._chosen()
        if turn is None:
            return
        try:
            pin = partial(self._chat.pin, [turn.number], pinned=not turn.pinned)
            warning = await in_thread(pin)
            self._view = await in_thread(self._chat.context)
        except ChatKVError as error:
            self._tell(error)
            return
        self._changed = True
        self._write()
        if warning:
            self._say(safe_line(warning))

    @work(exclusive=True, group="price")
    async def _ask_price(self) -> None:
        """What the next turn would have to do, before it is done."""
        goes, back = self._changes()
        self._refused = False
        if not self.app.engine_free:
            self._say(SafeText("The price is shown when the engine is free."))
            return
        self._say(SafeText("Looking at what is stored ..."))
        try:
            price = await in_thread(partial(self._chat.price, goes, back))
        except ChatKVError as error:
            self._refused = True
            self._tell(error)
            return
        after = f"After this: {price.live:,}/{self._view.limit:,}. " if self._view.limit else ""
        self._say(SafeText(f"{after}The next turn: {price_text(price, self._usages)}."))

    @work(exclusive=True, group="apply")
    async def action_apply(self) -> None:
        goes, back = self._changes()
        try:
            if goes:
                await in_thread(self._chat.forget, goes)
            if back:
                await in_thread(self._chat.recall, back)
        except ChatKVError as error:
            self._tell(error)
            return
        self.dismiss(self._changed or bool(goes or back))

    def action_leave(self) -> None:
        self.dismiss(self._changed)

    def _tell(self, error: ChatKVError) -> None:
        message, hint = error_text(error)
        self._say(SafeText(f"{message} {hint}"))

    def _say(self, words: SafeText = NOTHING) -> None:
        self._price.update(Content(words))
