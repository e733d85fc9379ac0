"""An open conversation on an engine: what is committed when, and in which order.

Knows the store of conversations and an engine's port. A prompt is in `chat.db` before the engine
hears of it; the reply follows it there at its first token, then once a second, then whole. No
tensor, no screen.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any

from chatkv.errors import (
    Cancelled,
    ChatKVError,
    ConfigError,
    EngineLost,
    StoreError,
    UsageError,
)
from chatkv.events import Done, Event, Failed, ForgetEvent, Ready, Rendered, Summarizing
from chatkv.sampling import SamplingParams
from sessions.chat_replies import ChatReplies
from sessions.context import SUMMARIZE, USER, moments_of, standing, state_of
from sessions.counters import is_low
from sessions.hits import EngineWords, low_hit
from sessions.outlook import Pending
from sessions.port import (
    ChatPort,
    ChatRow,
    EnginePort,
    Preview,
    TreeTurn,
    TurnView,
)
from sessions.records import BegunTurn, SessionRow, TurnPath
from sessions.reply import StoredReply
from sessions.store import ChatStore
from sessions.views import prompt_of, tree_turns, turn_view

SAMPLING = tuple(field.name for field in fields(SamplingParams))


class Chats:
    """All conversations of one store, on one engine. Implements `sessions.port.ChatsPort`.

    Args:
        store: chat.db.
        engine: Answers.
        settings: What a new conversation begins with: `model`, `sampling` (an object), `spec`,
            and `policy` if the user chose one.
        policy: What to do in a conversation without one when a turn does not fit.
    """

    def __init__(
        self,
        store: ChatStore,
        engine: EnginePort,
        *,
        settings: Mapping[str, Any],
        policy: str = "error",
    ) -> None:
        self.store = store
        self.engine = engine
        self.settings = dict(settings)
        self.policy = policy

    def chats(self, query: str = "", *, limit: int = 200, trash: bool = False) -> list[ChatRow]:
        rows = self.store.sessions(trash=trash, limit=limit, query=query or None)
        return [
            ChatRow(
                id=row.id,
                name=row.title or row.first_line,
                fork=row.fork,
                turns=row.turns,
                tokens=row.tokens,
                updated_at=row.updated_at,
                model=row.model,
                forked_from=row.forked_from,
                forked_at=row.forked_at,
                match=row.match,
            )
            for row in rows
        ]

    def open(self, ref: str) -> ChatPort:
        return Chat(self, self.store.find(ref))

    def new(self, name: str = "", *, system: str | None = None) -> ChatPort:
        return Chat(self, None, name=name, system=system or "")

    def rename(self, ref: str, name: str) -> None:
        self.store.rename(self.store.find(ref).id, name)

    def trash(self, ref: str) -> None:
        self.store.trash(self.store.find(ref).id)

    def restore(self, ref: str) -> None:
        self.store.restore(self.store.find(ref, trash=True).id)


class Chat(ChatReplies):
    """One conversation. Implements `sessions.port.ChatPort`; one reply at a time.

    A new conversation gets its row with its first prompt, so that looking around leaves nothing
    behind.
    """

    def __init__(
        self, chats: Chats, row: SessionRow | None, *, name: str = "", system: str = ""
    ) -> None:
        settings = chats.settings if row is None else {**chats.settings, **row.settings}
        path = [] if row is None else chats.store.path(row.id)
        super().__init__(
            chats.store, chats.engine, row, path, policy=settings.get("policy") or chats.policy
        )
        self._chats = chats
        self._name, self._system = name, system
        self._sampling: dict[str, Any] = dict(settings.get("sampling", {}))
        self._spec: str | None = settings.get("spec")

    @property
    def name(self) -> str:
        if self._row is None:
            return self._name
        first = self._store.family(self._row.id)[0]
        return first.title or self._first_line()

    @property
    def fork_name(self) -> str:
        if self._row is None or self._row.forked_from is None:
            return "main"
        return self._store.session(self._row.id).title

    @property
    def sampling(self) -> dict[str, Any]:
        return dict(self._sampling)

    def turns(self) -> list[TurnView]:
        records, moments = standing(self._path), moments_of(self._path)
        return [
            turn_view(
                turn,
                [row.id for row in self._store.siblings(turn.turn.id)],
                state_of(turn, records),
                tuple(moments.get(turn.turn.depth, ())),
            )
            for turn in self._path[1:]
        ]

    def preview(self, turn_id: int | None = None) -> Preview:
        return Preview(**self._ask("preview", turn_id))

    def expect(self) -> None:
        if len(self._path) > 1:
            self._ask("expect")

    def _ask(self, op: str, turn_id: int | None = None) -> dict[str, Any]:
        """Ask a ready engine about the path up to that turn, or about all of it."""
        tok_fp = bytes.fromhex(self._engine.wait_ready(0.0).tok_fp)
        path: list[TurnPath] = []
        if self._row is not None:
            path = self._path if turn_id is None else self._store.path(self._row.id, turn_id)
        request, _ = self._request(tok_fp, {}, path=path)
        if turn_id is None:  # what waits for the next turn is a part of it
            request = replace(request, ops=[one.to_json() for one in self._outlook().after])
        return self._engine.call(op, request=asdict(request))

    def tree(self) -> list[TreeTurn]:
        if self._row is None:
            return []
        sessions, turns = self._store.tree(self._row.id)
        return tree_turns(sessions, turns, {turn.turn.id for turn in self._path})

    def send(self, text: str) -> Iterator[Event]:
        if not text.strip():
            raise UsageError("The prompt is empty.", hint="Type something, or give a file with -f.")
        self._begin_session()
        yield from self._turn(self._end(), text)

    def again(self) -> Iterator[Event]:
        turn = self._last_turn("answer again")
        if turn.turn.redacted_at is not None:
            raise UsageError(
                f"Turn {turn.turn.depth} is redacted.", hint="Send the prompt as a new one."
            )
        yield from self._turn(self._parent(turn), prompt_of(turn), beside=turn)

    def edit(self, turn_id: int, text: str) -> Iterator[Event]:
        if not text.strip():
            raise UsageError(
                "The prompt is empty.", hint="Type something, or leave the turn alone."
            )
        (turn,) = [turn for turn in self._path[1:] if turn.turn.id == turn_id] or [None]
        if turn is None:
            raise UsageError("That turn is not on the open path.", hint="Open its branch first.")
        yield from self._turn(self._parent(turn), text, beside=turn)

    def fork(self, turn_id: int | None = None, name: str = "") -> ChatPort:
        if self._row is None:
            raise UsageError("There is nothing to fork yet.", hint="Send a prompt first.")
        return Chat(self._chats, self._store.fork(self._row.id, turn_id, name))

    def select(self, turn_id: int) -> None:
        if self._row is not None:
            leaf = self._store.newest_leaf(turn_id)
            self._store.set_head(self._row.id, leaf, self._path[-1].turn.id)
            self._reload()

    def rename(self, name: str) -> None:
        if self._row is None:
            self._name = name
        else:
            self._store.rename(self._row.id, name)

    def set(self, key: str, value: Any) -> None:
        if key not in SAMPLING:
            raise ConfigError(
                f"There is no sampling setting {key!r}.", hint=f"Use one of {', '.join(SAMPLING)}."
            )
        changed = {**self._sampling, key: value}
        _checked(changed)
        self._sampling = {name: v for name, v in changed.items() if v is not None}
        if self._row is not None:
            settings = {**self._row.settings, "sampling": self._lasting()}
            self._store.set_settings(self._row.id, settings)

    def set_spec(self, mode: str) -> None:
        """Change how this conversation drafts. Raises ConfigError."""
        from chatkv.config import EngineConfig

        EngineConfig(spec=mode)
        self._spec = mode

    def explain_spec(self) -> str:
        """Who drafts, what came of it and why. Raises EngineLost."""
        self._engine.wait_ready()
        return str(self._engine.call("explain_drafting")["text"])

    def cancel(self) -> None:
        self._cancelled = True
        self._engine.cancel()

    # One turn.

    def _turn(
        self, parent: TurnPath, text: str, *, beside: TurnPath | None = None
    ) -> Iterator[Event]:
        """Commit the prompt (T1), stream the reply into the store (T2, T3) and to the caller."""
        assert self._row is not None
        pending = self._row.pending_ops
        ops = self._ops_of_turn(parent, beside)
        sampling = {**self._sampling}
        sampling.setdefault("seed", secrets.randbits(63))
        _checked(sampling)
        self._cancelled = False
        last = self._end().turn.id
        begun = self._store.begin_turn(self._row.id, last, parent.turn.id, text, sampling, ops=ops)
        recalled = self._recalled(parent, ops)
        self._follow(begun)
        reply = StoredReply(self._store, begun)
        try:
            ready = self._ready(reply, parent, pending)
            reply.tok_fp = bytes.fromhex(ready.tok_fp)
            reply.model = ready.model
            for event in self._events(reply, sampling):
                if isinstance(event, Rendered):
                    reply.heard = True
                elif isinstance(event, Failed):
                    self._refused(reply, parent, pending)
                else:
                    if recalled is not None:
                        yield recalled
                        recalled = None
                    reply.heard = reply.heard or not isinstance(event, Summarizing)
                    if isinstance(event, ForgetEvent) and event.policy not in (USER, SUMMARIZE):
                        reply.forget(event)
                    reply.take(event)
                if isinstance(event, Done) and is_low(event.usage):
                    event = self._with_reason(event, reply.tok_fp)
                if isinstance(event, Done) and self._notice:
                    event = replace(event, notice=f"{self._notice} {event.notice}".strip())
                    self._notice = ""
                yield event
        finally:
            if not reply.closed:  # the engine is gone, or nobody listens any more
                with suppress(StoreError):
                    reply.close("interrupted")
            self._reload()

    def _with_reason(self, done: Done, tok_fp: bytes) -> Done:
        """The end of a reply with why so little of what was there was found."""
        assert self._row is not None
        rate = done.usage.hit_rate or 0.0
        with suppress(StoreError, EngineLost):
            why = low_hit(self._store, self._row.id, rate, EngineWords(self._engine, tok_fp))
            return replace(done, notice=f"{done.notice} {why}".strip())
        return done

    def _ready(self, reply: StoredReply, parent: TurnPath, pending: Pending) -> Ready:
        """Wait for the engine. A model that cannot be loaded has refused the prompt; one that was
        lost, or waited for no longer, may still answer it."""
        try:
            return self._engine.wait_ready()
        except (Cancelled, EngineLost):
            raise
        except ChatKVError:
            self._refused(reply, parent, pending)
            raise

    def _refused(self, reply: StoredReply, parent: TurnPath, pending: Pending) -> None:
        """The engine failed. A prompt that it would not even take (it does not fit) leaves the
        path, or nothing could ever be said again; it stays stored. What was to be forgotten with
        it waits for the next one."""
        assert self._row is not None
        with suppress(StoreError):
            reply.close("interrupted" if reply.heard else "error")
            if not reply.heard:
                self._store.set_head(self._row.id, parent.turn.id, reply.turn_id)
                self._store.set_pending_ops(self._row.id, pending)
                if parent.turn.depth == 0 and not self._row.title:
                    # Nothing was ever said here; `restore`, or the next prompt, brings it back.
                    self._store.trash(self._row.id)

    # The path.

    def _begin_session(self) -> None:
        if self._row is not None:
            return
        settings = {**self._chats.settings, "sampling": self._lasting()}
        if self._own_policy is not None:
            settings["policy"] = self._own_policy
        self._row = self._store.create_session(self._name, self._system, settings)
        self._reload()

    def _lasting(self) -> dict[str, Any]:
        """Sampling settings that the conversation keeps; a seed is drawn anew for every turn unless
        set."""
        return {name: value for name, value in self._sampling.items() if value is not None}

    def _follow(self, begun: BegunTurn) -> None:
        """Go where the prompt was saved: to another fork if the head had moved."""
        assert self._row is not None
        if begun.forked:
            self._notice = "Another chatkv went on with this chat; yours continues as a fork."
        self._row = self._store.session(begun.session_id)
        self._path = self._store.path(self._row.id)

    def _end(self) -> TurnPath:
        """The turn to go on from. One that another chatkv is still answering is none: what is said
        meanwhile becomes a fork beside it."""
        last = self._path[-1]
        if last.turn.state != "open":
            return last
        (fresh,) = self._store.turns([last.turn.id])
        if fresh.turn.state == "open":
            return self._path[-2]
        self._path[-1] = fresh
        return fresh

    def _last_turn(self, verb: str) -> TurnPath:
        if len(self._path) < 2:
            raise UsageError(f"There is nothing to {verb} yet.", hint="Send a prompt first.")
        return self._path[-1]

    def _parent(self, turn: TurnPath) -> TurnPath:
        return self._path[self._path.index(turn) - 1]

    def _first_line(self) -> str:
        prompt = prompt_of(self._path[1]) if len(self._path) > 1 else ""
        return prompt.strip().partition("\n")[0][:60]


def _checked(sampling: Mapping[str, Any]) -> None:
    """Raises ConfigError for what no engine would take."""
    values = {
        name: value for name, value in sampling.items() if name in SAMPLING and value is not None
    }
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    SamplingParams(**values)
