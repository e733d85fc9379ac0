"""What a policy puts out of sight before a turn is computed, and what the user may."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from chatkv.errors import ContextFull, UsageError, plural
from chatkv.forget.layout import Layout, Limits
from chatkv.forget.parts import (
    ForgetPlan,
    oldest,
    place_of,
    placed,
    plan_of,
    protected,
    sinks,
    whole_turns,
)
from chatkv.forget.policies import (
    ErrorPolicy,
    OldestPolicy,
    Policy,
    SummarizePolicy,
    TurnsPolicy,
    WindowPolicy,
)
from chatkv.forget.slide import Slide
from chatkv.kv.layout import stages
from chatkv.kv.ops import Op, Range, joined, live_ranges, size_of, without


def plan(policy: Policy, layout: Layout, limits: Limits) -> list[ForgetPlan]:
    """What has to go before the current turn is computed; nothing if it fits as it is.

    Raises:
        ContextFull: Not even one token of the reply would fit with all that may go gone.
    """
    new = layout.current.stop - layout.current.start
    used = layout.num_live - new
    drop, limit = _dropped(policy, layout, limits)
    needed = new + 1 + limits.closing
    if used - size_of(drop) + needed > limit:
        held = _held(policy, layout, limits)
        least = needed + (used if held is None else held)
        raise ContextFull(
            used=used,
            needed=needed,
            limit=limit,
            protected=held,
            least=least if limits.context < least <= limits.trained else 0,
            first=len(layout.turns) <= 2,
        )
    reserve = 1 + limits.closing if isinstance(policy, WindowPolicy) else limits.reserve
    op = placed(layout, drop, new + reserve, limits)
    if op is None:
        return []
    return [plan_of(policy.name if drop else "rebase", "limit", layout, op, limits)]


def _dropped(policy: Policy, layout: Layout, limits: Limits) -> tuple[list[Range], int]:
    """What a policy puts out of sight, and the tokens that may be in sight behind it."""
    limit, live = limits.context, layout.num_live
    match policy:
        case TurnsPolicy() | SummarizePolicy():
            if live + limits.reserve <= limit:
                return [], limit
            wanted = live - min(int(policy.low * limit), limit - limits.reserve)
            if isinstance(policy, SummarizePolicy):
                wanted = ceil(wanted / (1 - 1 / policy.shrink))  # the summary takes some of it
            return whole_turns(layout, protected(layout, policy.keep_last), wanted), limit
        case OldestPolicy():
            limit = min(policy.limit_tokens, limit)
            steps = ceil(max(0, live + limits.reserve - limit) / policy.drop_tokens)
            kept = protected(layout, policy.keep_last)
            exact = policy.edge == "token"
            return oldest(layout, kept, steps * policy.drop_tokens, exact=exact), limit
        case WindowPolicy():
            slide, size = Slide.of(policy, layout, limits), limits.page_tokens
            spans = stages(layout.ops, size)[-1].filled(layout.current.start, size)
            return slide.dropped(spans, live + 1 + limits.closing - slide.bound), slide.bound
        case ErrorPolicy():
            return [], limit


def _held(policy: Policy, layout: Layout, limits: Limits) -> int | None:
    """Tokens in sight that the policy may not touch; None where it touches nothing."""
    match policy:
        case ErrorPolicy():
            return None
        case WindowPolicy():
            live = live_ranges(layout.ops, layout.current.start)
            slide = Slide.of(policy, layout, limits)
            return size_of(live) - size_of(without(live, slide.protected))
        case _:
            kept = protected(layout, policy.keep_last)
            return sum(size_of(layout.live(turn)) for turn in kept)


def plan_user(layout: Layout, numbers: Iterable[int], limits: Limits) -> ForgetPlan:
    """What /forget does: these turns go before the current one is computed, pinned or not.

    Raises:
        UsageError: A turn that is not there, is out of sight already, or may not go.
    """
    by_number = {turn.number: turn for turn in layout.turns}
    chosen = sorted(set(numbers))
    if not chosen:
        raise UsageError("No turn to forget.", hint="Name turns by number: /forget 3-5.")
    fixed = {0: "the system prompt", layout.current.number: "the turn you are typing"}
    drop: list[Range] = []
    for number in chosen:
        if number in fixed:
            raise UsageError(f"Turn {number} is {fixed[number]}; it cannot be forgotten.")
        if number not in by_number:
            raise UsageError(
                f"There is no turn {number}.", hint=f"Turns are 1 to {layout.current.number - 1}."
            )
        live = layout.live(by_number[number])
        if by_number[number] in sinks(layout):
            raise UsageError(
                f"Turn {number} holds the first tokens, on which all attention rests.",
                hint="Forget later turns, or start a new chat.",
            )
        if not live:
            raise UsageError(f"Turn {number} is forgotten already.", hint="See /context.")
        drop += live
    drop = joined(drop)
    op = Op(place_of(layout, drop), tuple(drop))
    return plan_of("user", "user", layout, op, limits)


def plan_turns(
    policy: str, layout: Layout, numbers: Iterable[int], coming: int, limits: Limits
) -> ForgetPlan:
    """These turns go before the current one is computed; positions move if `coming` ids would pass
    the last one."""
    chosen = set(numbers)
    drop = [pair for turn in layout.turns if turn.number in chosen for pair in layout.live(turn)]
    op = placed(layout, joined(drop), coming, limits)
    assert op is not None, f"turns {sorted(chosen)} have nothing in sight"
    return plan_of(policy, "limit", layout, op, limits)


def pin_warning(layout: Layout, limits: Limits) -> str:
    """A sentence where pins and the system prompt leave less than half the context to the rest."""
    kept = [turn for turn in layout.turns if turn.number == 0 or turn.pinned]
    held = sum(size_of(layout.live(turn)) for turn in kept)
    if 2 * held <= limits.context:
        return ""
    return (
        f"The system prompt and {plural(len(kept) - 1, 'pinned turn')} hold {held} of "
        f"{limits.context} tokens: what is said between is forgotten the sooner."
    )
