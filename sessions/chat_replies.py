"""The side of an open conversation between a stored prompt and the first word of its reply: ids are
kept, and room is made by a summary if the policy asks for one.

Knows the store and the engine's port. What a reply writes down is in `chat.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from chatkv.errors import ChatKVError, ContextFull, EngineLost
from chatkv.events import Done, Event, Failed, ForgetPlanned, Rendered
from chatkv.forget import SummarizePolicy, parse_policy, policy_text
from sessions.chat_context import ChatContext
from sessions.context import SUMMARIZE
from sessions.reply import StoredReply
from sessions.request import Request
from sessions.summary import Summary


class ChatReplies(ChatContext):
    """What the engine says to a conversation's last prompt."""

    _spec: str | None = None
    _notice = ""
    """Said with the next end of a reply."""
    _cancelled = False
    """Whether the running reply was stopped: it may have begun to make room only."""

    def _events(self, reply: StoredReply, sampling: Mapping[str, Any]) -> Iterator[Event]:
        """What the engine says to the last prompt, room for it made first. Keeps the ids."""
        assert reply.tok_fp is not None
        request, owners = self._request(reply.tok_fp, sampling, self._spec)
        summary = None
        if request.policy.partition(":")[0] == SUMMARIZE:
            found = yield from self._planned(request)
            if found is None:
                return
            policy, plans = found
            request = replace(request, policy=policy_text(policy.as_turns))
            if plans:
                summary = Summary(self._engine, request, plans[0], policy)
                if not (yield from self._summarize(summary, reply, owners)):
                    return
                if not summary.why_not:
                    request, owners = self._request(reply.tok_fp, sampling, self._spec)
                    request = replace(request, policy="error")  # there is room now
        for event in self._engine.generate(request):
            if isinstance(event, Rendered):
                self._keep_renders(event, owners, reply.tok_fp)
            if isinstance(event, Done) and summary is not None:
                event = replace(event, usage=summary.counted(event.usage))
            yield event

    def _planned(
        self, request: Request
    ) -> Generator[Event, None, tuple[SummarizePolicy, list[ForgetPlanned]] | None]:
        """The policy and what a summary would stand for, if one is needed; None where it failed."""
        policy, plans = None, list[ForgetPlanned]()
        try:
            policy = parse_policy(request.policy)
            plans = self._plans(request)
        except EngineLost:
            raise
        except ChatKVError as error:
            if error.code != ContextFull.code:  # of which the reply's own request tells
                yield Failed(error.code, error.exit_code, error.message, error.hint)
                return None
        assert isinstance(policy, SummarizePolicy)
        return policy, [one for one in plans if one.policy == SUMMARIZE]

    def _summarize(
        self, summary: Summary, reply: StoredReply, owners: list[int]
    ) -> Generator[Event, None, bool]:
        """Write a summary, and go to its branch if it is of use. False if nothing comes behind."""
        assert self._row is not None
        assert reply.tok_fp is not None
        for event in summary.write():
            if isinstance(event, Rendered):
                self._keep_renders(event, owners, reply.tok_fp)
            else:
                yield event
        if (failed := summary.failed) is not None:
            message = f"No summary could be written: {failed.message}"
            hint = f"{failed.hint} Or forget without one: --on-overflow turns.".strip()
            yield replace(failed, message=message, hint=hint)
            return False
        if summary.cancelled or self._cancelled:
            yield summary.end()
            return False
        if summary.why_not:
            self._notice = f"Turns left without a summary: {summary.why_not}."
            return True
        self._path = self._store.path(self._row.id, reply.turn_id)
        made, event = summary.branch(self._path, self._outlook().limits)
        reply.turn_id = self._store.branch(self._row.id, made)
        reply.heard = True
        self._path = self._store.path(self._row.id, reply.turn_id)
        yield event
        return True

    def _keep_renders(self, event: Rendered, owners: list[int], tok_fp: bytes) -> None:
        for made in event.messages:
            self._store.set_render(owners[made.index], tok_fp, made.ids, made.sampled)
