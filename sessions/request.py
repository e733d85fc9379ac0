"""What an engine is asked for: a reply behind a path of messages. Records only, as JSON takes them
from one process to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PathMessage:
    """One message of the path that a request puts before the model."""

    role: str
    content: str
    ids: tuple[int, ...] | None = None
    """Stored ids, or None when they must be rendered."""
    sampled: tuple[tuple[int, int], ...] = ()
    """Spans of `ids` the model chose. A reply that ends in one was cut: its closing ids are still
    to come."""
    turn: int = 0
    """Number of its turn; 0 is the system prompt."""
    pinned: bool = False
    """Whether the user keeps its turn in every context."""


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to make: the path from the system prompt to the user's new message."""

    messages: Sequence[PathMessage]
    sampling: Mapping[str, Any]
    """Fields of `chatkv.sampling.SamplingParams`, as JSON has them."""
    spec: str | None = None
    """Drafting for this reply only; None keeps the engine's."""
    salt: str | None = None
    """Hex: keeps the pages of this chat apart from those of others (it came with pages of its own);
    None shares them."""
    policy: str = "error"
    """What to do when it does not fit: a policy of `chatkv.forget`, with its parameters."""
    ops: Sequence[Mapping[str, Any]] = ()
    """What is out of sight already: `sessions.context.Standing` as JSON."""

    @staticmethod
    def from_json(data: dict[str, Any]) -> Request:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        fields: dict[str, Any] = {**data, "messages": [_message(m) for m in data["messages"]]}
        return Request(**fields)


def _message(data: dict[str, Any]) -> PathMessage:
    fields: dict[str, Any] = {**data, "sampled": tuple((a, b) for a, b in data["sampled"])}
    fields["ids"] = None if data["ids"] is None else tuple(data["ids"])
    return PathMessage(**fields)


def computed_before(messages: Sequence[PathMessage]) -> int:
    """Tokens from the first on that had rows once: all up to the last id that a model chose."""
    known = length = 0
    for message in messages:
        if message.ids is None:
            break
        if message.sampled:
            known = length + message.sampled[-1][1] - 1
        length += len(message.ids)
    return known
