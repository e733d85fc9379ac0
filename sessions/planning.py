"""What of a request the model will see: the ops it brings, and what its policy adds.

Runs where the engine runs, before anything is computed. Decides nothing itself: that is
`chatkv.forget`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatkv.events import ForgetEvent
from chatkv.forget import (
    ForgetPlan,
    Layout,
    Limits,
    Slide,
    TurnSpan,
    WindowPolicy,
    check_policy,
    parse_policy,
    plan,
)
from chatkv.kv.ops import Op
from sessions.context import USER, to_ops, to_record
from sessions.rendering import RenderedPath
from sessions.request import Request


@dataclass(frozen=True, slots=True)
class Sight:
    """What the model sees of a path."""

    ops: tuple[Op, ...]
    """All of the path, the new ones last. Places are those of the real path."""
    events: tuple[ForgetEvent, ...]
    """What goes out of sight with this turn."""
    plans: tuple[ForgetPlan, ...]
    """What the policy adds."""
    slide: Slide | None
    """Lets the reply itself forget."""


def sight_of(request: Request, path: RenderedPath, limits: Limits, tok_fp: str) -> Sight:
    """Plan a request. Nothing has changed yet.

    Raises:
        ConfigError: There is no such policy, or this model cannot follow it.
        ContextFull: It does not fit, and the policy cannot make it fit.
        StoreError: A record that makes no sense.
    """
    policy = parse_policy(request.policy)
    check_policy(policy, limits)
    current = path.spans[-1].number
    ops, events = _brought(request.ops, path.spans, limits, tok_fp, current)
    layout = Layout(tuple(path.spans), tuple(ops))
    plans = plan(policy, layout, limits)
    for one in plans:
        events.append(event_of(one, to_record(one, layout, tok_fp)))
        layout = layout.with_op(one.op)
    slide = Slide.of(policy, layout, limits) if isinstance(policy, WindowPolicy) else None
    return Sight(layout.ops, tuple(events), tuple(plans), slide)


def _brought(
    records: Sequence[Mapping[str, Any]],
    spans: Sequence[TurnSpan],
    limits: Limits,
    tok_fp: str,
    current: int,
) -> tuple[list[Op], list[ForgetEvent]]:
    """The ops of the records, and an event for each that begins with the current turn."""
    if limits.no_rebase:  # recorded with a model that could
        moves = {"rebase": False, "restart": True}
        records = [{**one, **moves} if one.get("rebase") else one for one in records]
    before = [one for one in records if one["turn"] < current]
    ops = to_ops(before, spans, tok_fp)
    events: list[ForgetEvent] = []
    for one in records[len(before) :]:
        before.append(one)
        after = to_ops(before, spans, tok_fp)
        if len(after) > len(ops):
            live = Layout(tuple(spans), tuple(ops)).num_live
            left = Layout(tuple(spans), tuple(after)).num_live
            turns = tuple(int(number) for number in one.get("turns", ()))
            gone = live - left
            events.append(
                ForgetEvent(USER, USER, turns, (), gone, live, left, limits.context, dict(one))
            )
        ops = after
    return ops, events


def in_sight(request: Request, path: RenderedPath, tok_fp: str) -> list[Op]:
    """The ops a request brings, for the turn that may come behind it."""
    last = path.spans[-1]
    coming = TurnSpan(last.number + 1, last.stop, last.stop + 1)
    return to_ops(request.ops, [*path.spans, coming], tok_fp)


def event_of(one: ForgetPlan, record: Mapping[str, Any]) -> ForgetEvent:
    """What is told of a plan that is carried out."""
    return ForgetEvent(
        policy=one.policy,
        reason=one.reason,
        turns=one.turns,
        partly=one.partly,
        num_tokens=one.num_tokens,
        live_before=one.live_before,
        live_after=one.live_after,
        limit=one.limit,
        op=dict(record),
    )


def slid(one: ForgetPlan, tok_fp: str) -> ForgetEvent:
    """The same of one that a reply carried out by itself: always by places."""
    record = {**one.op.to_json(), "turns": list(one.turns), "tok_fp": tok_fp}
    if one.partly:
        record["partly"] = list(one.partly)
    return event_of(replace(one), record)
