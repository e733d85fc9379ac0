"""What the model sees of a path: from forget records to ops, and back.

A record says which turns go, from the turn it belongs to on; that is the same under every tokenizer
and after a redaction. Only one that cuts inside a turn keeps places, and with them the tokenizer.
Knows records and plain numbers; no SQL, no engine, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatkv.forget import SINK_TOKENS, ForgetPlan, Layout, SummarizePolicy, TurnSpan, place_of
from chatkv.kv.ops import Op, joined, size_of, without
from sessions.columns import damaged
from sessions.port import Moment
from sessions.records import ForgetRow, TurnPath

USER = "user"
"""The policy of what the user asked for."""
SUMMARIZE = SummarizePolicy.name


@dataclass(frozen=True, slots=True)
class Standing:
    """A forget record that holds on a path, with what recalls behind it left."""

    record: int
    """Id of the newest record in its place: the one that a recall cancels."""
    turn: int
    """Number of the turn from whose first id on it holds."""
    policy: str
    op: dict[str, Any]
    """`turns`, and maybe `partly`, `rebase`, `restart`; with `at`, `drop` and `tok_fp` if it cuts
    inside a turn."""

    @property
    def turns(self) -> list[int]:
        """Numbers of the turns of which nothing is left."""
        return list(self.op.get("turns", ()))

    @property
    def partly(self) -> list[int]:
        """Numbers of the turns of which something is."""
        return list(self.op.get("partly", ()))

    def to_json(self) -> dict[str, Any]:
        """As a request carries it."""
        return {"turn": self.turn, "policy": self.policy, **self.op}


def standing(path: Sequence[TurnPath], coming: Iterable[ForgetRow] = ()) -> list[Standing]:
    """The forget records of a path that still hold, in their order.

    Args:
        path: Turns from the root on.
        coming: Rows that the turn behind them will bring.
    """
    rows = [(turn.turn.depth, row) for turn in path for row in turn.forgets]
    after = path[-1].turn.depth + 1 if path else 1
    slots: dict[int, list[Standing]] = {}
    for number, row in [*rows, *((after, row) for row in coming)]:
        if row.cancels is None:
            slots[row.id] = [Standing(row.id, number, row.policy, row.op)]
        elif row.cancels in slots:  # else it is of another branch
            slot = slots[row.id] = slots[row.cancels]
            slot[0] = replace(slot[0], record=row.id, op=row.op)
    found = {id(slot): slot[0] for slot in slots.values()}
    return [one for one in found.values() if _does_something(one.op)]


def _does_something(op: Mapping[str, Any]) -> bool:
    return any(op.get(name) for name in ("turns", "partly", "drop", "rebase", "restart"))


def why_missing(records: Iterable[Standing]) -> dict[int, str]:
    """Turns that are out of sight, wholly or in part: which policy did it, `user` for the user."""
    found: dict[int, str] = {}
    for one in records:
        for number in (*one.turns, *one.partly):
            found[number] = one.policy
    return dict(sorted(found.items()))


def gone_wholly(records: Iterable[Standing]) -> set[int]:
    """Numbers of the turns of which nothing is left in sight."""
    return {number for one in records for number in one.turns}


def state_of(turn: TurnPath, records: Sequence[Standing]) -> str:
    """What the model sees of a turn: as `sessions.port.ContextTurn.state`."""
    number = turn.turn.depth
    if turn.turn.redacted_at is not None:
        return "redacted"
    if not turn.answered and turn.turn.state != "open":
        return "unanswered"
    if number in gone_wholly(records):
        return "summarised" if why_missing(records)[number] == SUMMARIZE else "forgotten"
    return "partly" if number in why_missing(records) else "live"


def moments_of(path: Iterable[TurnPath]) -> dict[int, list[Moment]]:
    """By number of the turn it began with: what went out of sight, and what came back."""
    found: dict[int, list[Moment]] = {}
    before: dict[int, set[int]] = {}
    for turn in path:
        for row in turn.forgets:
            now = {*row.op.get("turns", ()), *row.op.get("partly", ())}
            if row.cancels is None:
                moment = Moment(row.policy, tuple(sorted(now)), row.num_tokens)
            else:
                back = before.get(row.cancels, set()) - now
                moment = Moment(row.policy, tuple(sorted(back)), row.num_tokens, back=True)
            before[row.id] = now
            if moment.turns:
                found.setdefault(turn.turn.depth, []).append(moment)
    return found


# Records to ops.


def to_ops(
    records: Iterable[Mapping[str, Any]], spans: Sequence[TurnSpan], tok_fp: str
) -> list[Op]:
    """The ops of a path.

    Args:
        records: As `Standing.to_json` gives them, in order.
        spans: The turns the model is shown, the one to be answered last.
        tok_fp: Hex, of the tokenizer that made the ids.

    Raises:
        StoreError: A record that makes no sense.
    """
    ops: list[Op] = []
    for record in records:
        number = int(record["turn"])
        holder = next((span for span in spans if span.number >= number), None)
        if holder is None:
            continue  # its turn was never shown, and nothing is behind it
        if "at" in record and record.get("tok_fp") == tok_fp:
            op = _placed(record)
            if op.at > holder.stop:
                continue  # the reply it cut into was lost before it was stored
        else:
            before = [span for span in spans if span.number < holder.number]
            layout = Layout((*before, holder), tuple(ops))
            flags = {name: True for name in ("rebase", "restart") if record.get(name)}
            op = replace(drop_turns(layout, record.get("turns", ())), **flags)
        if op.drop or op.rebase or op.restart:
            ops.append(op)
    return ops


def _placed(record: Mapping[str, Any]) -> Op:
    names = ("at", "drop", "rebase", "restart")
    try:
        return Op.from_json({name: record[name] for name in names if name in record})
    except ValueError as error:
        raise damaged(f"a forget record of turn {record['turn']}", str(error)) from error


def drop_turns(layout: Layout, numbers: Iterable[int]) -> Op:
    """The op that puts out of sight what is in sight of these turns, before the current one.

    The first tokens of a path stay, whoever asks.
    """
    wanted = set(numbers)
    ranges = [
        pair
        for turn in layout.turns[:-1]
        if turn.number in wanted and turn.start >= SINK_TOKENS
        for pair in layout.live(turn)
    ]
    drop = joined(ranges)
    return Op(place_of(layout, drop), tuple(drop))


def to_record(plan: ForgetPlan, layout: Layout, tok_fp: str) -> dict[str, Any]:
    """How a plan is stored: by turns if it is whole ones before the current turn, else by places.

    Args:
        plan: What happens.
        layout: The path before it.
        tok_fp: Hex.
    """
    flags = {name: True for name in ("rebase", "restart") if getattr(plan.op, name)}
    whole = drop_turns(layout, plan.turns)
    if not plan.partly and (whole.at, whole.drop) == (plan.op.at, plan.op.drop):
        return {"turns": list(plan.turns), **flags}
    partly = {"partly": list(plan.partly)} if plan.partly else {}
    return {"turns": list(plan.turns), **partly, **plan.op.to_json(), "tok_fp": tok_fp}


def left_over(one: Standing, numbers: Iterable[int], spans: Sequence[TurnSpan]) -> dict[str, Any]:
    """What is left of a record's op when these turns come back.

    Args:
        one: The record.
        numbers: Turns that come back.
        spans: Where they are; read only if the op keeps places.
    """
    back = set(numbers)
    op: dict[str, Any] = {**one.op, "turns": [n for n in one.turns if n not in back]}
    if "partly" in op:
        op["partly"] = [n for n in one.partly if n not in back]
    if "drop" in op:
        ranges = [(span.start, span.stop) for span in spans if span.number in back]
        op["drop"] = [list(pair) for pair in without(_pairs(op["drop"]), ranges)]
    return op


def moved(op: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """An op that keeps places, after the ids in `[start, stop)` have left the path."""

    def place(old: int) -> int:
        return old - max(0, min(old, stop) - start)

    pairs = joined([(place(a), place(b)) for a, b in _pairs(op["drop"])])
    return {**op, "at": place(int(op["at"])), "drop": [list(pair) for pair in pairs]}


def num_dropped(op: Mapping[str, Any], layout: Layout) -> int:
    """Tokens that an op puts out of sight of a path."""
    if "drop" in op:
        return size_of(_pairs(op["drop"]))
    return drop_turns(layout, op.get("turns", ())).num_tokens


def _pairs(drop: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    return [(int(pair[0]), int(pair[1])) for pair in drop]


# The path as numbers.


def spans_of_path(path: Iterable[TurnPath], tok_fp: bytes) -> list[TurnSpan] | None:
    """Where each turn that the model is shown lies; None where ids are still to be made.

    A reply that was cut counts without the ids that will close it.
    """
    spans: list[TurnSpan] = []
    place = 0
    for turn in path:
        if not turn.shown:
            continue
        size = turn_tokens(turn, tok_fp)
        if size is None:
            return None
        stop, tail = place + size, _tail(turn, tok_fp)
        spans.append(TurnSpan(turn.turn.depth, place, stop, turn.turn.pinned, tail=tail))
        place += size
    return spans


def _tail(turn: TurnPath, tok_fp: bytes) -> int:
    """Ids at the end of a turn that close its reply."""
    reply = turn.reply
    render = None if reply is None else reply.render(tok_fp)
    if render is None or not render.sampled:
        return 0
    return len(render.token_ids) - render.sampled[-1][1]


def turn_tokens(turn: TurnPath, tok_fp: bytes) -> int | None:
    """Ids of a turn; None if they are still to be made under this tokenizer."""
    total = 0
    for message in turn.messages:
        render = message.render(tok_fp)
        if render is None:
            return None
        total += len(render.token_ids)
    return total
