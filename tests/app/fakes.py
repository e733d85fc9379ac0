"""Scripted stand-ins for the engine and the conversations, behind the ports of `sessions.port`."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from app.fake_engine import READY

from chatkv.errors import ChatKVError, ConfigError, UnknownSession, UsageError
from chatkv.events import (
    Delta,
    Done,
    Event,
    ForgetEvent,
    ForgetPlanned,
    MessageIds,
    Prefill,
    RedactEvent,
    Rendered,
    Usage,
)
from sessions.port import (
    ChatPort,
    ChatRow,
    ContextTurn,
    ContextView,
    Moment,
    Preview,
    Price,
    TreeTurn,
    TurnView,
)

AT_MS = 1_714_564_800_000
"""1 May 2024: old enough that the screen shows a month and a year."""

USAGE = Usage(
    prompt_tokens=1904, cached_tokens=1848, prompt_n=56, prompt_ms=47.0, predicted_n=142,
    predicted_ms=845.0, steps=42, draft_n=312, draft_n_accepted=100, context_limit=4096,
    context_used=2046, pages_used=161, pages_total=256,
)  # fmt: skip


@dataclass(slots=True)
class Script:
    """What the running reply says next. Strings become deltas; the rest is told by methods."""

    items: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def say(self, *texts: str) -> None:
        for text in texts:
            self.items.put(text)

    def event(self, event: Event) -> None:
        self.items.put(event)

    def finish(self, reason: str = "stop", *, text: str | None = None, notice: str = "") -> None:
        self.items.put(Done(reason, text or "", (), (), USAGE, notice))

    def fail(self, error: ChatKVError) -> None:
        self.items.put(error)


@dataclass(slots=True)
class FakeTurn:
    id: int
    parent: int
    prompt: str
    reply: str = ""
    state: str = "open"
    usage: Usage | None = None
    finish_reason: str = ""
    seed: int = 7
    redacted: bool = False
    pinned: bool = False
    why: str = ""
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True, slots=True)
class FakeTurnView(TurnView):
    sibling_ids: tuple[int, ...] = ()


class FakeChats:
    """Conversations in memory. Replies come from `script`, or at once from `auto`."""

    def __init__(self, *, auto: str | None = None) -> None:
        self.script = Script()
        self.auto = auto
        self.turns: dict[int, FakeTurn] = {}
        self.rows: dict[str, ChatRow] = {}
        self.heads: dict[str, int] = {}
        self.owner: dict[int, str] = {}
        self.previews: list[tuple[str, int | None]] = []
        self.expected: list[str] = []
        self.unexpected: ChatKVError | None = None
        """Raised by every `expect`."""
        self.trashed: set[str] = set()
        self.calls: list[str] = []
        self.queries: list[str] = []
        self.limit = 4096
        self.plans: tuple[ForgetPlanned, ...] = ()
        """What the next turn will forget."""
        self.warning = ""
        self.error: ChatKVError | None = None
        """Raised by the next call that may fail."""
        self._ids = itertools.count(1)

    def add(self, name: str, *turns: tuple[str, str], **fields: Any) -> FakeChat:
        """A stored conversation."""
        chat = FakeChat(self, self._row(name, **fields).id)
        for prompt, reply in turns:
            turn = self.begin(chat.id, self.heads[chat.id], prompt)
            turn.reply, turn.state, turn.usage = reply, "done", USAGE
        return chat

    def _row(self, name: str, **fields: Any) -> ChatRow:
        chat_id = f"chat{len(self.rows):04}"
        row = ChatRow(chat_id, name, "main", 0, 0, AT_MS, READY.model)
        self.rows[chat_id] = replace(row, **fields)
        self.heads[chat_id] = 0
        return self.rows[chat_id]

    def begin(self, chat_id: str, parent: int, prompt: str) -> FakeTurn:
        turn = FakeTurn(next(self._ids), parent, prompt)
        self.turns[turn.id] = turn
        self.owner[turn.id] = chat_id
        self.heads[chat_id] = turn.id
        return turn

    def path(self, chat_id: str) -> list[FakeTurn]:
        path: list[FakeTurn] = []
        turn_id = self.heads[chat_id]
        while turn_id:
            path.insert(0, self.turns[turn_id])
            turn_id = self.turns[turn_id].parent
        return path

    def family_of(self, chat_id: str) -> list[ChatRow]:
        while parent := self.rows[chat_id].forked_from:
            chat_id = parent
        found = [self.rows[chat_id]]
        for row in found:
            found += [other for other in self.rows.values() if other.forked_from == row.id]
        return found

    def check(self, call: str) -> None:
        self.calls.append(call)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def chats(self, query: str = "", *, limit: int = 200, trash: bool = False) -> list[ChatRow]:
        self.queries.append(query)
        self.check("chats")
        rows = []
        for row in reversed(self.rows.values()):
            path = self.path(row.id)
            hit = next((t.prompt for t in path if query.lower() in t.prompt.lower()), "")
            shown = (row.id in self.trashed) == trash
            if shown and (not query or hit or query in row.name):
                match = hit if query else ""
                rows.append(replace(row, turns=len(path), tokens=190 * len(path), match=match))
        return rows[:limit]

    def open(self, ref: str) -> FakeChat:
        self.check(f"open {ref}")
        for row in self.rows.values():
            if ref in (row.id, row.name):
                return FakeChat(self, row.id)
        raise UnknownSession(f"There is no chat {ref!r}.", hint="F2 lists them.")

    def new(self, name: str = "", *, system: str | None = None) -> FakeChat:
        self.check(f"new {name}".strip())
        return FakeChat(self, "", name)

    def rename(self, ref: str, name: str) -> None:
        self.check(f"rename {ref} {name}")
        self.rows[ref] = replace(self.rows[ref], name=name)

    def trash(self, ref: str) -> None:
        self.check(f"trash {ref}")
        self.trashed.add(ref)

    def restore(self, ref: str) -> None:
        self.check(f"restore {ref}")
        self.trashed.discard(ref)


class FakeChat:
    """An open conversation of `FakeChats`."""

    def __init__(self, chats: FakeChats, chat_id: str, name: str = "") -> None:
        self._chats, self._id, self._new_name = chats, chat_id, name
        self._sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
        self._cancelled = threading.Event()
        self.spec = "auto"
        self.policy = "turns"
        self.waits: tuple[set[int], set[int]] = set(), set()
        """Numbers of the turns that go, and that come back, with the next turn."""

    @property
    def id(self) -> str:
        return self._id

    @property
    def name(self) -> str:
        if not self._id:
            return self._new_name
        path = self._chats.path(self._id)
        return self._chats.rows[self._id].name or (path[0].prompt[:60] if path else "")

    @property
    def fork_name(self) -> str:
        return self._chats.rows[self._id].fork if self._id else "main"

    @property
    def sampling(self) -> dict[str, Any]:
        return dict(self._sampling)

    def turns(self) -> list[TurnView]:
        path = self._chats.path(self._id) if self._id else []
        return [self._view(turn, number) for number, turn in enumerate(path, 1)]

    def preview(self, turn_id: int | None = None) -> Preview:
        self._chats.previews.append((self._id, turn_id))
        return Preview(2700, 150, 0, 12, 4_200_000, 57, 4, 290.0)

    def expect(self) -> None:
        self._chats.expected.append(self._id)
        if self._chats.unexpected is not None:
            raise self._chats.unexpected

    def tree(self) -> list[TreeTurn]:
        if not self._id:
            return []
        root = self._chats.family_of(self._id)
        mine = {turn.id for turn in self._chats.path(self._id)}
        turns: dict[int, TreeTurn] = {}
        for row in root:
            for number, turn in enumerate(self._chats.path(row.id), 1):
                ends = [r.fork for r in root if self._chats.heads[r.id] == turn.id]
                owner = self._chats.owner.get(turn.id, row.id)
                turns.setdefault(turn.id, TreeTurn(
                    turn.id, turn.parent or None, number, owner, turn.prompt, turn.state,
                    turn.id in mine, tuple(ends),
                ))  # fmt: skip
        return [turns[turn_id] for turn_id in sorted(turns)]

    def _view(self, turn: FakeTurn, number: int) -> TurnView:
        ids = tuple(t.id for t in self._chats.turns.values() if t.parent == turn.parent)
        if number == 1:
            ids = tuple(i for i in ids if i == turn.id or turn.parent)
        return FakeTurnView(
            turn.id, number, turn.prompt, turn.reply, turn.state, AT_MS, turn.usage,
            turn.finish_reason, turn.seed, ids.index(turn.id) + 1, len(ids), ids, turn.redacted,
            turn.pinned, self._seen(turn), turn.moments,
        )  # fmt: skip

    @staticmethod
    def _seen(turn: FakeTurn) -> str:
        return "redacted" if turn.redacted else "forgotten" if turn.why else "live"

    def set_policy(self, policy: str) -> None:
        self.policy = policy

    def context(self) -> ContextView:
        path = self._chats.path(self._id) if self._id else []
        goes, back = self.waits
        turns = tuple(
            ContextTurn(n, t.id, t.prompt, 200, self._seen(t), t.why, t.pinned,
                        "pinned" if t.pinned else "newest" if n > len(path) - 2 else "")
            for n, t in enumerate(path, 1)
        )  # fmt: skip
        why = {turn.number: turn.why for turn in turns if turn.why}
        used = 41 + 200 * sum(turn.state == "live" for turn in turns)
        return ContextView(
            limit=self._chats.limit, used=used, used_next=used + 200 * (len(back) - len(goes)),
            reserved=512, policy=self.policy, system_tokens=41, turns=turns, missing=tuple(why),
            why=why, forget=tuple(sorted(goes)), recall=tuple(sorted(back)),
            plans=self._chats.plans, warning=self._chats.warning,
        )  # fmt: skip

    def forget(self, numbers: Any) -> None:
        self._chats.check(f"forget {list(numbers)}")
        self.waits[1].difference_update(numbers)
        self.waits[0].update(numbers)

    def recall(self, numbers: Any) -> None:
        self._chats.check(f"recall {list(numbers)}")
        self.waits[0].difference_update(numbers)
        self.waits[1].update(numbers)

    def price(self, forget: Any = (), recall: Any = ()) -> Price:
        self._chats.check(f"price {list(forget)} {list(recall)}")
        return Price(41, 200, 200 * len(recall), 241 + 200 * len(recall))

    def plan(self, text: str, beside: int | None = None) -> list[ForgetPlanned]:
        self._chats.check(f"plan {text[:20]}")
        return list(self._chats.plans)

    def pin(self, numbers: Any, *, pinned: bool = True) -> str:
        self._chats.check(f"pin {list(numbers)} {pinned}")
        for number in numbers:
            self._chats.path(self._id)[number - 1].pinned = pinned
        return "Pins hold 3000 of 4096 tokens." if len(numbers) > 2 else ""

    def send(self, text: str) -> Iterator[Event]:
        self._chats.check(f"send {text[:40]}")
        if not self._id:
            self._id = self._chats._row(self._new_name).id
        yield from self._run(self._chats.heads[self._id], text)

    def again(self) -> Iterator[Event]:
        self._chats.check("again")
        last = self._chats.path(self._id)[-1]
        yield from self._run(last.parent, last.prompt)

    def edit(self, turn_id: int, text: str) -> Iterator[Event]:
        self._chats.check(f"edit {turn_id} {text[:40]}")
        yield from self._run(self._chats.turns[turn_id].parent, text)

    def _run(self, parent: int, text: str) -> Iterator[Event]:
        turn = self._chats.begin(self._id, parent, text)
        self._cancelled.clear()
        yield Rendered((MessageIds(0, (1, 2), ()),))
        yield Prefill(1848, 1904, 1904)
        try:
            for event in self._events(turn):
                if isinstance(event, ForgetEvent):
                    path = self._chats.path(self._id)
                    for number in event.turns:
                        path[number - 1].why = event.policy
                    moment = Moment(event.policy, event.turns, event.num_tokens)
                    turn.moments = (*turn.moments, moment)
                if isinstance(event, Done):
                    done = replace(event, text=event.text or turn.reply)
                    turn.reply, turn.usage = done.text, done.usage
                    turn.finish_reason = done.finish_reason
                    turn.state = "interrupted" if done.finish_reason == "cancelled" else "done"
                    yield done
                    return
                yield event
        finally:
            if turn.state == "open":
                turn.state = "interrupted" if turn.reply else "error"
                if not turn.reply:
                    self._chats.heads[self._id] = turn.parent

    def _events(self, turn: FakeTurn) -> Iterator[Event]:
        if self._chats.auto is not None:
            self._chats.script.say(*self._chats.auto.splitlines(keepends=True))
            self._chats.script.finish()
        while True:
            if self._cancelled.is_set():
                yield Done("cancelled", turn.reply, (), (), USAGE)
            try:
                item = self._chats.script.items.get(timeout=0.01)
            except queue.Empty:
                continue
            if isinstance(item, ChatKVError):
                raise item
            if isinstance(item, str):
                turn.reply += item
                item = Delta(item, (1, 2, 3))
            yield item

    def fork(self, turn_id: int | None = None, name: str = "") -> ChatPort:
        self._chats.check(f"fork {turn_id} {name}".strip())
        path = self._chats.path(self._id)
        at = turn_id or path[-1].id
        number = next(i for i, turn in enumerate(path, 1) if turn.id == at)
        fork = name or f"fork-{len(self._chats.rows)}"
        row = self._chats._row(self.name, fork=fork, forked_from=self._id, forked_at=number)
        self._chats.heads[row.id] = at
        return FakeChat(self._chats, row.id)

    def select(self, turn_id: int) -> None:
        self._chats.check(f"select {turn_id}")
        self._chats.heads[self._id] = turn_id

    def rename(self, name: str) -> None:
        self._chats.rename(self._id, name)

    def shared_with(self, turn_ids: Any) -> tuple[str, ...]:
        return tuple(f"{row.name}:{row.fork}" for row in self._chats.rows.values()
                     if row.forked_from == self._id)  # fmt: skip

    def redact(self, turn_ids: Any, *, purge: bool = False) -> RedactEvent:
        self._chats.check(f"redact {list(turn_ids)} {purge}")
        for turn_id in turn_ids:
            turn = self._chats.turns[turn_id]
            turn.redacted = True
            if purge:
                turn.prompt = turn.reply = ""
        numbers = [n for n, turn in enumerate(self._chats.path(self._id), 1) if turn.id in turn_ids]
        return RedactEvent(tuple(numbers), 200 * len(numbers), 3)

    def set(self, key: str, value: Any) -> None:
        if key not in ("temperature", "top_p", "seed", "max_tokens"):
            raise ConfigError(f"There is no sampling setting {key!r}.", hint="Use temperature.")
        self._sampling[key] = value

    def set_spec(self, mode: str) -> None:
        if mode not in ("none", "auto"):
            raise UsageError(f"There is no drafting mode {mode!r}.")
        self.spec = mode

    def explain_spec(self) -> str:
        return f"Drafting ({self.spec}): ngram guessed. Asked: ngram."

    def cancel(self) -> None:
        self._chats.calls.append("cancel")
        self._cancelled.set()
