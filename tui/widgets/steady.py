"""A scroll view that holds still. Knows children and heights, nothing of what they show.

Following: each layout ends at the bottom. Reading: each layout keeps the first visible child where
it was, whatever is mounted, removed or grows above it. Both happen while the layout is made, so no
frame shows anything else.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.reactive import reactive
from textual.scrollbar import ScrollBar
from textual.widget import Widget


class SteadyScroll(VerticalScroll, can_focus=False, inherit_bindings=False):
    """Follows the end, or keeps the line under the eye."""

    BINDINGS: ClassVar[list[BindingType]] = []

    following = reactive(True)
    """Whether the view stays at the end."""
    missed = reactive(0)
    """Lines that came below while reading."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._held: tuple[Widget, int] | None = None
        self._last: tuple[Widget, int] | None = None
        self._wanted: Widget | None = None

    def parts(self) -> list[Widget]:
        """The children that can be held, top to bottom."""
        raise NotImplementedError

    @property
    def at_end(self) -> bool:
        """Whether the last part is the end of what there is."""
        raise NotImplementedError

    def moved(self) -> None:
        """The layout or the place in it has changed."""
        raise NotImplementedError

    def scroll_lines(self, lines: int) -> None:
        """Scroll by lines, negative up."""
        self.scroll_to(y=self.scroll_y + lines, animate=False, immediate=True)

    def page(self, step: int) -> None:
        """Scroll by a screenful less one line."""
        self.scroll_lines(step * max(1, self.size.height - 1))

    def jump(self, y: float) -> None:
        """Be at a line from the next layout on, without moving the view now."""
        self.set_reactive(Widget.scroll_y, y)  # pyright: ignore[reportArgumentType]
        self.set_reactive(Widget.scroll_target_y, y)  # pyright: ignore[reportArgumentType]

    def bring(self, part: Widget) -> None:
        """Have that part in sight from the next layout on, at the top if it is not yet."""
        self._wanted = part
        self.following = False
        self.refresh(layout=True)

    def forget_place(self) -> None:
        """Hold nothing: other parts are about to be shown, from their top."""
        self._held = self._last = None
        self.jump(0)

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        result = super().arrange(size, optimal)
        if not optimal:
            self._hold_still(result, size.height)
        return result

    def _hold_still(self, result: DockArrangeResult, height: int) -> None:
        regions = {placement.widget: placement.region for placement in result.placements}
        bottom = result.total_region.bottom
        goal = self.scroll_y
        wanted, self._wanted = regions.get(self._wanted) if self._wanted else None, None
        if self.following:
            goal = max(0, bottom - height)
        elif wanted is not None:
            if not goal <= wanted.y <= goal + height - min(height, wanted.height):
                goal = max(0, min(wanted.y, bottom - height))
        elif self._held is not None and (region := regions.get(self._held[0])) is not None:
            goal = max(0, self.scroll_y + region.y - self._held[1])
        if goal != self.scroll_y:
            self.jump(goal)
            self.vertical_scrollbar.set_reactive(ScrollBar.position, goal)
        parts = [part for part in self.parts() if part in regions]
        seen = next((part for part in parts if regions[part].bottom > goal), None)
        self._held = (seen, regions[seen].y) if seen is not None else None
        if parts and self.at_end:
            self._count_missed(parts[-1], regions[parts[-1]].height)
        self.moved()

    def _count_missed(self, last: Widget, height: int) -> None:
        if self._last is not None and self._last[0] is last and not self.following:
            self.miss(height - self._last[1])
        self._last = (last, height)

    def miss(self, lines: int) -> None:
        """Count lines that came below, after this layout."""
        if lines > 0 and not self.following:
            self.call_later(setattr, self, "missed", self.missed + lines)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value >= self.max_scroll_y and self.at_end:
            self.following = True
        elif new_value < old_value:
            self.following = False
        self.moved()

    def watch_following(self, following: bool) -> None:
        if following:
            self.missed = 0

    def on_resize(self, event: events.Resize) -> None:
        self.moved()
