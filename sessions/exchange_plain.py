"""One path of a chat as OpenAI messages or as ShareGPT, and back.

These formats know text alone: no forks, no ids, no seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from chatkv.errors import UsageError
from sessions.exchange_fields import Fields
from sessions.exchange_files import BadFile, Limits, Value, nearest
from sessions.records import MessageRow, SessionRow, StoredMessage, TurnPath, TurnRow
from sessions.tree import clean_title, now_ms

Talk = Sequence[tuple[str, str]]
"""Role and text of each message."""

OPENAI = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
} | dict.fromkeys(("chatgpt", "assistant", "model"), "assistant")
_EMPTY = ("refusal", "audio", "annotations", "name", "tool_calls", "function_call", "reasoning")
"""Fields of an OpenAI message that say nothing when they are empty."""
_IGNORED = ("id", "model", "source", "created", "tools")
"""Fields beside the messages that say nothing about the text."""


def write_openai(_: str, turns: Sequence[TurnPath]) -> Iterator[str]:
    """One line: an object with `messages` and, as others demand, nothing else."""
    messages = [{"role": role, "content": text} for role, text in _talk(turns, "openai")]
    yield dump({"messages": messages})


def write_sharegpt(title: str, turns: Sequence[TurnPath]) -> Iterator[str]:
    """One line: an object with `conversations`."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    said = [{"from": names[role], "value": text} for role, text in _talk(turns, "sharegpt")]
    yield dump({"title": title, "conversations": said} if title else {"conversations": said})


def read_talk(value: Value, kind: str, limits: Limits) -> tuple[str, Talk]:
    """Title and messages of one conversation. Raises BadFile."""
    if kind == "openai":
        field, roles, read = "messages", OPENAI, _openai_message
    else:
        field, roles, read = "conversations", SHAREGPT, _sharegpt_message
    title, system, items = "", None, value.json
    if isinstance(items, dict):
        fields = Fields(value, "the conversation")
        items = fields.list(field)
        title = clean_title(fields.take("title", str, or_none=True) or "")
        if kind == "sharegpt":
            system = fields.take("system", str, or_none=True)
        fields.ignore(_IGNORED)
        fields.end()
    if not isinstance(items, list):
        raise BadFile(value.line, "no list of messages.", hint=f"Write {{{field!r}: [...]}}.")
    rows = cast("list[Any]", items)
    if len(rows) > limits.turns:
        raise BadFile(
            value.line,
            f"{len(rows):,} messages; the most is {limits.turns:,}.",
            hint="Cut it into several conversations.",
        )
    talk: list[tuple[str, str]] = [("system", system)] if system else []
    for place, row in enumerate(rows, 1):
        fields = Fields(Value(value.line, row), f"message {place}")
        name, text = read(fields)
        fields.end()
        if name not in roles:
            hint = nearest(name, roles)
            if name in ("tool", "function"):
                hint = "Calls of tools cannot be shown to a model here yet. Leave them out."
            raise BadFile(
                value.line,
                f"message {place} has the role {name[:40]!r}, which nobody knows.",
                hint=hint,
            )
        talk.append((roles[name], text))
    return title, check_talk(value.line, talk, limits)


def _openai_message(fields: Fields) -> tuple[str, str]:
    role = fields.take("role", str)
    for name in _EMPTY:
        if fields.leave(name) not in (None, "", [], {}):
            raise fields.bad(f"{name!r} of a message cannot be kept")
    content = fields.leave("content", needed=True)
    if content is None or isinstance(content, str):
        return role, content or ""
    if not isinstance(content, list):
        raise fields.bad("'content' is neither text nor a list of parts")
    parts = [Fields(Value(fields.line, part), "a part") for part in cast("list[Any]", content)]
    texts: list[str] = []
    for part in parts:
        part.choice("type", ("text", "input_text", "output_text"))
        texts.append(part.text("text"))
        part.end()
    return role, "".join(texts)


def _sharegpt_message(fields: Fields) -> tuple[str, str]:
    return fields.take("from", str), fields.text("value")


def check_talk(line: int, talk: Talk, limits: Limits) -> Talk:
    """A conversation that can be stored. Prompts in a row become one: a turn of its own without a
    reply would not be shown to the model.

    Raises:
        BadFile: A text is too long, or the messages come in no order that makes sense.
    """
    fields = Fields(Value(line, {}), "the conversation")
    joined: list[tuple[str, str]] = []
    for role, run in groupby(talk, key=lambda said: said[0]):
        texts = [fields.short("content", text, limits.text_chars) for _, text in run]
        if role == "user":
            texts = [fields.short("content", "\n\n".join(texts), limits.text_chars)]
        joined += [(role, text) for text in texts]
    _check_order(line, joined)
    return joined


def _check_order(line: int, talk: Talk) -> None:
    """A system message comes first alone, and each reply answers one prompt."""
    before = ""
    for place, (role, _) in enumerate(talk, 1):
        if role == "system" and place > 1:
            raise BadFile(
                line,
                f"message {place} is a system message behind others.",
                hint="Put one system message first, and only there.",
            )
        if role == "assistant" and before != "user":
            why = "follows another reply" if before == "assistant" else "answers nothing"
            raise BadFile(
                line,
                f"message {place} is a reply that {why}.",
                hint="Join replies in a row; leave out one that comes before the first prompt.",
            )
        before = role
    if not any(role == "user" for role, _ in talk):
        raise BadFile(line, "no message of a user.", hint="There is nothing to go on with.")


def rows_of(title: str, talk: Talk) -> tuple[list[SessionRow], list[TurnPath]]:
    """A chat of one path, made now, with numbers for ids as `exchange_chatkv` has them."""
    now = now_ms()
    system = talk[0][1] if talk[0][0] == "system" else ""
    turns = [_turn(1, [("system", system)], now)]
    asked = [place for place, (role, _) in enumerate(talk) if role == "user"]
    for start, stop in zip(asked, [*asked[1:], len(talk)], strict=True):
        turns.append(_turn(len(turns) + 1, talk[start:stop], now))
    session = SessionRow("1", title, now, now, None, len(turns), None, {}, [])
    return [session], turns


def _turn(number: int, talk: Talk, now: int) -> TurnPath:
    messages = tuple(
        StoredMessage(MessageRow(0, number, seq, cast("Any", role), text, "done", {}, now), ())
        for seq, (role, text) in enumerate(talk)
    )
    whole = number == 1 or len(talk) > 1
    row = TurnRow(
        id=number,
        parent_id=number - 1 or None,
        depth=number - 1,
        session_id="1",
        state="done" if whole else "interrupted",
        pinned=False,
        redacted_at=None,
        created_at=now,
        sampling={},
        usage={},
    )
    return TurnPath(row, messages)


def _talk(turns: Sequence[TurnPath], kind: str) -> Talk:
    """Roles and texts. A summary is left out: the turns it stands for are all there."""
    kept = [turn for turn in turns if turn.turn.redacted_at is None and not turn.is_summary]
    rows = [message.row for turn in kept for message in turn.messages]
    for row in rows:
        if row.role == "tool":
            raise UsageError(
                f"The chat holds a message of the role {row.role}, which {kind} cannot say.",
                hint="Use --format chatkv, or markdown to read it.",
            )
    return [(row.role, row.content) for row in rows if row.role != "system" or row.content]


def dump(value: Mapping[str, Any] | str) -> str:
    """One line of JSON, whatever a reader takes for the end of a line."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
