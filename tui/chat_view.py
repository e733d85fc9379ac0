"""What the screen keeps of an open chat: one reading of it. Knows the port, no widget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from chatkv.events import Usage
from sessions.port import ChatPort, ContextView, TurnView
from tui.reply import Kind
from tui.safe_text import NOTHING, SafeText, safe_line


@runtime_checkable
class Drafting(Protocol):
    """A chat whose way of drafting can be changed."""

    def set_spec(self, mode: str) -> None:
        """Raises ConfigError."""
        ...

    def explain_spec(self) -> str:
        """Who drafts, and why so."""
        ...


@dataclass(frozen=True, slots=True)
class ChatView:
    """An open chat as it was read last."""

    chat: ChatPort
    id: str
    name: str
    fork: str
    turns: list[TurnView]
    sampling: dict[str, Any] = field(default_factory=dict)
    context: ContextView | None = None
    """What the model sees of it."""

    @property
    def title(self) -> SafeText:
        """The name, for the header."""
        return safe_line(self.name) or SafeText("new chat")

    @property
    def fork_title(self) -> SafeText:
        """The fork, once there is something that could be forked."""
        return safe_line(self.fork) if self.turns else NOTHING

    @property
    def usage(self) -> Usage | None:
        """The numbers of the last reply that has some."""
        return next((turn.usage for turn in reversed(self.turns) if turn.usage), None)

    @property
    def prompts(self) -> list[str]:
        """What Up goes back to."""
        return [turn.prompt for turn in self.turns]

    def place(self, number: int) -> int | None:
        """Index of the turn of that number."""
        return next((i for i, turn in enumerate(self.turns) if turn.number == number), None)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that will be sent when the engine is free."""

    kind: Kind
    text: str
    turn: TurnView | None = None
    """The turn that an edit stands beside."""


def read_chat(chat: ChatPort) -> ChatView:
    """Read all the screen shows. May block on the store. Raises ChatKVError."""
    turns = chat.turns()
    sampling = dict(chat.sampling)
    return ChatView(chat, chat.id, chat.name, chat.fork_name, turns, sampling, chat.context())


def sibling_ids(turn: TurnView) -> tuple[int, ...]:
    """The turns at the same place, itself included, in order; empty when the port does not tell."""
    return tuple(getattr(turn, "sibling_ids", ()))
