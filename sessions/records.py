"""Rows of `chat.db` as frozen records, and what a reader gets that is made of several rows.

Knows what belongs together. Knows no SQL and no file; what single columns hold is in `columns.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sessions.columns import Spans, checked_spans, damaged, load_list, load_object, unpack_ids

TurnState = Literal["open", "done", "interrupted", "error"]
MessageState = Literal["partial", "done", "interrupted", "error"]
Role = Literal["system", "user", "assistant", "tool", "summary"]


KV_SALT = "kv_salt"
"""In the settings of a chat that came with pages: hex of the salt under which they are stored. It
is this store's alone: never exported, never taken from a file."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One conversation, or one fork of it. Times are Unix milliseconds everywhere."""

    id: str
    title: str
    created_at: int
    updated_at: int
    trashed_at: int | None
    head_turn_id: int | None
    forked_from: str | None
    settings: dict[str, Any]
    pending_ops: list[dict[str, Any]]

    @classmethod
    def of(cls, row: Sequence[Any]) -> SessionRow:
        where = f"session {row[0]}"
        fields: list[Any] = [*row[:7], load_object(row[7], where), load_list(row[8], where)]
        return cls(*fields)


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One prompt and its reply: a node of the tree. Depth 0 holds the system prompt."""

    id: int
    parent_id: int | None
    depth: int
    session_id: str
    """Its owner. A fork's path goes through turns that others own."""
    state: TurnState
    pinned: bool
    redacted_at: int | None
    created_at: int
    sampling: dict[str, Any]
    usage: dict[str, Any]

    @classmethod
    def of(cls, row: Sequence[Any]) -> TurnRow:
        where = f"turn {row[0]}"
        sampling, usage = load_object(row[8], where), load_object(row[9], where)
        fields: list[Any] = [*row[:5], bool(row[5]), *row[6:8], sampling, usage]
        return cls(*fields)


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One message of a turn: text for people. The model is fed its renders."""

    id: int
    turn_id: int
    seq: int
    role: Role
    content: str
    state: MessageState
    meta: dict[str, Any]
    created_at: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> MessageRow:
        fields: list[Any] = [*row[:6], load_object(row[6], f"message {row[0]}"), row[7]]
        return cls(*fields)


@dataclass(frozen=True, slots=True)
class RenderRow:
    """The exact ids a message put in front of the model, under one tokenizer and template."""

    message_id: int
    tok_fp: bytes
    """32 bytes."""
    token_ids: tuple[int, ...]
    sampled: Spans

    @classmethod
    def of(cls, row: Sequence[Any]) -> RenderRow:
        where = f"the ids of message {row[0]}"
        ids = unpack_ids(row[2])
        try:
            spans = checked_spans(load_list(row[3], where), len(ids))
        except (TypeError, ValueError) as error:
            raise damaged(where, str(error)) from error
        return cls(row[0], row[1], ids, spans)


@dataclass(frozen=True, slots=True)
class ForgetRow:
    """From `at_turn_id` on the model does not see some of the ids before. Append-only."""

    id: int
    at_turn_id: int
    policy: str
    reason: str
    op: dict[str, Any]
    num_tokens: int
    cancels: int | None
    receipt: dict[str, Any]
    created_at: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> ForgetRow:
        where = f"forget record {row[0]}"
        op, receipt = load_object(row[4], where), load_object(row[7], where)
        fields: list[Any] = [*row[:4], op, *row[5:7], receipt, row[8]]
        return cls(*fields)


@dataclass(frozen=True, slots=True)
class Render:
    """Ids to store with a message."""

    tok_fp: bytes
    """32 bytes: tokenizer, template and options."""
    token_ids: Sequence[int]
    sampled: Spans = ()

    def __post_init__(self) -> None:
        if len(self.tok_fp) != 32:
            raise ValueError(f"tok_fp of {len(self.tok_fp)} bytes, not 32.")
        checked_spans(self.sampled, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message with its ids, under each tokenizer it was ever rendered with."""

    row: MessageRow
    renders: tuple[RenderRow, ...]

    def render(self, tok_fp: bytes) -> RenderRow | None:
        return next((render for render in self.renders if render.tok_fp == tok_fp), None)


@dataclass(frozen=True, slots=True)
class TurnPath:
    """One turn of a path with all that is stored of it."""

    turn: TurnRow
    messages: tuple[StoredMessage, ...]
    """In the order the model sees them; empty only for a redacted turn."""
    forgets: tuple[ForgetRow, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether the turns behind this one see it.

        A prompt whose reply never began is left out of the model's input: an empty reply in its
        place would show the model how to say nothing.
        """
        if self.turn.depth == 0:
            return True
        reply = self.reply
        if reply is None:
            return False
        chosen = any(render.sampled for render in reply.renders)
        return self.turn.state == "done" or bool(reply.row.content) or chosen

    @property
    def shown(self) -> bool:
        """Whether its ids are on the path that the turns behind it stand on."""
        return self.answered and self.turn.redacted_at is None

    @property
    def reply(self) -> StoredMessage | None:
        """What the model said to its prompt."""
        return self.message("assistant") or self.message("summary")

    @property
    def is_summary(self) -> bool:
        """Whether it stands for turns that went out of sight: nobody asked it."""
        return self.message("summary") is not None

    def message(self, role: Role) -> StoredMessage | None:
        """The last message of that role."""
        return next((item for item in reversed(self.messages) if item.row.role == role), None)


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """What T1 committed."""

    turn_id: int
    message_id: int
    """Of the user's message."""
    session_id: str
    """The session the turn is in: another one than was asked for if `forked`."""
    forked: bool
    """The head had moved (another chatkv): the turn was saved as a fork of its own."""
    number: int
    """Depth of the turn; the first prompt is 1."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One line of the list of chats."""

    id: str
    title: str
    """Of the whole chat, given by the row all its forks come from; may be empty."""
    fork: str
    """`main`, or the name of the fork."""
    turns: int
    tokens: int
    """Of the path to its head, as stored."""
    created_at: int
    updated_at: int
    trashed_at: int | None
    model: str
    """`settings["model"]`, or empty."""
    first_line: str
    """Of the first prompt: what an untitled chat is called. Empty where there is a title."""
    forked_from: str | None
    forked_at: int | None
    """Number of the last turn it shares with others, for a fork."""
    match: str = ""
    """The text around a search hit."""


@dataclass(frozen=True, slots=True)
class Match:
    """A message that was searched for."""

    session_id: str
    turn_id: int
    message_id: int
    number: int
    """Depth of the turn."""
    role: Role
    excerpt: str
    """Up to 160 characters around the first hit, newlines kept."""
    span: tuple[int, int]
    """Where the hit is in `excerpt`; empty if only other spellings of it occur."""


@dataclass(frozen=True, slots=True)
class PurgeRow:
    """Pages that must still be removed from `kv.db`: those of this path, past `keep_tokens`."""

    id: int
    tok_fp: bytes
    token_ids: tuple[int, ...]
    keep_tokens: int
    ops: list[dict[str, Any]]
    created_at: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> PurgeRow:
        ops = load_list(row[4], f"purge {row[0]}")
        return cls(row[0], row[1], unpack_ids(row[2]), row[3], ops, row[5])
