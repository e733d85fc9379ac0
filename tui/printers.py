"""The forms in which `ask` writes a reply: text, its last code block, JSON, JSON lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from chatkv.errors import ChatKVError
from chatkv.events import (
    Delta,
    Done,
    Event,
    ForgetEvent,
    Prefill,
    RecallEvent,
    Summarizing,
    TokenLogprob,
    to_json,
)
from sessions.port import ChatPort
from tui import answer, output, prompt_text

if TYPE_CHECKING:
    from tui.safe_text import SafeStream


class TextPrinter:
    """The text as it comes. A terminal gets it cleaned (unless exact) and ended by a line break."""

    def __init__(self, *, exact: bool = False) -> None:
        self._terminal = output.is_terminal(sys.stdout)
        self._clean = _cleaner() if self._terminal and not exact else None
        self.open_line = False
        """Whether what was written last has no line break behind it."""

    def event(self, event: Event, chat: ChatPort) -> None:
        """Called with each event of the reply."""
        if isinstance(event, Delta) and event.text:
            self._put(self._clean.push(event.text) if self._clean else event.text)

    def end(self, chat: ChatPort, done: Done, **_: Any) -> None:
        """Called once, with the last event."""

    def finish(self) -> None:
        """Called at the end, also of a reply that failed: what follows starts a line of its own."""
        if self._clean:
            self._put(self._clean.flush())
        if self.open_line and self._terminal:
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            output.write(text, exact=True)
            self.open_line = not text.endswith("\n")


class CodePrinter(TextPrinter):
    """Only the last code block, when the reply is whole."""

    def event(self, event: Event, chat: ChatPort) -> None:
        pass

    def end(self, chat: ChatPort, done: Done, **_: Any) -> None:
        code = prompt_text.last_code_block(done.text)
        if code is None:
            raise ChatKVError(
                "The reply holds no code block.", hint=f"Read it with: chatkv show {chat.id}"
            )
        output.write(code)


class JsonPrinter(TextPrinter):
    """One object, when the reply is whole."""

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[TokenLogprob] = []

    def event(self, event: Event, chat: ChatPort) -> None:
        if isinstance(event, Delta):
            self._logprobs += event.logprobs

    def end(self, chat: ChatPort, done: Done, **about: Any) -> None:
        extra = answer.logprobs_json(self._logprobs)
        output.write_json({**answer.reply_json(chat, done, **about), **extra})


class EventPrinter(TextPrinter):
    """One object a line: `start`, `summarizing`, `forget`, `prefill`, `delta`, then `done`."""

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def event(self, event: Event, chat: ChatPort) -> None:
        if not self._started:  # a new chat has its id from its first event on
            self._started = True
            about = {"session": chat.id, "name": chat.name, "fork": chat.fork_name}
            output.write_json({"type": "start", **about})
        if isinstance(event, Prefill):
            numbers = {"reused": event.reused, "done": event.done, "total": event.total}
            output.write_json({"type": "prefill", **numbers})
        elif isinstance(event, ForgetEvent | RecallEvent | Summarizing):
            output.write_json(to_json(event))
        elif isinstance(event, Delta):
            extra = answer.logprobs_json(event.logprobs)
            said = {"text": event.text, "ids": list(event.ids), **extra}
            output.write_json({"type": "delta", **said})

    def end(self, chat: ChatPort, done: Done, **about: Any) -> None:
        output.write_json({"type": "done", **answer.reply_json(chat, done, **about)})


def _cleaner() -> SafeStream:
    from tui.safe_text import SafeStream

    return SafeStream()


def printer(*, as_json: bool, jsonl: bool, raw: bool, extract: bool) -> TextPrinter:
    """The form that the flags ask for."""
    if jsonl:
        return EventPrinter()
    if as_json:
        return JsonPrinter()
    return CodePrinter() if extract else TextPrinter(exact=raw)
