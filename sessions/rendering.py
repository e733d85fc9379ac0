"""The ids a request puts before the model: stored ones as they are, the others from the template.

Knows a tokenizer and messages. No engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chatkv.events import MessageIds
from chatkv.forget import TurnSpan, tail_of
from chatkv.tokenizer import Tokenizer
from sessions.request import PathMessage


@dataclass(slots=True)
class RenderedPath:
    """All ids of a path."""

    made: list[MessageIds] = field(default_factory=list[MessageIds])
    """Of the messages that had none, or not all."""
    tokens: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    spans: list[TurnSpan] = field(default_factory=list[TurnSpan])
    """Where each turn lies."""


def render(messages: Sequence[PathMessage], tokenizer: Tokenizer, vocab_size: int) -> RenderedPath:
    """The ids of messages, in order; a reply that was cut is closed.

    Raises:
        ModelError: The chat template refuses a message.
    """
    path = RenderedPath()
    system = messages[0].content if messages and messages[0].role == "system" else ""
    for index, message in enumerate(messages):
        if message.ids and max(message.ids) >= vocab_size:
            message = replace(message, ids=None, sampled=())  # imported, and of no token here
        ids, chosen = _ids(tokenizer, message, index <= 1, system)
        if message.ids is None or ids != tuple(message.ids):
            path.made.append(MessageIds(index, ids, chosen))
        flags = [False] * len(ids)
        for start, stop in chosen:
            flags[start:stop] = [True] * (stop - start)
        start = len(path.tokens)
        path.tokens += ids
        path.sampled += flags
        stop = len(path.tokens)
        if not path.spans or path.spans[-1].number != message.turn:
            path.spans.append(TurnSpan(message.turn, start, stop, message.pinned))
        tail = tail_of(path.sampled[path.spans[-1].start :])
        path.spans[-1] = replace(path.spans[-1], stop=stop, tail=tail)
    return path


def _ids(
    tokenizer: Tokenizer, message: PathMessage, first: bool, system: str
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Ids of one message, and spans of those the model chose."""
    if message.role == "system":
        ids = message.ids if message.ids is not None else tokenizer.head_ids(system or None)
        return tuple(ids), ()
    if message.role == "user":
        if message.ids is not None:
            return tuple(message.ids), ()
        return tuple(tokenizer.user_ids(message.content, first, system or None)), ()
    ids = message.ids
    if ids is None:
        ids = tokenizer.encode(message.content, special=False)
        return (*ids, *tokenizer.closing_ids(False)), ()
    if not ids or (message.sampled and message.sampled[-1][1] == len(ids)):
        ended = bool(ids) and ids[-1] in tokenizer.eos_ids
        return (*ids, *tokenizer.closing_ids(ended)), message.sampled
    return tuple(ids), message.sampled
