"""Conversations as files: `chatkv/1`, JSON lines with all that `chat.db` knows of a chat.

Knows how the format is written; `exchange_chatkv.py` reads it. The same conversation always gives
the same bytes: sessions and turns are numbered within the file, and nothing says when or where it
was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from sessions.records import KV_SALT, SessionRow, StoredMessage, TurnPath
from sessions.store import ChatStore

FORMAT = "chatkv/1"


def export_jsonl(store: ChatStore, session_id: str, *, path_only: bool = False) -> Iterator[str]:
    """Lines without their newline: a header, then turns, messages and forget records.

    A turn stands before its messages and forget records, and after its parent.

    Args:
        store: Read at once, from one state.
        session_id: Any session of the chat.
        path_only: Only this session's path, instead of the whole tree with its forks.

    Raises:
        UnknownSession: There is none.
        StoreError: It cannot be read.
    """
    sessions, turns = store.tree(session_id, path_only=path_only)
    return lines_of(sessions, turns)


def lines_of(sessions: Sequence[SessionRow], turns: Sequence[TurnPath]) -> Iterator[str]:
    """The lines of these sessions and turns, which may come from a store or from another file.

    What is still being written counts as interrupted: nobody will finish it in the file.
    """
    session_numbers = {row.id: number for number, row in enumerate(sessions, 1)}
    turn_numbers = {turn.turn.id: number for number, turn in enumerate(turns, 1)}
    forget_numbers = {
        forget.id: number
        for number, forget in enumerate((f for turn in turns for f in turn.forgets), 1)
    }
    yield _line(
        format=FORMAT,
        sessions=[_session(row, session_numbers, turn_numbers, forget_numbers) for row in sessions],
        turns=len(turns),
        records=sum(1 + len(turn.messages) + len(turn.forgets) for turn in turns),
    )
    for turn in turns:
        row = turn.turn
        yield _line(
            type="turn",
            turn=turn_numbers[row.id],
            parent=turn_numbers.get(row.parent_id or 0),
            # A turn that a session outside the file owns goes to the first one inside.
            session=session_numbers.get(row.session_id, 1),
            state="interrupted" if row.state == "open" else row.state,
            pinned=row.pinned,
            redacted_at=row.redacted_at,
            created_at=row.created_at,
            sampling=row.sampling,
            usage={key: value for key, value in row.usage.items() if key != "writer"},
        )
        for message in turn.messages:
            yield _message(message, turn_numbers[row.id])
        for forget in turn.forgets:
            yield _line(
                type="forget",
                forget=forget_numbers[forget.id],
                turn=turn_numbers[row.id],
                policy=forget.policy,
                reason=forget.reason,
                op=forget.op,
                num_tokens=forget.num_tokens,
                cancels=forget_numbers.get(forget.cancels or 0),
                receipt=forget.receipt,
                created_at=forget.created_at,
            )


def _session(
    row: SessionRow,
    session_numbers: dict[str, int],
    turn_numbers: dict[int, int],
    forget_numbers: dict[int, int],
) -> dict[str, Any]:
    return {
        "session": session_numbers[row.id],
        "title": row.title,
        "forked_from": session_numbers.get(row.forked_from or ""),
        "head": turn_numbers.get(row.head_turn_id or 0),
        "created_at": row.created_at,
        "updated_at": row.updated_at,
        "settings": {key: value for key, value in row.settings.items() if key != KV_SALT},
        "pending_ops": [
            {**op, "cancels": forget_numbers.get(op["cancels"] or 0)} if "cancels" in op else op
            for op in row.pending_ops
        ],
    }


def _message(message: StoredMessage, turn: int) -> str:
    row = message.row
    return _line(
        type="message",
        turn=turn,
        seq=row.seq,
        role=row.role,
        content=row.content,
        state="interrupted" if row.state == "partial" else row.state,
        meta=row.meta,
        created_at=row.created_at,
        renders=[
            {
                "tok_fp": render.tok_fp.hex(),
                "token_ids": render.token_ids,
                "sampled": render.sampled,
            }
            for render in message.renders
        ],
    )


def _line(**values: Any) -> str:
    """One object: our fields in order, the fields of free objects sorted."""
    text = json.dumps(
        {key: _sorted(value) for key, value in values.items()},
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
    )
    # Some readers take these for the end of a line.
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


def _sorted(value: Any) -> Any:
    match value:
        case {**items}:
            return {key: _sorted(items[key]) for key in sorted(items)}
        case list() | tuple():
            return [_sorted(item) for item in cast("Sequence[Any]", value)]
        case _:
            return value
