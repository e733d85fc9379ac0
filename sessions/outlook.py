"""What a conversation shows of its context: what is in sight, what is not, what comes next.

Plain numbers from what is stored and from what the engine said when it was ready. Decides what
`/forget` and `/recall` write down; writes nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chatkv import forget
from chatkv.errors import ContextFull, UnknownSession, UsageError, plural
from chatkv.events import Ready
from chatkv.forget import Layout, Limits, TurnSpan
from chatkv.kv.ops import live_ranges, size_of
from sessions.context import (
    USER,
    Standing,
    gone_wholly,
    left_over,
    num_dropped,
    spans_of_path,
    standing,
    state_of,
    to_ops,
    turn_tokens,
    why_missing,
)
from sessions.divergence import tok_fp_of
from sessions.port import ContextTurn, ContextView
from sessions.records import ForgetRow, TurnPath

Pending = list[dict[str, Any]]
"""What `sessions.pending_ops` holds: rows for `forgets`. A recall names its turns in `back`."""


class Outlook:
    """One reading of a path.

    Args:
        path: Turns from the root on.
        pending: What waits for the next turn.
        ready: What the engine said, or None before it has.
        policy: Of the next turn.
        max_tokens: Of a reply, or None for the default.
    """

    def __init__(
        self,
        path: Sequence[TurnPath],
        pending: Sequence[Mapping[str, Any]],
        *,
        ready: Ready | None,
        policy: str,
        max_tokens: int | None,
    ) -> None:
        self.path, self.pending, self.ready, self.policy = path, pending, ready, policy
        self.records = standing(path)
        self.after = standing(path, [_row(-n, each) for n, each in enumerate(pending, 1)])
        """The records as they will be with the next turn."""
        fp = bytes.fromhex(ready.tok_fp) if ready else None
        if fp is None:
            fp = next(filter(None, map(tok_fp_of, reversed(path))), None)
        self.tok_fp = fp
        self.spans = None if fp is None else spans_of_path(path, fp)
        self.limits = self._limits(max_tokens)

    def _limits(self, max_tokens: int | None) -> Limits:
        if self.ready is not None:
            context = self.ready.context_limit
        else:
            said = (turn.turn.usage.get("context_limit") for turn in reversed(self.path))
            context = next((int(limit) for limit in said if limit), 0)
        return Limits(
            context=context,
            reserve=min(forget.reserve_tokens(context, max_tokens), max(1, context // 2))
            + (self.ready.closing_tokens if self.ready else 0),
            trained=(self.ready.trained_limit if self.ready else 0) or context,
            page_tokens=self.ready.page_tokens if self.ready else 1,
            no_rebase=self.ready.no_rebase if self.ready else "",
            parameters=self.ready.parameters if self.ready else 0,
        )

    @property
    def next_number(self) -> int:
        """Of the turn that comes next."""
        return self.path[-1].turn.depth + 1 if self.path else 1

    def _layout(self, records: Iterable[Standing]) -> Layout | None:
        """The path with a turn to come behind it; None while ids are still to be made."""
        if self.spans is None or self.tok_fp is None:
            return None
        end = self.spans[-1].stop if self.spans else 0
        spans = (*self.spans, TurnSpan(self.next_number, end, end + 1))
        ops = to_ops([one.to_json() for one in records], spans, self.tok_fp.hex())
        return Layout(spans, tuple(ops))

    # What is seen.

    def view(self) -> ContextView:
        """All that a screen or a command shows."""
        layout, coming = self._layout(self.records), self._layout(self.after)
        again = None if coming is None else self._again(coming)
        warning, plans = "", ()
        if coming is not None and self.limits.context:
            warning = forget.pin_warning(coming, self.limits)
            try:
                plans = tuple(self._plans(coming))
            except ContextFull as full:
                warning = f"The next turn will not fit. {full.message}"
        why = why_missing(self.records)
        newest = {turn.turn.depth for turn in [t for t in self.path[1:] if t.shown][-2:]}
        head = self.path[0] if self.path else None
        system = None if head is None or self.tok_fp is None else turn_tokens(head, self.tok_fp)
        return ContextView(
            limit=self.limits.context,
            used=None if layout is None else layout.num_live - 1,
            used_next=None if coming is None else coming.num_live - 1,
            reserved=self.limits.reserve,
            policy=self.policy,
            system_tokens=system,
            turns=tuple(self._turn(turn, why, newest) for turn in self.path[1:]),
            missing=tuple(why),
            why=why,
            forget=tuple(self._pending_forgets()),
            recall=tuple(self._pending_recalls()),
            plans=plans,
            warning=warning,
            kept=None if again is None else again[0],
            recomputed=None if again is None else again[1],
            limit_reason=self.ready.limit_reason if self.ready else "",
        )

    def _again(self, coming: Layout) -> tuple[int, int] | None:
        """Tokens in sight before the first record that a recall changes, and those behind."""
        changed = [one.turn for one in self.records if one not in self.after]
        if not changed:
            return None
        start = next(turn.start for turn in coming.turns if turn.number >= min(changed))
        kept = size_of(live_ranges(coming.ops, start))
        return kept, coming.num_live - 1 - kept

    def _plans(self, layout: Layout) -> list[forget.ForgetPlan]:
        policy = forget.parse_policy(self.policy)
        return forget.plan(policy, layout, self.limits)

    def _turn(self, turn: TurnPath, why: Mapping[int, str], newest: set[int]) -> ContextTurn:
        number = turn.turn.depth
        prompt = turn.message("user")
        return ContextTurn(
            number=number,
            id=turn.turn.id,
            prompt="" if prompt is None else prompt.row.content,
            tokens=None if self.tok_fp is None else turn_tokens(turn, self.tok_fp),
            state=state_of(turn, self.records),
            why=why.get(number, ""),
            pinned=turn.turn.pinned,
            kept="pinned" if turn.turn.pinned else "newest" if number in newest else "",
            summary=turn.is_summary,
        )

    # What waits.

    def _pending_forgets(self) -> list[int]:
        return sorted({n for each in self.pending if not each.get("cancels") for n in _turns(each)})

    def _pending_recalls(self) -> list[int]:
        return sorted({n for each in self.pending for n in each.get("back", ())})

    def with_forget(self, numbers: Iterable[int]) -> Pending:
        """What waits once the user has put these turns out of sight, too.

        Raises:
            UsageError: One of them may not go, or is gone.
            UnknownSession: There is no such turn.
        """
        forgets, recalls = set(self._pending_forgets()), set(self._pending_recalls())
        gone = gone_wholly(self.records)
        for number in numbers:
            turn = self.turn(number)
            if number in recalls:
                recalls.discard(number)
            elif number in gone or number in forgets:
                raise UsageError(
                    f"Turn {number} is out of sight already.", hint="/context shows all."
                )
            else:
                self._expect_may_go(turn)
                forgets.add(number)
        return self._write(forgets, recalls)

    def with_recall(self, numbers: Iterable[int]) -> Pending:
        """What waits once the user has brought these turns back, too.

        Raises:
            UsageError: One of them is in sight.
            UnknownSession: There is no such turn.
            ContextFull: With them the next turn would not fit.
        """
        forgets, recalls = set(self._pending_forgets()), set(self._pending_recalls())
        for number in numbers:
            turn = self.turn(number)
            if number in forgets:
                forgets.discard(number)
            elif turn.turn.redacted_at is not None:
                raise UsageError(f"Turn {number} is redacted; nothing brings it back.")
            elif number not in why_missing(self.records) or number in recalls:
                raise UsageError(f"Turn {number} is in sight.", hint="/context shows all.")
            else:
                recalls.add(number)
        pending = self._write(forgets, recalls)
        self._expect_fits(pending)
        return pending

    def _expect_fits(self, pending: Pending) -> None:
        """What comes back must leave room for a prompt and its reply. Raises ContextFull."""
        rows = [_row(-n, each) for n, each in enumerate(pending, 1)]
        layout = self._layout(standing(self.path, rows))
        if layout is None or not self.limits.context:
            return
        used = layout.num_live - 1
        if used + 1 + self.limits.reserve > self.limits.context:
            kept = [turn for turn in layout.turns[:-1] if turn.number == 0 or turn.pinned]
            raise ContextFull(
                used=used,
                needed=1 + self.limits.reserve,
                limit=self.limits.context,
                protected=sum(turn.stop - turn.start for turn in kept),
            )

    def turn(self, number: int) -> TurnPath:
        """The turn of that number. Raises UnknownSession."""
        for turn in self.path[1:]:
            if turn.turn.depth == number:
                return turn
        raise UnknownSession(
            f"There is no turn {number}.",
            hint=f"This chat has {plural(len(self.path[1:]), 'turn')}.",
        )

    def _expect_may_go(self, turn: TurnPath) -> None:
        number = turn.turn.depth
        if turn.turn.state == "open":
            raise UsageError(
                f"Turn {number} is being answered; it cannot be forgotten now.",
                hint="Stop the reply, or wait for its end.",
            )
        if turn.turn.redacted_at is not None:
            raise UsageError(f"Turn {number} is redacted: the model does not see it anyway.")
        if not turn.answered:
            raise UsageError(f"Turn {number} has no reply: the model does not see it anyway.")
        layout = self._layout(self.after)
        if layout is not None and number not in why_missing(self.after):
            forget.plan_user(layout, [number], self.limits)

    def _write(self, forgets: set[int], recalls: set[int]) -> Pending:
        """The rows that say it: one for all that goes, one for each record that loses something."""
        pending: Pending = []
        kept = self._layout(self.records)
        for one in self.records:
            back = sorted(recalls & {*one.turns, *one.partly})
            if not back:
                continue
            op = left_over(one, back, self.spans or [])
            tokens = 0 if kept is None else num_dropped_by(one, back, kept)
            pending.append(
                {
                    "policy": USER,
                    "reason": "recall",
                    "op": op,
                    "num_tokens": tokens,
                    "cancels": one.record,
                    "back": back,
                }
            )
        if forgets:
            op = {"turns": sorted(forgets)}
            tokens = 0 if kept is None else num_dropped(op, kept)
            pending.append({"policy": USER, "reason": USER, "op": op, "num_tokens": tokens})
        return pending


def num_dropped_by(one: Standing, numbers: Iterable[int], layout: Layout) -> int:
    """Tokens of these turns that are out of sight."""
    wanted = {*numbers} & {*one.turns, *one.partly}
    spans = [turn for turn in layout.turns if turn.number in wanted]
    return sum(
        turn.stop - turn.start - sum(stop - start for start, stop in layout.live(turn))
        for turn in spans
    )


def _row(record: int, each: Mapping[str, Any]) -> ForgetRow:
    """A row that is not stored yet."""
    cancels = each.get("cancels")
    return ForgetRow(
        id=record,
        at_turn_id=0,
        policy=str(each["policy"]),
        reason=str(each["reason"]),
        op=dict(each["op"]),
        num_tokens=int(each["num_tokens"]),
        cancels=None if cancels is None else int(cancels),
        receipt={},
        created_at=0,
    )


def _turns(each: Mapping[str, Any]) -> Iterable[int]:
    return each["op"].get("turns", ())
