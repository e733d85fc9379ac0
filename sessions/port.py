"""What a front sees of conversations and of the engine. Protocols and records only: no database, no
torch.

The screen, `ask` and the tests all talk to these; behind them stand the engine's child process, an
engine in this process, or a scripted fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chatkv.events import Event, ForgetPlanned, Ready, RedactEvent, Usage
from chatkv.kv.price import Preview, Price
from sessions.request import Request


@dataclass(frozen=True, slots=True)
class EngineState:
    """Where the engine is."""

    phase: str = "absent"
    """`absent`, `starting`, `loading`, `ready`, `prefill`, `generating`, `stopping` or `lost`."""
    detail: str = ""
    """What is being loaded, or why the engine was lost."""
    done: int = 0
    total: int = 0
    ready: Ready | None = None


class EnginePort(Protocol):
    """An engine that answers one request at a time."""

    @property
    def state(self) -> EngineState: ...

    def start(self) -> None:
        """Begin loading and return at once; a lost engine is started again."""
        ...

    def watch(self, callback: Callable[[EngineState], None]) -> None:
        """Call back on every change of state, from any thread."""
        ...

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        """Block until requests are taken. Raises ModelError or EngineLost."""
        ...

    def generate(self, request: Request) -> Iterator[Event]:
        """Yield Rendered, Prefill, Delta, then Done or Failed. Raises EngineLost."""
        ...

    def cancel(self) -> None:
        """Ask the running reply to stop; its Done comes soon, with what there is."""
        ...

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        """A small question to the engine (`kv_stats`, `purge`), answered between replies."""
        ...

    def close(self) -> None:
        """Let saved pages reach the disk (two seconds at most) and end."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """Turns that went out of the model's sight, or came back, with one turn."""

    policy: str
    """Which did it; `user` for the user."""
    turns: tuple[int, ...]
    """Their numbers, those that were only cut too."""
    num_tokens: int
    back: bool = False
    """Whether they came back."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn as the transcript shows it."""

    id: int
    number: int
    """Depth on the path; the first prompt is 1."""
    prompt: str
    reply: str
    state: str
    """`open`, `done`, `interrupted` or `error`."""
    created_at: int
    """Unix milliseconds."""
    usage: Usage | None = None
    finish_reason: str = ""
    seed: int | None = None
    sibling: int = 1
    siblings: int = 1
    """This turn is sibling number `sibling` of `siblings`."""
    sibling_ids: tuple[int, ...] = ()
    """Ids of all of them, oldest first."""
    redacted: bool = False
    """The model never sees it again; after a purge nobody does, and its texts are empty."""
    pinned: bool = False
    seen: str = "live"
    """What the model sees of it: as `ContextTurn.state`."""
    moments: tuple[Moment, ...] = ()
    """What went out of sight, or came back, when this turn began."""
    summary: bool = False
    """Whether the model wrote it to stand for turns that went out of sight."""


GONE = ("forgotten", "summarised")
"""States of turns that are wholly out of sight and can come back."""


@dataclass(frozen=True, slots=True)
class ContextTurn:
    """One turn as the model sees it, or does not."""

    number: int
    id: int
    prompt: str
    tokens: int | None
    """None while ids are still to be made."""
    state: str
    """`live`, `forgotten`, `summarised`, `partly`, `redacted`, or `unanswered`: no reply, so never
    shown."""
    why: str = ""
    """Of one that is out of sight: the policy that did it, `user` for the user."""
    pinned: bool = False
    kept: str = ""
    """Why policies leave it alone: `pinned` or `newest`."""
    summary: bool = False
    """Whether the model wrote it to stand for turns that went out of sight."""


@dataclass(frozen=True, slots=True)
class ContextView:
    """What the model sees of a conversation, and what it will not."""

    limit: int
    """Tokens; 0 before any engine said it."""
    used: int | None
    """Tokens in sight; None while ids are still to be made."""
    used_next: int | None
    """The same with what waits for the next turn."""
    reserved: int
    """Tokens kept free for a reply."""
    policy: str
    system_tokens: int | None
    turns: tuple[ContextTurn, ...]
    missing: tuple[int, ...] = ()
    why: Mapping[int, str] = field(default_factory=dict[int, str])
    forget: tuple[int, ...] = ()
    """Turns that go out of sight with the next turn, since the user said so."""
    recall: tuple[int, ...] = ()
    """Turns that come back with it."""
    plans: tuple[ForgetPlanned, ...] = ()
    """What the policy will add, at least."""
    warning: str = ""
    kept: int | None = None
    """Of a recall that waits: tokens in sight before it takes effect; their pages stay good."""
    recomputed: int | None = None
    """Of the same: tokens behind them, computed again unless a branch without the forget has
    them."""
    limit_reason: str = ""
    """Why the limit is what it is, in a clause; nothing before a model is loaded."""

    @property
    def forgotten_tokens(self) -> int:
        """Tokens of the turns that are out of sight."""
        return sum(t.tokens or 0 for t in self.turns if t.state in GONE)


@dataclass(frozen=True, slots=True)
class TreeTurn:
    """One turn of a whole chat, with all its forks and siblings."""

    id: int
    parent_id: int | None
    """The turn before it; None for a first one."""
    number: int
    """Depth; the first prompt is 1."""
    chat_id: str
    """The chat or fork that it belongs to, and in which `select` reaches it."""
    prompt: str
    state: str
    on_path: bool
    """Whether the open chat leads through it."""
    forks: tuple[str, ...] = ()
    """Names of the forks that end here."""


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One line of the list of chats."""

    id: str
    name: str
    fork: str
    turns: int
    tokens: int
    updated_at: int
    """Unix milliseconds."""
    model: str = ""
    forked_from: str | None = None
    forked_at: int | None = None
    """Number of the turn the fork shares with its parent last."""
    match: str = ""
    """The text around a search hit."""


class ChatPort(Protocol):
    """One open conversation. `send`, `again` and `edit` block: iterate them in a thread."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def fork_name(self) -> str: ...
    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of the next turn; `set` changes them."""
        ...

    def turns(self) -> list[TurnView]: ...

    def preview(self, turn_id: int | None = None) -> Preview:
        """What going on after that turn, the last by default, will cost. Asks a ready engine.

        Raises EngineLost.
        """
        ...

    def expect(self) -> None:
        """Tell a ready engine that the next turn goes on from here. It prepares for that while it
        has nothing else to do; raises EngineLost."""
        ...

    def tree(self) -> list[TreeTurn]:
        """Every turn of this chat and its forks, parents first; empty before the first prompt."""
        ...

    def send(self, text: str) -> Iterator[Event]:
        """Commit the prompt, then stream its reply. Raises UsageError on an empty prompt."""
        ...

    def again(self) -> Iterator[Event]:
        """A sibling reply to the last prompt, with a new seed."""
        ...

    def edit(self, turn_id: int, text: str) -> Iterator[Event]:
        """A sibling of that turn with another prompt."""
        ...

    def fork(self, turn_id: int | None = None, name: str = "") -> ChatPort:
        """A new conversation that shares everything up to that turn, the last by default."""
        ...

    def select(self, turn_id: int) -> None:
        """Make that turn's branch the open one (a sibling)."""
        ...

    def rename(self, name: str) -> None: ...

    @property
    def policy(self) -> str:
        """What happens when a turn does not fit: a policy, or `ask` or `stop`."""
        ...

    def set_policy(self, policy: str) -> None:
        """Change it for the turns to come. Raises ConfigError."""
        ...

    def context(self) -> ContextView:
        """What the model sees, and what waits for the next turn."""
        ...

    def forget(self, numbers: Sequence[int]) -> None:
        """Put turns out of the model's sight from the next turn on; free to take back until then.

        Raises UsageError, UnknownSession.
        """
        ...

    def recall(self, numbers: Sequence[int]) -> None:
        """Bring turns back from the next turn on.

        Raises UsageError, UnknownSession, ContextFull.
        """
        ...

    def price(self, forget: Sequence[int] = (), recall: Sequence[int] = ()) -> Price:
        """What the next turn would cost with these, too. Needs an engine; computes nothing."""
        ...

    def plan(self, text: str, beside: int | None = None) -> list[ForgetPlanned]:
        """What sending `text` would put out of sight; nothing if it fits.

        Args:
            text: The prompt.
            beside: The turn that it would stand beside, or None for the end.

        Raises:
            ChatKVError: It would not fit; with the code of ContextFull.
        """
        ...

    def pin(self, numbers: Sequence[int], *, pinned: bool = True) -> str:
        """Keep turns from all policies, or no longer. Returns a warning, or nothing."""
        ...

    def shared_with(self, turn_ids: Sequence[int]) -> tuple[str, ...]:
        """Names of the other chats and forks that have one of these turns."""
        ...

    def redact(self, turn_ids: Sequence[int], *, purge: bool = False) -> RedactEvent:
        """Take turns from the model and from all stored pages, at a purge their text too.

        Raises UsageError or StoreError.
        """
        ...

    def set(self, key: str, value: Any) -> None:
        """Change one sampling setting for the turns to come. Raises ConfigError."""
        ...

    def set_spec(self, mode: str) -> None:
        """Change how the turns to come are drafted. Raises ConfigError."""
        ...

    def explain_spec(self) -> str:
        """Who drafts, what came of it lately and why."""
        ...

    def cancel(self) -> None:
        """Stop the running reply; what has arrived is kept. Safe to call at any time."""
        ...


class ChatsPort(Protocol):
    """All stored conversations."""

    def chats(self, query: str = "", *, limit: int = 200, trash: bool = False) -> list[ChatRow]: ...
    def open(self, ref: str) -> ChatPort: ...
    def new(self, name: str = "", *, system: str | None = None) -> ChatPort: ...
    def rename(self, ref: str, name: str) -> None: ...
    def trash(self, ref: str) -> None: ...
    def restore(self, ref: str) -> None: ...


@dataclass(slots=True)
class Watchers:
    """Callbacks of an engine's state; shared by the implementations of EnginePort."""

    state: EngineState = field(default_factory=EngineState)
    callbacks: list[Callable[[EngineState], None]] = field(
        default_factory=list[Callable[[EngineState], None]]
    )

    def move(self, state: EngineState) -> None:
        """Set the state and tell everyone, if it changed."""
        if state == self.state:
            return
        self.state = state
        for callback in list(self.callbacks):
            callback(state)
