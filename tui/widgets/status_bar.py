"""The lines around the transcript: header, notice, numbers, keys. Told, they ask nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from textual import events
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from chatkv.events import Usage
from tui.actions import by_id, key_name
from tui.safe_text import NOTHING, SafeText
from tui.wording import bar, clip

WIDE = 80
"""Below this many columns a line keeps only its most wanted parts."""
GAP = "  "
MUTED = "$foreground-muted"
LEVELS = {"warning": "$text-warning", "error": "$text-error", "info": "$text-accent"}
"""How the context is coloured when something of it is about to change."""


class SplitLine(Widget):
    """One line with a left and a right part; the left one is cut when both do not fit."""

    DEFAULT_CSS = "SplitLine { height: 1; width: 1fr; }"

    left = reactive(NOTHING)
    right = reactive(NOTHING)

    def __init__(
        self,
        left: SafeText = NOTHING,
        right: SafeText = NOTHING,
        *,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.set_reactive(SplitLine.left, left)
        self.set_reactive(SplitLine.right, right)

    def render(self) -> Content:
        width = self.content_size.width
        right = clip(self.right, width)
        left = clip(self.left, max(0, width - cell_len(right) - (1 if right else 0)))
        gap = max(0, width - cell_len(left) - cell_len(right))
        return Content.assemble((left, "bold"), " " * gap, (right, "$foreground-muted"))


class Header(SplitLine):
    """`chatkv  NAME › FORK` and the model with one word for what it does."""

    fork = reactive(NOTHING)
    """Shown after the name, which is cut first."""
    parts: reactive[tuple[SafeText, ...]] = reactive(())
    """Model, place, drafting, word: the middle makes room for the name, the word always stays."""

    def render(self) -> Content:
        width = self.content_size.width
        fork = SafeText(f" › {clip(self.fork, width // 4)}") if self.fork else NOTHING
        brand = SafeText("chatkv  ") if width >= 60 else NOTHING
        wanted = len(brand) + cell_len(self.left) + cell_len(fork) + 2
        right = clip(self._right(width, wanted), width)
        room = max(0, width - cell_len(right) - 2 - len(brand))
        left = SafeText(clip(self.left, max(0, room - cell_len(fork))) + fork)
        left = clip(left, room)
        gap = max(0, width - len(brand) - cell_len(left) - cell_len(right))
        return Content.assemble(
            (brand, "bold $text-accent"), (left, "bold"), " " * gap, (right, "$foreground-muted")
        )

    def _right(self, width: int, wanted: int) -> SafeText:
        parts = [part for part in self.parts if part]
        joined = " · ".join(parts)
        while len(parts) > 2 and cell_len(joined) + wanted > width:
            del parts[-2]
            joined = " · ".join(parts)
        if len(parts) > 1 and cell_len(joined) > width * 2 // 3:
            joined = parts[-1]
        return SafeText(joined)


class Notice(Static):
    """What must be said now: an error and its way out, a queued message, a hint. Or hidden."""

    DEFAULT_CSS = "Notice { height: auto; max-height: 6; width: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__("", markup=False, id=id)
        self.display = False
        self.kind = ""
        self.message = NOTHING

    def say(self, message: SafeText, hint: SafeText = NOTHING, *, kind: str = "info") -> None:
        """Show it. `kind` is `error`, `warning`, `info` or `hint`."""
        self.set_classes(f"-{kind}")
        self.kind, self.message = kind, message
        parts: list[str | tuple[str, str]] = [(message, "" if kind == "hint" else "bold")]
        if hint:
            parts += ["  ", (hint, "$foreground-muted")]
        self.update(Content.assemble(*parts))
        self.display = bool(message)

    def clear(self, *kinds: str) -> None:
        """Hide it, or only if it is of these kinds."""
        if not kinds or self.kind in kinds:
            self.kind, self.message = "", NOTHING
            self.display = False


class StatusBar(Widget):
    """`ctx used/limit`, reused, computed, tokens per step, tok/s: as the engine measured them."""

    DEFAULT_CSS = "StatusBar { height: 1; width: 1fr; }"

    usage: reactive[Usage | None] = reactive(None)
    limit = reactive(0)
    """Context of the model, known before the first reply."""
    prefix = reactive(NOTHING)
    """Whose numbers these are, when it is not the newest reply."""
    coming = reactive(NOTHING)
    """What the next turn will put out of the model's sight."""
    level = reactive("")
    """How that is shown: `error`, `warning` or `info`; `warning` alone colours the context."""

    def render(self) -> Content:
        width = self.content_size.width
        parts = _fitting(self._parts(width), width)
        style = LEVELS.get(self.level, MUTED)
        return Content.assemble(
            *_joined([(part, style if part.startswith("ctx") else MUTED) for part in parts])
        )

    def _parts(self, width: int) -> list[tuple[int, str]]:
        """(rank, text) in reading order; the highest ranks go first when there is no room."""
        usage = self.usage or Usage()
        limit = usage.context_limit or self.limit
        parts = []
        if self.prefix:
            parts.append((0, str(self.prefix)))
        if limit and self.coming:
            parts.append((1, f"ctx {usage.context_used}/{limit}  {self.coming}"))
        elif limit:
            if width >= WIDE - 2:
                blocks = bar(usage.context_used, limit, 10)
                parts.append((1, f"ctx {blocks} {usage.context_used}/{limit}"))
            else:
                parts.append((1, f"ctx {100 * usage.context_used // limit}%"))
        if usage.pages_total and width >= 100:
            parts.append((6, f"kv {usage.pages_used}/{usage.pages_total} pg"))
        if usage.prompt_tokens:
            parts.append((3, f"reused {usage.cached_tokens}/{usage.prompt_tokens}"))
            parts.append((5, f"computed {usage.prompt_n}"))
        if usage.hit_rate is not None and usage.hit_rate < 1:
            parts.append((4, f"hit {100 * usage.hit_rate:.0f}%"))
        if usage.steps:
            parts.append((4, f"{usage.tokens_per_step:.1f}/step"))
        if usage.predicted_ms:
            parts.append((2, f"{usage.tokens_per_second:.0f} tok/s"))
        return parts


def _fitting(parts: list[tuple[int, str]], width: int) -> list[str]:
    parts = list(parts)
    while parts and cell_len(GAP.join(text for _, text in parts)) > width:
        parts.remove(max(parts))
    return [text for _, text in parts]


def _joined(texts: Iterable[tuple[str, str]]) -> list[str | tuple[str, str]]:
    out: list[str | tuple[str, str]] = []
    for text in texts:
        if out:
            out.append(GAP)
        out.append(text)
    return out


class KeyLine(Widget):
    """The keys that do something now; a click does it too."""

    DEFAULT_CSS = "KeyLine { height: 1; width: 1fr; }"

    keys: reactive[Sequence[tuple[str, str, str]]] = reactive(())
    """Key, label, and the Textual action of a click."""

    def render(self) -> Content:
        out: list[str | tuple[str, str]] = []
        for key, label, _run in self._fitting():
            out += [(key, "bold $text-accent"), (f" {label}", "$foreground-muted"), GAP]
        return Content.assemble(*out[:-1])

    async def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        place = 0
        for key, label, run in self._fitting() if offset else ():
            width = cell_len(key) + 1 + cell_len(label) + len(GAP)
            if offset is not None and place <= offset.x < place + width and run:
                await self.app.run_action(run, default_namespace=self)
            place += width

    def _fitting(self) -> Iterator[tuple[str, str, str]]:
        room = self.content_size.width
        for key, label, run in self.keys:
            room -= cell_len(key) + 1 + cell_len(label)
            if room < 0:
                return
            yield key, label, run
            room -= len(GAP)


def key_hints(*action_ids: str) -> list[tuple[str, str, str]]:
    """What `KeyLine` shows of some actions: `a+b` is a pair under the first one's label."""
    hints = []
    for pair in action_ids:
        found = [by_id(name) for name in pair.split("+")]
        keys = " ".join(key_name(action.keys.split(",")[0], short=True) for action in found)
        hints.append((keys, found[0].label, found[0].run))
    return hints
