"""A summary in place of turns that go out of sight: written on a fork, put on a branch of its own.

Knows the engine's port and turns as records; stores nothing itself. Which turns go is a plan of
`chatkv.forget`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from chatkv.events import (
    Delta,
    Done,
    Event,
    Failed,
    ForgetEvent,
    ForgetPlanned,
    MessageIds,
    Ready,
    Rendered,
    Summarizing,
    Usage,
)
from chatkv.forget import Layout, Limits, SummarizePolicy, TurnSpan, plan_turns
from sessions.branches import SummaryTurn
from sessions.context import (
    SUMMARIZE,
    USER,
    Standing,
    spans_of_path,
    standing,
    to_ops,
    to_record,
    turn_tokens,
)
from sessions.port import EnginePort
from sessions.records import Render, TurnPath
from sessions.request import PathMessage, Request

PROMPT = (
    "Summarize our conversation so far in at most {words} words, so that you could go on from the "
    "summary alone. Keep names, numbers, decisions and open questions."
)
MIN_TOKENS = 16
"""A summary that has less room is not begun."""
WORDS_PER_TOKEN = 0.6
"""Asked for; most tokenizers make 0.75 of English, and a summary that is cut is of no use."""
FREE = ("stop", "grammar", "logit_bias", "logprobs")
"""Settings of a reply that say nothing about a summary."""


class Summary:
    """A summary on its way.

    Args:
        engine: Writes it.
        request: Of the reply that waits for room: the whole path.
        plan: What goes out of sight.
        policy: How much shorter it has to be.
    """

    def __init__(
        self,
        engine: EnginePort,
        request: Request,
        plan: ForgetPlanned,
        policy: SummarizePolicy,
    ) -> None:
        self._engine, self._request = engine, request
        self._plan, self._policy = plan, policy
        self._ready: Ready = engine.wait_ready()
        self._last = plan.turns[-1]
        self._prompt = ""
        self._prompt_ids: MessageIds | None = None
        self._done: Done | None = None
        self._sampling: dict[str, Any] = {}
        self._ms = 0.0
        self._used = False
        self.failed: Failed | None = None
        self.why_not = ""
        """Why it is of no use, in a clause."""

    @property
    def cancelled(self) -> bool:
        return self._done is not None and self._done.finish_reason == "cancelled"

    def write(self) -> Iterator[Event]:
        """Yield `Summarizing`, and `Rendered` for messages of the path that had no ids."""
        began = perf_counter()
        room = self._room()
        if any("at" in one and one["turn"] > self._last for one in self._request.ops):
            self.why_not = "a part of a turn is out of sight, which a summary cannot stand for"
        elif room < MIN_TOKENS:
            self.why_not = f"{self._plan.num_tokens} tokens are too few to sum up"
        else:
            yield from self._write(room)
            self._judge()
        self._ms = 1000 * (perf_counter() - began)

    def _room(self) -> int:
        """The most tokens of the reply; writes the prompt that asks for about as many."""
        asked = self._engine.call("prompt_tokens", text=PROMPT.format(words=100))["tokens"]
        most = int(self._plan.num_tokens / self._policy.shrink)
        room = most - int(asked) - self._ready.closing_tokens
        self._prompt = PROMPT.format(words=int(WORDS_PER_TOKEN * room))
        return room

    def _write(self, room: int) -> Iterator[Event]:
        before = [one for one in self._request.messages if one.turn <= self._last]
        asked = PathMessage("user", self._prompt, turn=self._last + 1)
        self._sampling = {**self._request.sampling, "max_tokens": room}
        for name in FREE:
            self._sampling.pop(name, None)
        request = replace(
            self._request,
            messages=[*before, asked],
            sampling=self._sampling,
            policy="error",
            ops=[*self._ops_before(), *self._ops_behind()],
        )
        written = 0
        yield Summarizing(self._plan.turns, 0, room)
        for event in self._engine.generate(request):
            match event:
                case Rendered(messages):
                    self._prompt_ids = next((m for m in messages if m.index == len(before)), None)
                    yield Rendered(tuple(m for m in messages if m.index < len(before)))
                case Delta(_, ids):
                    written += len(ids)
                    yield Summarizing(self._plan.turns, written, room)
                case Done():
                    self._done = event
                case Failed():
                    self.failed = event
                case _:
                    pass

    def _ops_before(self) -> list[Mapping[str, Any]]:
        return [one for one in self._request.ops if one["turn"] <= self._last]

    def _ops_behind(self) -> list[dict[str, Any]]:
        """What went out of sight behind the last turn that goes, as the summary's turn begins."""
        found: list[dict[str, Any]] = []
        for one in self._request.ops:
            turns = [n for n in one.get("turns", ()) if n <= self._last]
            if one["turn"] > self._last and turns:
                found.append({"turn": self._last + 1, "policy": one["policy"], "turns": turns})
        return found

    def _judge(self) -> None:
        done, plan = self._done, self._plan
        if done is None or done.finish_reason == "cancelled":
            return
        if done.finish_reason != "stop":
            self.why_not = f"it did not come to its end in {len(done.ids)} tokens"
        elif not done.text.strip():
            self.why_not = "the model wrote nothing"
        elif self.tokens * self._policy.shrink > plan.num_tokens:
            self.why_not = (
                f"it takes {self.tokens} tokens, and what it stands for {plan.num_tokens}"
            )
        elif plan.live_after + self.tokens + 1 + self._ready.closing_tokens > plan.limit:
            self.why_not = "even so there would be no room for the reply"

    @property
    def tokens(self) -> int:
        """Of its whole turn."""
        assert self._done is not None
        assert self._prompt_ids is not None
        return len(self._prompt_ids.ids) + len(self._done.ids)

    @property
    def written(self) -> int:
        """Tokens the model wrote, used or not."""
        return 0 if self._done is None else self._done.usage.predicted_n

    def end(self) -> Done:
        """The end of a reply that was stopped before it began."""
        usage = Usage(context_limit=self._ready.context_limit)
        return Done("cancelled", "", (), (), self.counted(usage))

    def counted(self, usage: Usage) -> Usage:
        """The numbers of the reply, with what the summary took, and why little was found there."""
        if self._used and usage.reuse_reason != "new":
            detail = f"a summary stands for turns {self._plan.turns[0]} to {self._last}"
            usage = replace(usage, reuse_reason="forgot", reuse_detail=detail)
        return replace(usage, summary_n=self.written, summary_ms=self._ms)

    # Its branch.

    def branch(self, path: Sequence[TurnPath], limits: Limits) -> tuple[SummaryTurn, ForgetEvent]:
        """What has to be stored, and what is told of it.

        Args:
            path: The turns as they are stored now.
            limits: What the path has to fit.
        """
        assert self._done is not None
        assert self._prompt_ids is not None
        self._used = True
        tok_fp = bytes.fromhex(self._ready.tok_fp)
        kept = path[self._last + 1 :]
        op = self._record(path[: self._last + 1], limits)
        own = {
            "policy": SUMMARIZE,
            "reason": "limit",
            "op": op,
            "num_tokens": self._plan.num_tokens,
        }
        ops = _moved(standing(path), path, kept, self._last, tok_fp)
        done = self._done
        made = SummaryTurn(
            after=path[self._last].turn.id,
            prompt=self._prompt,
            reply=done.text,
            prompt_ids=Render(tok_fp, self._prompt_ids.ids),
            reply_ids=Render(tok_fp, done.ids, done.sampled),
            sampling=self._sampling,
            usage={
                **asdict(done.usage),
                "finish_reason": done.finish_reason,
                "model": self._ready.model,
            },
            kept=tuple(turn.turn.id for turn in kept),
            ops=([*ops[0], own], *ops[1:]),
        )
        plan = self._plan
        event = ForgetEvent(
            plan.policy,
            plan.reason,
            plan.turns,
            plan.partly,
            plan.num_tokens,
            plan.live_before,
            plan.live_after + self.tokens,
            plan.limit,
            op,
        )
        return made, event

    def _record(self, path: Sequence[TurnPath], limits: Limits) -> dict[str, Any]:
        """The record of the summary's turn; it moves positions if they would run out behind it."""
        spans = spans_of_path(path, bytes.fromhex(self._ready.tok_fp))
        assert spans is not None, "the engine has just made these ids"
        end = spans[-1].stop
        spans.append(TurnSpan(self._last + 1, end, end + 1))
        records = [*self._ops_before(), *self._ops_behind()]
        layout = Layout(tuple(spans), tuple(to_ops(records, spans, self._ready.tok_fp)))
        coming = self._plan.live_after + self.tokens + limits.reserve
        made = plan_turns(SUMMARIZE, layout, self._plan.turns, coming, limits)
        return to_record(made, layout, self._ready.tok_fp)


def _moved(
    records: Sequence[Standing],
    path: Sequence[TurnPath],
    kept: Sequence[TurnPath],
    last: int,
    tok_fp: bytes,
) -> list[list[dict[str, Any]]]:
    """The records that stood behind turn `last`, for the summary's turn and each that is kept.

    What they say of turns up to `last` holds from the summary on, but for those of the turn to be
    answered, of which the reply tells; turns behind `last` have other numbers.
    """
    numbers = {turn.turn.depth: last + 2 + place for place, turn in enumerate(kept)}
    found: list[list[dict[str, Any]]] = [[] for _ in range(1 + len(kept))]
    for one in records:
        if one.turn <= last:
            continue
        holder = next(place for place, turn in enumerate(kept, 1) if turn.turn.depth >= one.turn)
        early = [] if holder == len(kept) else [n for n in one.turns if n <= last]
        late = [n for n in one.turns if n not in early]
        for place, old, turns in (
            (0, early, early),
            (holder, late, [numbers.get(number, number) for number in late]),
        ):
            if turns:
                tokens = sum(turn_tokens(path[number], tok_fp) or 0 for number in old)
                reason = USER if one.policy == USER else "limit"
                row = {"policy": one.policy, "reason": reason, "num_tokens": tokens}
                found[place].append({**row, "op": {"turns": turns}})
    return found
