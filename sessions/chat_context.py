"""The side of an open conversation that decides what the model sees: policy, forget, recall, pin,
redact.

Knows the store, the engine's port and one reading of the path. Replies are in `chat.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from chatkv.errors import ChatKVError, UsageError
from chatkv.events import ForgetPlanned, RecallEvent, RedactEvent
from chatkv.forget import ANSWERS, parse_policy
from sessions import deletion
from sessions.context import USER, standing, turn_tokens
from sessions.outlook import Outlook, Pending
from sessions.port import ContextView, EnginePort, Price
from sessions.records import KV_SALT, SessionRow, TurnPath
from sessions.request import PathMessage, Request
from sessions.store import ChatStore


class ChatContext:
    """What the model sees of one conversation.

    Args:
        store: chat.db.
        engine: Answers.
        row: The session, or None before the first prompt.
        path: Its turns.
        policy: What to do when a turn does not fit.
    """

    def __init__(
        self,
        store: ChatStore,
        engine: EnginePort,
        row: SessionRow | None,
        path: list[TurnPath],
        *,
        policy: str,
    ) -> None:
        self._store, self._engine = store, engine
        self._row: SessionRow | None = row
        self._path = path
        self._policy = policy
        self._own_policy: str | None = None
        """One that was chosen since; a session that is yet to be made keeps it."""
        self._sampling: dict[str, Any] = {}

    @property
    def id(self) -> str:
        return "" if self._row is None else self._row.id

    @property
    def policy(self) -> str:
        return self._policy

    def set_policy(self, policy: str) -> None:
        if policy not in ANSWERS:
            parse_policy(policy)
        self._policy = self._own_policy = policy
        if self._row is not None:
            self._store.set_settings(self._row.id, {**self._row.settings, "policy": policy})
            self._reload()

    def context(self) -> ContextView:
        return self._outlook().view()

    def forget(self, numbers: Sequence[int]) -> None:
        self._wait_for_next(self._outlook().with_forget(numbers))

    def recall(self, numbers: Sequence[int]) -> None:
        self._wait_for_next(self._outlook().with_recall(numbers))

    def _wait_for_next(self, pending: Pending) -> None:
        if self._row is None:
            raise UsageError("There is nothing in this chat yet.", hint="Send a prompt first.")
        self._store.set_pending_ops(self._row.id, pending)
        self._reload()

    def price(self, forget: Sequence[int] = (), recall: Sequence[int] = ()) -> Price:
        outlook = self._outlook()
        if forget:
            outlook = self._outlook(outlook.with_forget(forget))
        if recall:
            outlook = self._outlook(outlook.with_recall(recall))
        tok_fp = bytes.fromhex(self._engine.wait_ready().tok_fp)
        request, _ = self._request(tok_fp, self._sampling, path=self._path)
        ops = [one.to_json() for one in outlook.after]
        found = self._engine.call("price", request=asdict(replace(request, ops=ops)))
        return Price(**found)

    def plan(self, text: str, beside: int | None = None) -> list[ForgetPlanned]:
        tok_fp = bytes.fromhex(self._engine.wait_ready().tok_fp)
        place = next((i for i, t in enumerate(self._path) if t.turn.id == beside), None)
        path = self._path[:place]
        if not path:
            return []  # nothing that could go
        pending = self._ops_of_turn(path[-1], None if place is None else self._path[place])
        request, _ = self._request(tok_fp, self._sampling, path=path)
        number = path[-1].turn.depth + 1
        asked = PathMessage("user", text, turn=number)
        ops = [one.to_json() for one in self._outlook(pending, path).after]
        policy = "turns" if self._policy in ANSWERS else self._policy
        messages = [*request.messages, asked]
        whole = replace(request, messages=messages, ops=ops, policy=policy)
        return self._plans(whole)

    def _plans(self, request: Request) -> list[ForgetPlanned]:
        """What a request would put out of sight. Raises ChatKVError, with ContextFull's code."""
        found = self._engine.call("plan_forget", request=asdict(request))
        if found["error"] is not None:
            raise _refusal(found["error"])
        return [_planned(one) for one in found["plans"]]

    def pin(self, numbers: Sequence[int], *, pinned: bool = True) -> str:
        ids = [self._outlook().turn(number).turn.id for number in numbers]
        self._store.pin(ids, pinned=pinned)
        self._reload()
        return self._outlook().view().warning if pinned else ""

    def shared_with(self, turn_ids: Sequence[int]) -> tuple[str, ...]:
        return deletion.shared_with(self._store, self.id, turn_ids)

    def redact(self, turn_ids: Sequence[int], *, purge: bool = False) -> RedactEvent:
        remove = partial(deletion.work_off, self._store, self._purge_pages)
        path, tok_fp = self._path, self._outlook().tok_fp
        try:
            gone = deletion.redact(self._store, turn_ids, purge=purge, remove=remove)
        finally:
            self._reload()
        mine = [turn for turn in path if turn.turn.id in gone.turns]
        sizes = [None if tok_fp is None else turn_tokens(turn, tok_fp) for turn in mine]
        numbers = tuple(turn.turn.depth for turn in mine)
        return RedactEvent(numbers, sum(size or 0 for size in sizes), gone.pages)

    def _purge_pages(self, ids: Sequence[int], keep_tokens: int) -> int:
        """The engine has them in memory, too."""
        return int(self._engine.call("purge", ids=list(ids), keep_tokens=keep_tokens)["pages"])

    # What a turn takes along.

    def _outlook(
        self, pending: Pending | None = None, path: list[TurnPath] | None = None
    ) -> Outlook:
        if pending is None:
            pending = [] if self._row is None else self._row.pending_ops
        return Outlook(
            self._path if path is None else path,
            pending,
            ready=self._engine.state.ready,
            policy="turns" if self._policy in ANSWERS else self._policy,
            max_tokens=self._sampling.get("max_tokens"),
        )

    def _ops_of_turn(self, parent: TurnPath, beside: TurnPath | None) -> Pending:
        """The forget records that a new turn behind `parent` begins with: what waited for it, and
        what the user had said with the turn it stands beside."""
        assert self._row is not None
        rows = [] if beside is None else [row for row in beside.forgets if row.policy == USER]
        carried: dict[int, dict[str, Any]] = {
            row.id: {
                "policy": row.policy,
                "reason": row.reason,
                "op": row.op,
                "num_tokens": row.num_tokens,
                "cancels": row.cancels,
            }
            for row in rows
        }
        path = self._path[: self._path.index(parent) + 1]
        known = {row.id for turn in path for row in turn.forgets}
        last = parent.turn.depth
        kept: Pending = []
        for each in self._row.pending_ops:
            if (twin := carried.get(each.get("cancels") or 0)) is not None:
                twin["op"] = each["op"]  # what came back stays back
                twin["num_tokens"] -= each["num_tokens"]
            elif each.get("cancels") is None:
                turns = [number for number in each["op"].get("turns", ()) if number <= last]
                if turns:
                    kept.append({**each, "op": {**each["op"], "turns": turns}})
            elif each["cancels"] in known:
                kept.append(each)
        said = [each for each in carried.values() if each["cancels"] or each["op"].get("turns")]
        return [*said, *kept]

    def _recalled(self, parent: TurnPath, ops: Pending) -> RecallEvent | None:
        """What comes back into sight with a turn that begins with these records."""
        path = self._path[: self._path.index(parent) + 1]
        back = sorted({int(n) for each in ops for n in each.get("back", ())})
        if not back:
            return None
        view = Outlook(
            path, ops, ready=self._engine.state.ready, policy="error", max_tokens=None
        ).view()
        return RecallEvent(
            turns=tuple(back),
            num_tokens=sum(each["num_tokens"] for each in ops if each.get("back")),
            live_before=view.used or 0,
            live_after=view.used_next or 0,
            limit=view.limit,
        )

    def _request(
        self,
        tok_fp: bytes,
        sampling: Mapping[str, Any],
        spec: str | None = None,
        *,
        path: Sequence[TurnPath] | None = None,
    ) -> tuple[Request, list[int]]:
        """The open path as the engine takes it, and the row behind each message.

        Args:
            tok_fp: Of the engine's tokenizer.
            sampling: Of the reply.
            spec: How it is drafted.
            path: Turns that no reply is wanted for, in place of the open path to its last one.
        """
        messages: list[PathMessage] = []
        owners: list[int] = []
        asked = self._path[-1] if path is None else None
        for turn in self._path if path is None else path:
            if not turn.shown and turn is not asked:
                continue
            for message in turn.messages:
                render = message.render(tok_fp)
                messages.append(
                    PathMessage(
                        role=message.row.role,
                        content=message.row.content,
                        ids=None if render is None else render.token_ids,
                        sampled=() if render is None else render.sampled,
                        turn=turn.turn.depth,
                        pinned=turn.turn.pinned,
                    )
                )
                owners.append(message.row.id)
        policy = {"ask": "turns", "stop": "error"}.get(self._policy, self._policy)
        ops = [one.to_json() for one in standing(self._path if path is None else path)]
        salt = None if self._row is None else self._row.settings.get(KV_SALT)
        return Request(messages, sampling, spec, salt, policy, ops), owners

    def _reload(self) -> None:
        if self._row is not None:
            self._row = self._store.session(self._row.id)
            self._path = self._store.path(self._row.id)


def _planned(data: dict[str, Any]) -> ForgetPlanned:
    """A plan that crossed the pipe, without its op."""
    fields: dict[str, Any] = {name: value for name, value in data.items() if name != "op"}
    fields["turns"], fields["partly"] = tuple(data["turns"]), tuple(data["partly"])
    return ForgetPlanned(**fields)


def _refusal(data: Mapping[str, Any]) -> ChatKVError:
    """The error an engine told of, with its own code and exit status."""
    error = ChatKVError(str(data["message"]), hint=str(data["hint"]))
    error.code, error.exit_code = str(data["code"]), int(data["exit"])
    return error
