"""The running reply, drawn into a transcript. Knows when and how much; starts and stops nothing."""

from __future__ import annotations

import time

from textual.screen import Screen
from textual.timer import Timer

from tui.reply import Reply
from tui.safe_text import NOTHING, SafeStream, SafeText
from tui.turns import spans
from tui.widgets.transcript import Transcript
from tui.widgets.turn_view import Card, folded
from tui.wording import count, moment_text

FLOOR_S, CEILING_S = 0.08, 0.6
"""Shortest and longest pause between drawings: a busy machine must not make a reply stand still."""
SHARE = 16.0
"""A drawing is followed by a pause of sixteen times what it cost: at most a seventeenth of a core,
since the engine wants all of them. With six the screen took a fifth of the decode rate."""


class Live:
    """Text arrives at the engine's pace and is drawn at the screen's."""

    def __init__(self, reply: Reply, screen: Screen[None], transcript: Transcript) -> None:
        self.reply = reply
        self._screen = screen
        self._transcript = transcript
        self._safe = SafeStream()
        self._timer: Timer | None = None
        self._cost_s = 0.0
        self.begun = self.closed = False

    async def begin(self, index: int, number: int) -> None:
        """Put the turn at that place of the transcript; all after it goes."""
        shown = Card(
            number, folded(self.reply.prompt), [NOTHING], right=self.words, rules=self.rules
        )
        await self._transcript.begin(index, shown)
        self.begun = True
        self.wake()

    @property
    def rules(self) -> list[SafeText]:
        """What went out of the model's sight with it."""
        return [moment_text(moment) for moment in self.reply.moments]

    @property
    def words(self) -> SafeText:
        """What the reply is doing, for its head."""
        reply = self.reply
        if reply.phase == "prefill" and reply.prefill is not None and reply.prefill.total:
            return SafeText(f"reading {reply.prefill.done}/{reply.prefill.total} tok")
        if reply.phase == "summarizing" and reply.summary is not None:
            which = spans(list(reply.summary.turns))
            return SafeText(f"summing up {which} · {count(reply.summary.done)} tok")
        if reply.phase == "generating":
            return SafeText(f"generating · {count(reply.tokens)} tok")
        return SafeText("waiting" if reply.phase == "sending" else reply.phase)

    def wake(self) -> None:
        """Something arrived: draw it soon."""
        if self.begun and self._timer is None and not self.reply.ended:
            pause_s = min(CEILING_S, max(FLOOR_S, SHARE * self._cost_s))
            self._timer = self._screen.set_timer(pause_s, self._draw)

    def close(self) -> None:
        """Draw no more."""
        self.begun, self.closed = False, True
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    async def _draw(self) -> None:
        self._timer = None
        if not self.begun or not self._transcript.is_attached:
            return
        began = time.thread_time()
        fresh = "" if self.reply.phase == "stopping" else self.reply.take()
        last = self._transcript.cards[-1]
        last.right, last.rules = self.words, self.rules
        self._transcript.restate(last)
        await self._transcript.extend(self._safe.push(fresh))
        self._screen.call_after_refresh(self._drawn, began)

    def _drawn(self, began: float) -> None:
        self._cost_s = time.thread_time() - began
