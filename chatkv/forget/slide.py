"""How `window` goes on inside a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chatkv.errors import ContextFull
from chatkv.forget.layout import Layout, Limits, TurnSpan
from chatkv.forget.parts import ForgetPlan, placed, plan_of
from chatkv.forget.policies import WindowPolicy
from chatkv.kv.layout import Span
from chatkv.kv.ops import Op, Range, joined, num_live, size_of, without


@dataclass(frozen=True, slots=True)
class Slide:
    """How `window` goes on inside a reply: the engine asks between steps."""

    protected: tuple[Range, ...]
    bound: int
    """Tokens in sight, at most."""
    step: int
    """Tokens that go at once, at least."""
    limits: Limits
    turns: tuple[TurnSpan, ...]

    @staticmethod
    def of(policy: WindowPolicy, layout: Layout, limits: Limits) -> Slide:
        """Of a path, for the reply to its current turn."""
        sinks, window = policy.sink_pages * limits.page_tokens, policy.window(limits)
        fixed = [turn for turn in layout.turns[:-1] if turn.number == 0 or turn.pinned]
        ranges = sorted([(0, sinks), *((turn.start, turn.stop) for turn in fixed)])
        bound = min(sinks + window, limits.context)
        return Slide(tuple(joined(ranges)), bound, window // 8, limits, layout.turns)

    def room(self, live: int, position: int) -> int:
        """How many ids fit before something has to go.

        Args:
            live: Ids in sight.
            position: Of the next id.
        """
        return min(self.bound - self.limits.closing - live, self.limits.room(live, position))

    def next(self, ops: Sequence[Op], num_ids: int, spans: Sequence[Span]) -> ForgetPlan:
        """What goes before the id at `num_ids` is computed, now that there is no room.

        Args:
            ops: Of the path so far.
            num_ids: In place.
            spans: The entries they fill.

        Raises:
            ContextFull: Nothing may go.
        """
        used, coming = num_live(ops, num_ids), 1 + self.limits.closing
        drop = self.dropped(spans, used + coming - self.bound)
        if used - size_of(drop) + coming > self.bound:
            raise ContextFull(
                used=used, needed=coming, limit=self.bound, protected=size_of(self.protected)
            )
        ends = (*self.turns[:-1], replace(self.turns[-1], stop=num_ids))
        layout = Layout((*ends, TurnSpan(-1, num_ids, num_ids + 1)), tuple(ops))
        op = placed(layout, drop, coming, self.limits)
        assert op is not None, f"{used} of {self.bound} ids in sight, and nothing goes"
        return plan_of("window" if drop else "rebase", "limit", layout, op, self.limits)

    def dropped(self, spans: Sequence[Span], over: int) -> list[Range]:
        """The oldest whole pages: `over` ids and a step at least, nothing if none are over."""
        drop: list[Range] = []
        for span in spans:
            if over <= 0 or size_of(drop) >= max(over, self.step):
                break
            drop += without([(span.first + span.lo, span.first + span.hi)], self.protected)
        return joined(drop)
