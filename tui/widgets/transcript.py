"""The conversation as it scrolls. Mounts a bounded window of turns; knows cards, no chat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets import Static

from chatkv.errors import plural
from tui.safe_text import NOTHING, SafeText
from tui.widgets.steady import SteadyScroll
from tui.widgets.turn_view import Card, TurnHead, split_reply
from tui.widgets.window import Window

P = ParamSpec("P")
T = TypeVar("T")

SLICE_S = 0.02
"""Pause between two steps of mounting while nothing else happens."""


def _whole(
    method: Callable[Concatenate[Transcript, P], Awaitable[T]],
) -> Callable[Concatenate[Transcript, P], Awaitable[T]]:
    """One at a time, and to the end even if the one who waits is cancelled."""

    async def alone(self: Transcript, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self.lock:
            return await method(self, *args, **kwargs)

    @wraps(method)
    async def shielded(self: Transcript, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(asyncio.ensure_future(alone(self, *args, **kwargs)))

    return shielded


class Transcript(SteadyScroll):
    """Shows cards. All public coroutines may be called from any task; they run one at a time."""

    def __init__(self, *, id: str = "transcript") -> None:
        super().__init__(id=id)
        self.cards: list[Card] = []
        self.window = Window()
        self._mounted: list[Widget] = []
        self._above = Static("", markup=False, classes="edge")
        self._below = Static("", markup=False, classes="edge")
        self.lock = asyncio.Lock()
        self._balancing = False
        self._outside = (0, 0)

    def compose(self) -> ComposeResult:
        yield self._above
        yield self._below

    def on_mount(self) -> None:
        self._above.display = self._below.display = False

    @_whole
    async def show(self, shown: list[Card]) -> None:
        """Show a conversation from its end."""
        self.cards = shown
        self._lay_out()
        self.following = True
        await self._swap(*self.window.tail())

    @_whole
    async def begin(self, index: int, shown: Card) -> None:
        """Put a turn whose reply is coming at that place, and nothing after it. Follows the end."""
        with self.app.batch_update():
            cut = sum(len(card.weights) for card in self.cards[:index])
            keep = max(0, min(self.window.stop, cut) - self.window.start)
            gone, self._mounted = self._mounted[keep:], self._mounted[:keep]
            self.window.stop = self.window.start + keep
            at_end = self.window.stop == cut
            for widget in gone:
                await widget.remove()
            self.cards[index:] = [shown]
            self._lay_out()
            self.following = True
            if at_end:
                await self._mount_below(len(self.window.parts))
            else:
                await self._swap(*self.window.tail())
        self._write_edges()

    @_whole
    async def extend(self, text: SafeText) -> None:
        """Add text to the last reply."""
        await self._extend(text)

    @_whole
    async def settle(self, shown: Card) -> None:
        """The last turn is over: its words change, its text only where it differs."""
        last = self.cards[-1]
        before, after = last.text, shown.text
        if after.startswith(before):
            await self._extend(SafeText(after[len(before) :]))
            shown.reply, shown.weights = last.reply, last.weights
            self.cards[-1] = shown
            self._restate(len(self.cards) - 1)
        else:
            self.cards[-1] = shown
            self._lay_out()
            await self._swap(*self.window.tail())

    def restate(self, shown: Card) -> None:
        """Change the words around the last reply."""
        self.cards[-1] = shown
        self._restate(len(self.cards) - 1)

    def mark(self, shown: list[Card]) -> None:
        """Change what is said beside turns, and whether the model sees them; no text."""
        for index, (old, new) in enumerate(zip(self.cards, shown, strict=False)):
            if (old.gone, old.note, old.rules) != (new.gone, new.note, new.rules):
                old.gone, old.note, old.rules = new.gone, new.note, new.rules
                self._restate(index)

    def head(self, index: int) -> TurnHead | None:
        """The head of a turn, if it is mounted."""
        heads = (part for part in self._mounted if isinstance(part, TurnHead))
        return next((head for head in heads if head.index == index), None)

    @_whole
    async def reveal(self, index: int) -> TurnHead:
        """Make sure that turn is mounted, and return its head."""
        place = self.window.place(index)
        if not self.window.start <= place < self.window.stop:
            self.following = False
            await self._swap(*self.window.from_turn(index))
        head = self._mounted[place - self.window.start]
        assert isinstance(head, TurnHead)
        return head

    async def go_to_start(self) -> None:
        """Show the first turn at the top."""
        if self.cards:
            await self.reveal(0)
            self.following = False
            self.scroll_to(y=0, animate=False)

    @_whole
    async def go_to_end(self) -> None:
        """Show the end and stay there."""
        self.following = True
        if not self.window.at_end:
            await self._swap(*self.window.tail())
        self.refresh(layout=True)

    def parts(self) -> list[Widget]:
        return self._mounted

    @property
    def at_end(self) -> bool:
        return self.window.at_end

    def moved(self) -> None:
        if not self._balancing and self.is_mounted:
            self._balancing = True
            self.set_timer(SLICE_S, self._balance)

    # The window.

    def _lay_out(self) -> None:
        self.window.lay_out([card.weights for card in self.cards])

    def _widget(self, place: int) -> Widget:
        from tui.widgets.markdown import ReplyMarkdown  # after the first frame

        turn, number = self.window.parts[place]
        if number == 0:
            return TurnHead(turn, self.cards[turn])
        shown = self.cards[turn]
        return ReplyMarkdown(shown.reply[number - 1], classes="-gone" if shown.gone else "")

    async def _fill(self, widgets: list[Widget]) -> None:
        from tui.widgets.markdown import ReplyMarkdown

        for widget in widgets:
            if isinstance(widget, ReplyMarkdown):
                await widget.fill()

    async def _swap(self, start: int, stop: int) -> None:
        """Mount that range instead of what is mounted."""
        with self.app.batch_update():
            gone, self._mounted = self._mounted, []
            for widget in gone:
                await widget.remove()
            self.forget_place()
            self.window.start = self.window.stop = start
            await self._mount_below(stop)
        self._write_edges()

    async def _mount_below(self, stop: int) -> None:
        fresh = [self._widget(place) for place in range(self.window.stop, stop)]
        self.window.stop = stop
        self._mounted += fresh
        if fresh and self.is_attached:
            await self.mount_all(fresh, before=self._below)
            await self._fill(fresh)

    async def _mount_above(self, start: int) -> None:
        fresh = [self._widget(place) for place in range(start, self.window.start)]
        self.window.start = start
        self._mounted[:0] = fresh
        if self.is_attached:
            await self.mount_all(fresh, after=self._above)
        await self._fill(fresh)

    async def _remove(self, widget: Widget) -> None:
        """Take the first or last mounted part out."""
        if widget is self._mounted[0]:
            self.window.start += 1
        else:
            self.window.stop -= 1
        self._mounted.remove(widget)
        if widget.has_focus:
            self.screen.set_focus(None)
        await widget.remove()

    async def _extend(self, text: SafeText) -> None:
        if not text or not self.cards:
            return
        last = self.cards[-1]
        shown = last.reply[-1] if last.reply else NOTHING
        at_end = self.window.at_end
        first, *rest = split_reply(SafeText(shown + text), not_before=len(shown))
        last.reply[-1:] = [first, *rest]
        last.reweigh()
        self._lay_out()
        if not at_end:
            self.miss(text.count("\n"))
            return
        from tui.widgets.markdown import ReplyMarkdown

        widget = self._mounted[-1]
        if isinstance(widget, ReplyMarkdown):
            await widget.add(SafeText(first[len(shown) :]))
        if len(self.window.parts) > self.window.stop:
            await self._grow()
        self._write_edges()

    async def _grow(self) -> None:
        """Mount new parts at the end; while following, the first ones make room for them."""
        stop, start = len(self.window.parts), self.window.start
        while not self.window.fits(start, stop):
            start += 1
        if start == self.window.start:
            await self._mount_below(stop)
        elif self.following and start < self.window.stop:
            with self.app.batch_update():
                while self.window.start < start:
                    await self._remove(self._mounted[0])
                await self._mount_below(stop)
        elif self.following:
            await self._swap(*self.window.tail())

    def _restate(self, index: int) -> None:
        if (head := self.head(index)) is not None:
            head.show(self.cards[index])
        gone = bool(self.cards[index].gone)
        for place, widget in enumerate(self._mounted, self.window.start):
            turn, number = self.window.parts[place]
            if turn == index and number:
                widget.set_class(gone, "-gone")

    def _write_edges(self) -> None:
        outside = self.window.turns_above, self.window.turns_below
        if outside != self._outside:
            self._outside = above, below = outside
            self._above.update(f"↑ {plural(above, 'turn')} above")
            self._below.update(f"↓ {plural(below, 'turn')} below · End goes there")
            self._above.display, self._below.display = above > 0, below > 0

    async def _balance(self) -> None:
        """One step towards a screenful and a half of turns on each side of the view."""
        async with self.lock:
            self._balancing = False
            with self.app.batch_update():
                moved = await self._step()
            if moved:
                self._write_edges()
        if moved:
            self.moved()

    async def _step(self) -> bool:
        height, window = self.size.height, self.window
        if not height or not self._mounted:
            return False
        above, below = self.scroll_y, max(0.0, self.max_scroll_y - self.scroll_y)
        margin = 1.5 * height
        small = self.virtual_size.height < 2 * height
        turns = len(self.cards) if small else None
        if not self._fits(window.start, window.stop, turns) and await self._trim():
            return True
        if above < margin and window.start > 0:
            start = window.part_above()
            last = self._mounted[-1]
            if self._fits(start, window.stop, turns):
                await self._mount_above(start)
                return True
            if below - last.size.height > above and self._may_go(last):
                await self._remove(last)
                return True
        if below < margin and not window.at_end:
            stop = window.part_below()
            first = self._mounted[0]
            if self._fits(window.start, stop, turns):
                await self._mount_below(stop)
                return True
            if above - first.size.height > below and self._may_go(first):
                await self._remove(first)
                return True
        return False

    async def _trim(self) -> bool:
        """Remove one part that is out of sight, at the end that is farther from the view."""
        first, last = self._mounted[0], self._mounted[-1]
        above, below = self.scroll_y, self.max_scroll_y - self.scroll_y
        if above >= below and first.virtual_region.bottom <= above and self._may_go(first):
            await self._remove(first)
        elif last.virtual_region.y >= above + self.size.height and self._may_go(last):
            await self._remove(last)
        else:
            return False
        return True

    def _may_go(self, part: Widget) -> bool:
        """Whether a part out of sight may be removed: not the cursor's, not the end one follows."""
        end_followed = self.following and part is self._mounted[-1]
        return len(self._mounted) > 1 and not part.has_focus and not end_followed

    def _fits(self, start: int, stop: int, turns: int | None) -> bool:
        return (
            self.window.fits(start, stop) if turns is None else self.window.fits(start, stop, turns)
        )
