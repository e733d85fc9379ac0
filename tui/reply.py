"""One reply on its way, as the screen sees it. A pure reducer over events; no widget, no thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from chatkv.errors import ChatKVError
from chatkv.events import (
    Delta,
    Done,
    Event,
    Failed,
    ForgetEvent,
    Prefill,
    RecallEvent,
    Rendered,
    Summarizing,
)
from sessions.port import ChatPort, Moment

Kind = Literal["send", "again", "edit"]
Phase = Literal["sending", "summarizing", "prefill", "generating", "stopping", "done", "failed"]
ENDED = ("done", "failed")


@dataclass(slots=True, eq=False)
class Reply:
    """A reply from the key press to its end.

    `apply` and `end` move it on; nothing leaves `done` or `failed`, and after `stop` no text is
    added until the end says what the reply is.
    """

    chat: ChatPort
    kind: Kind
    prompt: str
    turn_id: int | None = None
    """The turn that an edit stands beside."""
    phase: Phase = "sending"
    text: str = ""
    """All that has arrived, exactly as the model wrote it."""
    tokens: int = 0
    prefill: Prefill | None = None
    summary: Summarizing | None = None
    """How far a summary is that is written first."""
    done: Done | None = None
    error: ChatKVError | None = None
    heard: bool = False
    """Whether the engine has said anything: the prompt was committed before it could."""
    known: frozenset[int] = frozenset()
    """Turns on the path before it: one that is not among them was committed by it."""
    over: bool = False
    """Whether its thread is done, and the chat can be read again."""
    moments: list[Moment] = field(default_factory=list)
    """What went out of the model's sight with it, and what came back."""
    moved: bool = False
    """Whether the screen knows that it has gone to another branch."""
    _taken: int = 0

    def events(self) -> Iterator[Event]:
        """Start it. Blocks between events: iterate in a thread, once. Raises ChatKVError."""
        if self.kind == "again":
            return self.chat.again()
        if self.kind == "edit" and self.turn_id is not None:
            return self.chat.edit(self.turn_id, self.prompt)
        return self.chat.send(self.prompt)

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def word(self) -> str:
        """One word and a number for the header."""
        if self.phase == "prefill" and self.prefill is not None and self.prefill.total:
            return f"prefill {100 * self.prefill.done // self.prefill.total}%"
        return "sending" if self.phase in ENDED else self.phase

    def apply(self, event: Event) -> None:
        """Take one event of the stream."""
        if self.ended:
            return
        self.heard = self.heard or not isinstance(event, Failed)
        match event:
            case Done():
                self.done, self.phase, self.text = event, "done", event.text
            case Failed(code, exit_status, message, hint):
                error = ChatKVError(message, hint=hint)
                error.code, error.exit_code = code, exit_status
                self.end(error)
            case ForgetEvent(policy):
                gone = tuple(sorted({*event.turns, *event.partly}))
                self.moments.append(Moment(policy, gone, event.num_tokens))
            case RecallEvent(turns, num_tokens):
                self.moments.append(Moment("user", turns, num_tokens, back=True))
            case _ if self.phase == "stopping":
                pass
            case Summarizing():
                self.phase, self.summary = "summarizing", event
            case Rendered():
                self.phase = "prefill"
            case Prefill():
                self.phase, self.prefill = "prefill", event
            case Delta(text, ids):
                self.phase = "generating"
                self.text += text
                self.tokens += len(ids)
            case _:
                pass

    def stop(self) -> bool:
        """Drop what is still to come. False if it is stopping or over already."""
        if self.ended or self.phase == "stopping":
            return False
        self.phase = "stopping"
        self.text = self.text[: self._taken]
        return True

    def end(self, error: ChatKVError | None = None) -> None:
        """The stream is over, with an error or without one."""
        if self.ended:
            return
        self.error = error
        self.phase = "failed" if error is not None else "done"

    def rewind(self) -> None:
        """Let `take` give all the text again: it is drawn somewhere else."""
        self._taken = 0

    def take(self) -> str:
        """The text that came since the last call."""
        fresh, self._taken = self.text[self._taken :], len(self.text)
        return fresh
