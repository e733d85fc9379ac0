"""Turns as a screen shows them, made of what is stored. Knows records; no store and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from chatkv.events import Usage
from sessions.port import Moment, TreeTurn, TurnView
from sessions.records import SessionRow, TurnPath


def turn_view(
    turn: TurnPath, siblings: Sequence[int], seen: str, moments: tuple[Moment, ...]
) -> TurnView:
    """One turn of the open path.

    Args:
        turn: What is stored of it.
        siblings: Ids of the turns with the same parent, oldest first, this one among them.
        seen: What the model sees of it.
        moments: What went out of sight, or came back, with it.
    """
    reply = turn.reply
    stored = dict(turn.turn.usage)
    names = {field.name for field in fields(Usage)}
    numbers = {name: value for name, value in stored.items() if name in names}
    return TurnView(
        id=turn.turn.id,
        number=turn.turn.depth,
        prompt=prompt_of(turn),
        reply="" if reply is None else reply.row.content,
        state=turn.turn.state,
        created_at=turn.turn.created_at,
        usage=Usage(**numbers) if numbers else None,
        finish_reason=str(stored.get("finish_reason", "")),
        seed=turn.turn.sampling.get("seed"),
        sibling=list(siblings).index(turn.turn.id) + 1,
        siblings=len(siblings),
        sibling_ids=tuple(siblings),
        redacted=turn.turn.redacted_at is not None,
        pinned=turn.turn.pinned,
        seen=seen,
        summary=turn.is_summary,
        moments=moments,
    )


def tree_turns(
    sessions: Sequence[SessionRow], turns: Sequence[TurnPath], path: set[int]
) -> list[TreeTurn]:
    """A whole chat, parents first; `path` holds the ids of the open one."""
    ends: dict[int | None, list[str]] = {}
    for row in sessions:
        name = "main" if row.forked_from is None else row.title
        ends.setdefault(row.head_turn_id, []).append(name)
    return [
        TreeTurn(
            id=turn.turn.id,
            parent_id=turn.turn.parent_id if turn.turn.depth > 1 else None,
            number=turn.turn.depth,
            chat_id=turn.turn.session_id,
            prompt=_line_of(turn),
            state=turn.turn.state,
            on_path=turn.turn.id in path,
            forks=tuple(ends.get(turn.turn.id, ())),
        )
        for turn in turns
        if turn.turn.depth
    ]


def prompt_of(turn: TurnPath) -> str:
    """What was asked; nothing where it was purged."""
    message = turn.message("user")
    return "" if message is None else message.row.content


def _line_of(turn: TurnPath) -> str:
    """What stands for a turn in the tree: a summary for itself, since nobody asked it."""
    summary = turn.message("summary")
    return prompt_of(turn) if summary is None else f"summary: {summary.row.content}"
