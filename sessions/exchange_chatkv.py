"""Reading `chatkv/1`: a header, then turns, messages and forget records, parents first.

Knows the format and what a store can hold. Makes the rows that the writer had, with the numbers of
the file for ids; stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sessions.columns import checked_spans, pack_ids
from sessions.exchange import FORMAT
from sessions.exchange_fields import Fields
from sessions.exchange_files import BadFile, Limits, Value, nearest
from sessions.records import (
    ForgetRow,
    MessageRow,
    RenderRow,
    SessionRow,
    StoredMessage,
    TurnPath,
    TurnRow,
)
from sessions.tree import ROLES, clean_title

_STATES = ("done", "interrupted", "error")


class Tree:
    """One chat of a file, built record by record.

    Args:
        header: The first record. Raises BadFile if it is none.
        limits: What may be taken.
    """

    def __init__(self, header: Value, limits: Limits) -> None:
        self.line = header.line
        self._limits = limits
        fields = Fields(header, "the header")
        if (name := fields.text("format")) != FORMAT:
            raise BadFile(
                header.line, f"the format is {name[:40]!r}.", hint=f"This chatkv reads {FORMAT!r}."
            )
        self._num_turns = fields.number("turns")
        self._num_records = fields.number("records", or_none=True)
        if max(self._num_turns, (self._num_records or 0) // 3) > limits.turns:
            raise BadFile(
                header.line,
                f"{self._num_turns:,} turns; the most is {limits.turns:,}.",
                hint="Export with --path, or fork the chat at an earlier turn.",
            )
        rows = fields.objects("sessions")
        fields.end()
        if not rows:
            raise BadFile(header.line, "the header has no session.", hint="Export the chat again.")
        self.notes: list[str] = []
        """What was left out, for the person who imports."""
        self.sessions = [self._session(row, place) for place, row in enumerate(rows, 1)]
        self._turns: list[TurnRow] = []
        self._messages: list[list[StoredMessage]] = []
        self._forgets: list[list[ForgetRow]] = []
        self._records = self._num_forgets = 0

    def add(self, value: Value) -> None:
        """The next record. Raises BadFile."""
        self._records += 1
        if self._records > 3 * self._limits.turns:
            raise BadFile(value.line, f"more than {3 * self._limits.turns:,} records in one chat.")
        fields = Fields(value, "the record")
        match fields.text("type"):
            case "turn":
                self._turn(fields)
            case "message":
                self._message(fields)
            case "forget":
                self._forget(fields)
            case other:
                hint = nearest(other, ("turn", "message", "forget"))
                raise BadFile(value.line, f"there is no record {other[:40]!r}.", hint=hint)

    def finish(self) -> tuple[list[SessionRow], list[TurnPath]]:
        """All of it. Raises BadFile if something is missing."""
        found, wanted = self._records, self._num_records
        if len(self._turns) != self._num_turns or wanted not in (None, found):
            raise BadFile(
                self.line,
                f"the header promises {self._num_turns} turns"
                + (f" in {wanted} records" if wanted is not None else "")
                + f", and {len(self._turns)} in {found} are there.",
                hint="The file was cut. Nothing of this chat was stored; get the whole file.",
            )
        turns = [
            TurnPath(turn, tuple(messages), tuple(forgets))
            for turn, messages, forgets in zip(
                self._turns, self._messages, self._forgets, strict=True
            )
        ]
        for turn in turns:
            self._check_whole(turn)
        self._check_sessions()
        return self.sessions, turns

    def _session(self, fields: Fields, place: int) -> SessionRow:
        fields.counted("session", place)
        forked_from = fields.number("forked_from", or_none=True)
        if forked_from is not None and not 0 < forked_from < place:
            raise fields.bad(f"session {place} is forked from {forked_from}, not from one before")
        if (forked_from is None) != (place == 1):
            raise fields.bad("the first session, and no other, is forked from none")
        row = SessionRow(
            id=str(place),
            title=clean_title(fields.text("title")),
            created_at=fields.time("created_at"),
            updated_at=fields.time("updated_at"),
            trashed_at=None,
            head_turn_id=fields.number("head", or_none=True),
            forked_from=None if forked_from is None else str(forked_from),
            settings=fields.settings("settings"),
            pending_ops=[_pending(op) for op in fields.objects("pending_ops")],
        )
        fields.end()
        self.notes += fields.notes
        return row

    def _turn(self, fields: Fields) -> None:
        place = len(self._turns) + 1
        fields.counted("turn", place)
        if place > self._num_turns:
            raise fields.bad(f"the header promises {self._num_turns} turns, and here is one more")
        parent: int | None = fields.number("parent", or_none=True)
        if parent is not None and not 0 < parent < place:
            raise fields.bad(f"the parent of turn {place} is {parent}, not a turn before it")
        owner = fields.number("session")
        if not 0 < owner <= len(self.sessions):
            raise fields.bad(f"there is no session {owner}")
        state = fields.choice("state", (*_STATES, "open"))
        row = TurnRow(
            id=place,
            parent_id=parent,
            depth=0 if parent is None else self._turns[parent - 1].depth + 1,
            session_id=str(owner),
            state=cast("Any", "interrupted" if state == "open" else state),
            pinned=fields.flag("pinned"),
            redacted_at=fields.time("redacted_at", or_none=True),
            created_at=fields.time("created_at"),
            sampling=fields.seeded("sampling"),
            usage=fields.usage("usage"),
        )
        fields.end()
        self._turns.append(row)
        self._messages.append([])
        self._forgets.append([])

    def _message(self, fields: Fields) -> None:
        turn = self._current(fields)
        number = self._records
        state = fields.choice("state", (*_STATES, "partial"))
        row = MessageRow(
            id=number,
            turn_id=turn,
            seq=fields.number("seq", most=(1 << 31) - 1),
            role=cast("Any", fields.choice("role", ROLES)),
            content=fields.text("content", self._limits.text_chars),
            state=cast("Any", "interrupted" if state == "partial" else state),
            meta=fields.free("meta"),
            created_at=fields.time("created_at"),
        )
        renders = [_render(render, number) for render in fields.objects("renders")]
        fields.end()
        messages = self._messages[-1]
        if messages and messages[-1].row.seq >= row.seq:
            raise fields.bad(f"message {row.seq} stands behind {messages[-1].row.seq}")
        if len({render.tok_fp for render in renders}) != len(renders):
            raise fields.bad("two lists of ids of one tokenizer")
        message = StoredMessage(row, tuple(sorted(renders, key=lambda render: render.tok_fp)))
        messages.append(message)

    def _forget(self, fields: Fields) -> None:
        turn = self._current(fields)
        self._num_forgets += 1
        fields.counted("forget", self._num_forgets)
        cancels = fields.number("cancels", or_none=True)
        if cancels is not None and not 0 < cancels < self._num_forgets:
            raise fields.bad(f"record {self._num_forgets} cancels {cancels}, not one before it")
        row = ForgetRow(
            id=self._num_forgets,
            at_turn_id=turn,
            policy=fields.text("policy"),
            reason=fields.text("reason"),
            op=fields.free("op"),
            num_tokens=fields.number("num_tokens"),
            cancels=cancels,
            receipt=fields.free("receipt"),
            created_at=fields.time("created_at"),
        )
        fields.end()
        self._forgets[-1].append(row)

    def _current(self, fields: Fields) -> int:
        """The number of the turn that a record belongs to: the last one."""
        fields.counted("turn", len(self._turns))
        if not self._turns:
            raise fields.bad("it stands before the first turn")
        return len(self._turns)

    def _check_whole(self, turn: TurnPath) -> None:
        """What the store writes in one transaction is all there."""
        roles = [message.row.role for message in turn.messages]
        if turn.turn.redacted_at is not None or turn.turn.state == "error":
            return
        wanted = ["system"] if turn.turn.depth == 0 else ["user"]
        if turn.turn.depth and turn.turn.state == "done" and not turn.is_summary:
            wanted.append("assistant")
        for role in wanted:
            if role not in roles:
                raise BadFile(
                    self.line,
                    f"turn {turn.turn.id} of the chat that begins here has no message of "
                    f"the role {role!r}.",
                    hint="The file was cut or changed. Nothing of this chat was stored.",
                )

    def _check_sessions(self) -> None:
        for row in self.sessions:
            head = row.head_turn_id
            if head is not None and not 0 < head <= len(self._turns):
                raise BadFile(self.line, f"the head of session {row.id} is turn {head}: no such.")
            for op in row.pending_ops:
                cancels = op.get("cancels")
                if cancels is not None and not 0 < cancels <= self._num_forgets:
                    raise BadFile(self.line, f"an op of session {row.id} cancels {cancels}.")


def _pending(fields: Fields) -> dict[str, Any]:
    op: dict[str, Any] = {
        "policy": fields.text("policy"),
        "reason": fields.text("reason"),
        "op": fields.free("op"),
        "num_tokens": fields.number("num_tokens"),
    }
    if fields.has("cancels"):
        op["cancels"] = fields.number("cancels", or_none=True)
    fields.end()
    return op


def _render(fields: Fields, message_id: int) -> RenderRow:
    try:
        tok_fp = bytes.fromhex(fields.text("tok_fp"))
    except ValueError:
        tok_fp = b""
    if len(tok_fp) != 32:
        raise fields.bad("tok_fp is no 64 hex digits")
    ids, spans = fields.list("token_ids"), fields.list("sampled")
    fields.end()
    try:
        pack_ids(_ints(ids))
        for span in spans:
            _ints(span)
        return RenderRow(message_id, tok_fp, tuple(ids), checked_spans(spans, len(ids)))
    except (TypeError, ValueError) as error:
        raise fields.bad(f"the ids make no sense: {error}") from None


def _ints(values: Any) -> Sequence[int]:
    if not isinstance(values, list) or not all(
        type(value) is int for value in cast("list[Any]", values)
    ):
        raise ValueError("not a list of whole numbers")
    return cast("list[int]", values)
