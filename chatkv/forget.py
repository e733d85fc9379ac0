"""What leaves the model's sight when a conversation is longer than its context, and when.

Decisions only: turns, sizes and pins in, an op out. Knows no text and no tensor. Plans are made and
checked before anything changes, by the same rule in a live chat and on resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from chatkv.errors import ConfigError, ContextFull, UsageError
from chatkv.kv.layout import Span, stages
from chatkv.kv.ops import Op, Range, joined, live_ranges, next_position, num_live, size_of, without

SINK_TOKENS = 4
"""Attention rests on the first ids: without them the text falls apart. They are never dropped."""
RESERVE_TOKENS = 1024
"""Kept free for a reply when nobody says: this or a quarter of the context, the less of both."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One turn of the path, in places."""

    number: int
    """Depth; 0 is the system prompt, which is always there and may be empty."""
    start: int
    stop: int
    pinned: bool = False
    tools: bool = False
    """Holds tool calls or their results: it goes wholly or not at all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A path: its turns without gaps from 0 on, the one just typed last, and what was forgotten."""

    turns: tuple[TurnSpan, ...]
    ops: tuple[Op, ...] = ()
    pending: int | None = None
    """Place of the first id that is still to be computed, where that is known: see `first_pending`.
    An op there costs no pass of its own."""

    @property
    def current(self) -> TurnSpan:
        """The turn that was just typed."""
        return self.turns[-1]

    @property
    def num_live(self) -> int:
        """Tokens in sight, those of the current turn too."""
        return num_live(self.ops, self.current.stop)

    def live(self, turn: TurnSpan) -> list[Range]:
        """What the model sees of a turn."""
        dropped = sorted(pair for op in self.ops for pair in op.drop)
        return without([(turn.start, turn.stop)], dropped) if turn.start < turn.stop else []

    def state(self, turn: TurnSpan) -> str:
        """`live`, `partly` or `forgotten`."""
        left = size_of(self.live(turn))
        if left == turn.stop - turn.start:
            return "live"
        return "partly" if left else "forgotten"

    def with_op(self, op: Op) -> Layout:
        """The same path with one op more."""
        return replace(self, ops=(*self.ops, op))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a path has to fit."""

    context: int
    """Tokens the model may see."""
    reserve: int
    """Of these, tokens kept free for the reply and what closes it."""
    trained: int
    """Positions the model was trained for."""
    page_tokens: int
    no_rebase: str = ""
    """What about the model forbids to move positions; empty if nothing does."""
    closing: int = 0
    """Ids that close a reply: they come when the next turn begins, before it can forget."""

    def room(self, live: int, position: int) -> int:
        """How many ids fit behind `live` in sight, the next one at that position."""
        return min(self.context - live, self.trained - position) - self.closing


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """One op, and what it means. Nothing has changed yet."""

    policy: str
    """Name of the policy; `user`, or `rebase` where only positions move."""
    reason: str
    """`limit`, `position` or `user`."""
    op: Op
    turns: tuple[int, ...]
    """Numbers of the turns of which nothing is left in sight."""
    partly: tuple[int, ...]
    """Numbers of the turns of which something is."""
    num_tokens: int
    live_before: int
    """Tokens in sight, the current turn's too."""
    live_after: int
    limit: int
    replay_tokens: int
    """What would have to be computed if every page were lost."""
    restart_tokens: int
    """What computing the rest as a plain prompt takes."""

    def to_json(self) -> dict[str, Any]:
        """Its fields, the op as JSON."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "op": self.op.to_json()}


def first_pending(turns: Sequence[TurnSpan], sampled: Sequence[bool]) -> int:
    """Where what closes the last reply begins: it is computed with the turn just typed."""
    place = start = turns[-1].start
    floor = turns[-2].start if len(turns) > 1 else start
    while place > floor and not sampled[place - 1]:
        place -= 1
    return place if place > floor else start


def reserve_tokens(context: int, max_tokens: int | None = None) -> int:
    """Tokens kept free for a reply."""
    return max_tokens or min(RESERVE_TOKENS, max(1, context // 4))


# Policies.


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Refuse what does not fit."""

    name: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class TurnsPolicy:
    """The oldest unprotected turns, whole, until low water."""

    name: ClassVar[str] = "turns"
    low: float = 0.75
    """Forget until so much of the context is used, so that it happens seldom."""
    keep_last: int = 2
    """Turns before the current one that stay."""

    def __post_init__(self) -> None:
        _expect(0 < self.low <= 1, self.name, "low", self.low, "a share of the context, 0 to 1")
        _expect(self.keep_last >= 0, self.name, "keep_last", self.keep_last, "0 or more")


@dataclass(frozen=True, slots=True)
class OldestPolicy:
    """Over `limit_tokens`, the oldest unprotected `drop_tokens`; again until the rest fits."""

    name: ClassVar[str] = "oldest"
    limit_tokens: int = 4096
    drop_tokens: int = 1024
    edge: str = "turn"
    """`turn` goes on to the end of the turn reached, `token` cuts exactly."""
    keep_last: int = 2
    """Turns before the current one that stay."""

    def __post_init__(self) -> None:
        _expect(self.limit_tokens >= 1, self.name, "limit_tokens", self.limit_tokens, "1 or more")
        _expect(
            self.limit_tokens <= 8 * self.drop_tokens <= 8 * self.limit_tokens,
            self.name,
            "drop_tokens",
            self.drop_tokens,
            f"{-(-self.limit_tokens // 8)} to {self.limit_tokens}: less would forget at every turn",
        )
        _expect(self.edge in ("turn", "token"), self.name, "edge", self.edge, "turn or token")
        _expect(self.keep_last >= 0, self.name, "keep_last", self.keep_last, "0 or more")


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """The first pages and the latest tokens, page by page, in steps of an eighth of the window."""

    name: ClassVar[str] = "window"
    sink_pages: int = 1
    window_tokens: int | None = None
    """None is half the context."""

    def __post_init__(self) -> None:
        _expect(self.sink_pages >= 1, self.name, "sink_pages", self.sink_pages, "1 or more")
        _expect(
            self.window_tokens is None or self.window_tokens >= 8,
            self.name,
            "window_tokens",
            self.window_tokens,
            "8 or more",
        )

    def window(self, limits: Limits) -> int:
        """The latest tokens kept."""
        return limits.context // 2 if self.window_tokens is None else self.window_tokens


@dataclass(frozen=True, slots=True)
class SummarizePolicy:
    """As `turns`, but the model first writes down what goes; the plan only says which turns."""

    name: ClassVar[str] = "summarize"
    shrink: float = 4.0
    """A summary that is not so many times shorter is not used."""
    low: float = 0.75
    keep_last: int = 2

    def __post_init__(self) -> None:
        _expect(self.shrink > 1, self.name, "shrink", self.shrink, "more than 1")
        TurnsPolicy(self.low, self.keep_last)


Policy = ErrorPolicy | TurnsPolicy | OldestPolicy | WindowPolicy | SummarizePolicy
POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (ErrorPolicy, TurnsPolicy, OldestPolicy, WindowPolicy, SummarizePolicy)
}


def parse_policy(text: str) -> Policy:
    """`turns`, or `oldest:limit_tokens=4096,drop_tokens=1024`.

    Raises:
        ConfigError: Unknown name or parameter, or a value that makes no sense; says which do.
    """
    name, _, rest = text.strip().partition(":")
    if name not in POLICIES:
        raise ConfigError(
            f"Unknown forget policy {name!r}.", hint=f"Use one of {', '.join(POLICIES)}."
        )
    kind = POLICIES[name]
    known = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no parameters"
            raise ConfigError(f"Policy {name} has no parameter {key!r}.", hint=f"It {takes}.")
        values[key] = _value(name, key, value.strip(), known[key])
    return kind(**values)


def policy_text(policy: Policy) -> str:
    """What `parse_policy` makes this policy of; defaults are left out."""
    plain = type(policy)()
    changed = [
        f"{field.name}={getattr(policy, field.name)}"
        for field in fields(policy)
        if getattr(policy, field.name) != getattr(plain, field.name)
    ]
    return ":".join([policy.name, ",".join(changed)]) if changed else policy.name


def check_policy(policy: Policy, limits: Limits) -> None:
    """Refuse a policy that this model or context cannot follow.

    Raises:
        ConfigError: Says which trait of the model, or which number.
    """
    if not isinstance(policy, WindowPolicy):
        return
    if limits.no_rebase:
        raise ConfigError(
            f"Policy window moves positions, but the model has {limits.no_rebase}.",
            hint="Use turns or oldest: they begin anew where positions run out.",
        )
    sinks, window = policy.sink_pages * limits.page_tokens, policy.window(limits)
    if sinks + window > limits.context:
        raise ConfigError(
            f"Policy window keeps {sinks} + {window} tokens, "
            f"but the context is {limits.context} tokens.",
            hint=f"Use window_tokens={max(8, limits.context - sinks)} or less.",
        )


# Plans.


def plan(policy: Policy, layout: Layout, limits: Limits) -> list[ForgetPlan]:
    """What has to go before the current turn is computed; nothing if it fits as it is.

    Raises:
        ContextFull: Not even one token of the reply would fit with all that may go gone.
    """
    new = layout.current.stop - layout.current.start
    used = layout.num_live - new
    drop: list[Range] = []
    kept: list[TurnSpan] | None = None
    protected: int | None = None
    limit = limits.context
    match policy:
        case ErrorPolicy():
            pass
        case TurnsPolicy() | SummarizePolicy():
            kept = _protected(layout, policy.keep_last)
            if used + new + limits.reserve > limit:
                low = min(int(policy.low * limit), limit - limits.reserve) - new
                drop = _whole_turns(layout, kept, used - low)
        case OldestPolicy():
            kept = _protected(layout, policy.keep_last)
            limit = min(policy.limit_tokens, limit)
            over = used + new + limits.reserve - limit
            if over > 0:
                wanted = -(-over // policy.drop_tokens) * policy.drop_tokens
                drop = _oldest(layout, kept, wanted, exact=policy.edge == "token")
        case WindowPolicy():
            slide = Slide.of(policy, layout, limits)
            limit, size = slide.bound, limits.page_tokens
            spans = stages(layout.ops, size)[-1].filled(layout.current.start, size)
            drop = slide.dropped(spans, used + new + 1 + limits.closing - limit)
            live = live_ranges(layout.ops, layout.current.start)
            protected = size_of(live) - size_of(without(live, slide.protected))
    left = used - size_of(drop)
    if left + new + 1 + limits.closing > limit:
        if kept is not None:
            protected = sum(size_of(layout.live(turn)) for turn in kept)
        needed = new + 1 + limits.closing
        raise ContextFull(used=used, needed=needed, limit=limit, protected=protected)
    reserve = 1 + limits.closing if isinstance(policy, WindowPolicy) else limits.reserve
    op = _placed(layout, drop, new + reserve, limits)
    if op is None:
        return []
    return [_plan(policy.name if drop else "rebase", "limit", layout, op, limits)]


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
        if by_number[number] in _sinks(layout):
            raise UsageError(
                f"Turn {number} holds the first tokens, on which all attention rests.",
                hint="Forget later turns, or start a new chat.",
            )
        if not live:
            raise UsageError(f"Turn {number} is forgotten already.", hint="See /context.")
        drop += live
    drop = joined(drop)
    op = Op(_at(layout, drop), tuple(drop))
    return _plan("user", "user", layout, op, limits)


def preview(policy: Policy, layout: Layout, limits: Limits) -> list[ForgetPlan]:
    """What the next turn will put out of sight, at least; `layout` ends with the last turn.

    Raises:
        ContextFull: As `plan`: the next turn will not fit.
    """
    last = layout.current
    coming = TurnSpan(last.number + 1, last.stop, last.stop + 1)
    return plan(policy, replace(layout, turns=(*layout.turns, coming)), limits)


def pin_warning(layout: Layout, limits: Limits) -> str:
    """A sentence where pins and the system prompt leave less than half the context to the rest."""
    kept = [turn for turn in layout.turns if turn.number == 0 or turn.pinned]
    held = sum(size_of(layout.live(turn)) for turn in kept)
    if 2 * held <= limits.context:
        return ""
    return (
        f"The system prompt and {len(kept) - 1} pinned turns hold {held} of {limits.context} tokens"
        ": what is said between is forgotten the sooner."
    )


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
                used=used, needed=1, limit=self.bound, protected=size_of(self.protected)
            )
        ends = (*self.turns[:-1], replace(self.turns[-1], stop=num_ids))
        layout = Layout((*ends, TurnSpan(-1, num_ids, num_ids + 1)), tuple(ops))
        op = _placed(layout, drop, coming, self.limits)
        assert op is not None, f"{used} of {self.bound} ids in sight, and nothing goes"
        return _plan("window" if drop else "rebase", "limit", layout, op, self.limits)

    def dropped(self, spans: Sequence[Span], over: int) -> list[Range]:
        """The oldest whole pages: `over` ids and a step at least, nothing if none are over."""
        drop: list[Range] = []
        for span in spans:
            if over <= 0 or size_of(drop) >= max(over, self.step):
                break
            drop += without([(span.first + span.lo, span.first + span.hi)], self.protected)
        return joined(drop)


# Records to ops, and paths that begin anew.


def effective(records: Iterable[tuple[int, Op, int | None]]) -> list[Op]:
    """The ops of a path from its records, in their order: (id, op, id of the one it cancels).

    A record that cancels stands in the place of the one it cancels, with what is left of its op.
    """
    slots: dict[int, list[Op]] = {}
    for record, op, cancels in records:
        slot = slots[cancels] if cancels in slots and cancels is not None else [op]
        slot[0] = op
        slots[record] = slot
    unique = {id(slot): slot[0] for slot in slots.values()}
    return [op for op in unique.values() if op.drop or op.rebase or op.restart]


def flatten(
    tokens: Sequence[int], sampled: Sequence[bool], ops: Sequence[Op]
) -> tuple[list[int], list[bool], list[Op]]:
    """The path as the engine takes it: what the last restart left, then all behind it.

    Without a restart it is the path itself. Ops behind one count places of the shorter path.
    """
    last = max((index for index, op in enumerate(ops) if op.restart), default=-1)
    if last < 0:
        return list(tokens), list(sampled), list(ops)
    at = ops[last].at
    live = joined([*live_ranges(ops[: last + 1], at), (at, len(tokens))])

    def place(old: int) -> int:
        return sum(max(0, min(old, stop) - start) for start, stop in live)

    rest = [
        Op(place(op.at), tuple((place(a), place(b)) for a, b in op.drop), op.rebase)
        for op in ops[last + 1 :]
    ]
    return (
        [token for start, stop in live for token in tokens[start:stop]],
        [flag for start, stop in live for flag in sampled[start:stop]],
        rest,
    )


# Parts of a plan.


def _sinks(layout: Layout) -> list[TurnSpan]:
    """The turns without which the first ids would go."""
    return [turn for turn in layout.turns if turn.start < SINK_TOKENS and turn.start < turn.stop]


def _protected(layout: Layout, keep_last: int) -> list[TurnSpan]:
    """Turns before the current one that no policy may touch."""
    before = layout.turns[:-1]
    last = {turn.number for turn in before[len(before) - keep_last :]} if keep_last else set[int]()
    sinks = _sinks(layout)
    return [
        turn
        for turn in before
        if turn.number == 0 or turn.pinned or turn.number in last or turn in sinks
    ]


def _candidates(layout: Layout, kept: Sequence[TurnSpan]) -> list[tuple[TurnSpan, list[Range]]]:
    """Turns that may go, the oldest first, with what is in sight of each."""
    free = [turn for turn in layout.turns[:-1] if turn not in kept]
    return [(turn, live) for turn in free if (live := layout.live(turn))]


def _whole_turns(layout: Layout, kept: Sequence[TurnSpan], wanted: int) -> list[Range]:
    drop: list[Range] = []
    for _, live in _candidates(layout, kept):
        if size_of(drop) >= wanted:
            break
        drop += live
    return joined(drop)


def _oldest(layout: Layout, kept: Sequence[TurnSpan], wanted: int, *, exact: bool) -> list[Range]:
    drop: list[Range] = []
    for turn, live in _candidates(layout, kept):
        left = wanted - size_of(drop)
        if left <= 0:
            break
        if exact and not turn.tools and size_of(live) > left:
            drop += _first(live, left)
        else:
            drop += live
    return joined(drop)


def _first(ranges: Sequence[Range], count: int) -> list[Range]:
    """The first `count` ids of ranges."""
    result: list[Range] = []
    for start, stop in ranges:
        stop = min(stop, start + count)
        if start < stop:
            result.append((start, stop))
            count -= stop - start
    return result


def _at(layout: Layout, drop: Sequence[Range]) -> int:
    """Where an op takes effect: as soon as something is computed, but behind all that it drops."""
    last = max(layout.ops[-1].at if layout.ops else 0, drop[-1][1] if drop else 0)
    start = layout.current.start
    return layout.pending if layout.pending is not None and layout.pending >= last else start


def _placed(layout: Layout, drop: list[Range], coming: int, limits: Limits) -> Op | None:
    """The op that drops these; one that moves positions too if `coming` ids would pass the last
    one. None if neither is needed."""
    at = _at(layout, drop)
    op = Op(at, tuple(drop))
    ops = (*layout.ops, op)
    position = next_position(ops, at)
    coming += layout.current.start - at
    if position + coming > limits.trained and position > num_live(ops, at):
        moves = {"restart": True} if limits.no_rebase else {"rebase": True}
        return replace(op, **moves)
    return op if drop else None


def _plan(policy: str, reason: str, layout: Layout, op: Op, limits: Limits) -> ForgetPlan:
    after = layout.with_op(op)
    touched = [
        turn
        for turn in layout.turns
        if any(start < turn.stop and turn.start < stop for start, stop in op.drop)
    ]
    total = layout.current.stop
    restarts = [index for index, one in enumerate(after.ops) if one.restart]
    head = after.ops[: restarts[-1] + 1] if restarts else ()
    return ForgetPlan(
        policy=policy,
        reason="position" if policy == "rebase" else reason,
        op=op,
        turns=tuple(turn.number for turn in touched if after.state(turn) == "forgotten"),
        partly=tuple(turn.number for turn in touched if after.state(turn) == "partly"),
        num_tokens=op.num_tokens,
        live_before=layout.num_live,
        live_after=after.num_live,
        limit=limits.context,
        replay_tokens=total - sum(one.num_tokens for one in head),
        restart_tokens=after.num_live,
    )


def _expect(holds: bool, policy: str, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"Policy {policy}: {name} is {value}.", hint=f"Use {wanted}.")


def _value(policy: str, key: str, text: str, kind: str) -> Any:
    try:
        match kind:
            case "int" | "int | None":
                return int(text)
            case "float":
                return float(text)
            case _:
                return text
    except ValueError:
        what, example = ("a number", "0.75") if kind == "float" else ("a whole number", "1024")
        raise ConfigError(
            f"Policy {policy}: {key} is {text!r}, not {what}.", hint=f"Write {key}={example}."
        ) from None
