"""What travels between threads, widgets and screens. Records only."""

from __future__ import annotations

from textual.message import Message

from chatkv.errors import ChatKVError
from chatkv.events import Event
from sessions.port import EngineState
from tui.reply import Reply
from tui.safe_text import SafeText


class EngineMoved(Message):
    """The engine changed its state. Posted from any thread."""

    def __init__(self, state: EngineState) -> None:
        super().__init__()
        self.state = state


class ReplyEvent(Message):
    """An event of the running reply. Posted from its thread."""

    def __init__(self, reply: Reply, event: Event) -> None:
        super().__init__()
        self.reply = reply
        self.event = event


class ReplyEnded(Message):
    """The stream of a reply is over. `bug` is an error that nobody raised on purpose."""

    def __init__(
        self, reply: Reply, error: ChatKVError | None, bug: BaseException | None = None
    ) -> None:
        super().__init__()
        self.reply = reply
        self.error = error
        self.bug = bug


class Submitted(Message):
    """Enter in the box, with what the chips stand for put back."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Typed(Message):
    """The text of the box changed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class CursorMoved(Message):
    """The cursor has come to a turn or has left one."""


class LinkChosen(Message):
    """A link in a reply was chosen. Nothing has been opened."""

    def __init__(self, address: SafeText) -> None:
        super().__init__()
        self.address = address
