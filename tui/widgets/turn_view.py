"""One turn as text to show: head, prompt, numbers, reply in parts. Knows records, no scrolling."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from sessions.port import TurnView
from tui.actions import bindings
from tui.messages import CursorMoved
from tui.safe_text import NOTHING, SafeText, safe_text
from tui.widgets.status_bar import SplitLine
from tui.wording import clock, moment_text, reply_end, reply_numbers

PART_WEIGHT = 60
"""Widgets of one part of a reply, about."""
HEAD_WEIGHT = 4
ASSISTANT = SafeText("assistant")
SUMMARY = SafeText("summary")
"""In place of the names of both sides, where nobody was asked: the model wrote it for itself."""
MAX_PROMPT_LINES = 40
MAX_PROMPT_CHARS = 4_000

GONE = {
    "forgotten": "not in context",
    "summarised": "not in context: summarised",
    "partly": "partly in context",
    "redacted": "redacted",
}
"""How a turn says that the model does not see it."""

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARKERS = re.compile(r"\s*(?:(?:[-*+>]|\d{1,9}[.)])\s+|>)")


@dataclass(slots=True)
class Card:
    """What the transcript shows of one turn."""

    number: int
    prompt: SafeText
    reply: list[SafeText]
    """Parts that joined are the whole reply."""
    left: SafeText = ASSISTANT
    right: SafeText = NOTHING
    """Numbers of the reply, or what it is doing."""
    note: SafeText = NOTHING
    """Siblings and time."""
    gone: SafeText = NOTHING
    """That the model does not see the turn, if it does not."""
    rules: list[SafeText] = field(default_factory=list)
    """What went out of sight, or came back, with this turn."""
    weights: list[int] = field(default_factory=list)
    """Widgets of the head and of each part, at most about."""

    def __post_init__(self) -> None:
        self.reweigh()

    def reweigh(self) -> None:
        """Bring `weights` up to date with `reply`."""
        self.weights = [HEAD_WEIGHT + bool(self.rules), *(2 + weigh(part) for part in self.reply)]

    @property
    def text(self) -> SafeText:
        """The reply shown so far."""
        return SafeText("".join(self.reply))


def card(turn: TurnView) -> Card:
    """The card of a stored turn."""
    end = reply_end(turn.state, turn.finish_reason, turn.usage, text=bool(turn.reply))
    numbers = [end] if end else []
    siblings = f"‹ {turn.sibling}/{turn.siblings} ›" if turn.siblings > 1 else ""
    gone = GONE.get(turn.seen, "")
    pinned = "★ pinned" if turn.pinned else ""
    note = "  ".join(part for part in (gone, pinned, siblings, clock(turn.created_at)) if part)
    purged = turn.redacted and not turn.prompt
    return Card(
        turn.number,
        SafeText("(the text was purged)") if purged else folded(turn.prompt),
        split_reply(safe_text(turn.reply)),
        left=SUMMARY if turn.summary else ASSISTANT,
        right=SafeText(" · ".join([*numbers, *reply_numbers(turn.usage, length=not numbers)])),
        note=SafeText(note),
        gone=SafeText(gone),
        rules=[moment_text(moment) for moment in turn.moments],
    )


def cards(turns: Iterable[TurnView]) -> list[Card]:
    """The cards of a conversation. A thousand turns take a tenth of a second: call in a thread."""
    return [card(turn) for turn in turns]


def folded(prompt: str) -> SafeText:
    """A prompt as typed, cut when it is very long; the whole one is sent and copied."""
    lines = prompt[: MAX_PROMPT_CHARS * 2].split("\n", MAX_PROMPT_LINES)
    shown = "\n".join(lines[:MAX_PROMPT_LINES])[:MAX_PROMPT_CHARS]
    rest = prompt[len(shown) :]
    if not rest:
        return safe_text(prompt)
    return SafeText(f"{safe_text(shown)}\n· {len(rest):,} more characters")


def weigh(text: str) -> int:
    """About the most widgets that Markdown text becomes. Counts lines and markers."""
    return sum(_line_weights(text.split("\n")))


def split_reply(text: SafeText, *, not_before: int = 0) -> list[SafeText]:
    """Cut a reply at block borders into parts of about 60 widgets.

    Args:
        text: The reply, or its last part.
        not_before: No cut before this place: so much is shown already.

    Returns:
        Slices that joined are `text`. A cut depends only on the lines up to it.
    """
    parts: list[SafeText] = []
    start = place = weight = 0
    lines = text.split("\n")
    blank = False
    for line, line_weight, inside in zip(
        lines, _line_weights(lines), _in_fence(lines), strict=True
    ):
        flush_left = not line.startswith((" ", "\t"))
        border = flush_left and (blank or bool(_MARKERS.match(line)))
        full = weight >= PART_WEIGHT and (border or weight >= 2 * PART_WEIGHT)
        if full and line and not inside and place >= max(1, not_before):
            parts.append(SafeText(text[start:place]))
            start, weight = place, 0
        weight += line_weight
        blank = not line.strip()
        place += len(line) + 1
    parts.append(SafeText(text[start:]))
    return parts


def _line_weights(lines: list[str]) -> Iterable[int]:
    for line, inside in zip(lines, _in_fence(lines), strict=True):
        if inside or not line.strip():
            yield 0
        elif _FENCE.match(line):
            yield 2
        else:
            markers, place = 0, 0
            while found := _MARKERS.match(line, place):
                markers, place = markers + 1, found.end()
            yield 1 + markers + line.count("|")


def _in_fence(lines: list[str]) -> Iterable[bool]:
    """Whether each line is the inside or the end of a fenced block."""
    fence = ""
    for line in lines:
        found = _FENCE.match(line)
        yield bool(fence)
        if not fence and found:
            fence = found[1]
        elif fence and found and found[1].startswith(fence) and not line[found.end() :].strip():
            fence = ""


class TurnHead(Vertical, can_focus=True):
    """The prompt of a turn between its own and the reply's head line. Holds the turn cursor."""

    BINDINGS: ClassVar = [*bindings("turn")]

    def __init__(self, index: int, shown: Card) -> None:
        super().__init__(classes="turn")
        self.index = index
        self._rule = Static("", markup=False, classes="forget-rule")
        self._head = SplitLine(classes="turn-head")
        self._prompt = Static(Content(shown.prompt), markup=False, classes="turn-prompt")
        self._reply = SplitLine(classes="reply-head")
        self.card = shown
        self._write()

    def compose(self) -> ComposeResult:
        yield self._rule
        yield self._head
        yield self._prompt
        yield self._reply

    def show(self, shown: Card) -> None:
        """Show another state of the same turn."""
        if shown.prompt != self.card.prompt:
            self._prompt.update(Content(shown.prompt))
        self.card = shown
        self._write()

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self._write()
        self.post_message(CursorMoved())

    def _write(self) -> None:
        cursor = "▶" if self.has_focus else "░" if self.card.gone else " "
        self.set_class(bool(self.card.gone), "-gone")
        self._rule.display = bool(self.card.rules)
        self._rule.update(Content("\n".join(f"── {rule}" for rule in self.card.rules)))
        who = SUMMARY if self.card.left is SUMMARY else "you"
        self._head.left = SafeText(f"{cursor} {self.card.number} {who}")
        self._head.right = self.card.note
        self._reply.left = self.card.left
        self._reply.right = self.card.right
