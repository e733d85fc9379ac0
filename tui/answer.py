"""One reply as a command sees it: events in, text and the JSON of the reply out.

Knows the ports and the event records. The field names are those of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chatkv.errors import ChatKVError, EngineLost, plural
from chatkv.events import (
    Done,
    Event,
    Failed,
    ForgetEvent,
    RecallEvent,
    Summarizing,
    TokenLogprob,
    Usage,
)
from sessions.port import ChatPort, ContextView, Preview, TurnView
from tui.output import size
from tui.turns import spans, which_turns

NO_REPLY = "no reply; the model does not see this turn"
"""What is said of a turn that ended before its reply began."""


WHY = {"user": "as you said", "summarize": "a summary stands for them"}
"""Of a policy: why turns left the model's context."""


def play(events: Iterator[Event], on_event: Callable[[Event], None]) -> Done:
    """Hand each event on and return the last one.

    Raises:
        ChatKVError: The reply ended in an error; with that error's code and exit status.
    """
    with _closing(events):
        for event in events:
            on_event(event)
            if isinstance(event, Done):
                return event
            if isinstance(event, Failed):
                raise error_of(event)
    raise EngineLost("The reply ended without a last word.", hint="What arrived is saved.")


@contextmanager
def _closing(events: Iterator[Event]) -> Iterator[None]:
    """Close a stream that is left early, so that the reply is stopped and its partial saved."""
    try:
        yield
    finally:
        if isinstance(events, Generator):
            events.close()


def moment(event: ForgetEvent | RecallEvent) -> str:
    """What went out of the model's sight, or came back, in one line."""
    which = which_turns(event.turns) if event.turns else "part of the conversation"
    tokens = plural(event.num_tokens, "token")
    sizes = f"{event.live_before:,} to {event.live_after:,} of {event.limit:,} in sight"
    if isinstance(event, RecallEvent):
        return f"{which} came back into the model's context ({tokens}; {sizes})"
    if not event.num_tokens:
        return f"Positions were moved: the model was trained for no more ({sizes})"
    why = WHY.get(event.policy, f"policy {event.policy}")
    partly = f", part of {spans(list(event.partly))}" if event.partly else ""
    return f"{which}{partly} left the model's context ({tokens}, {why}; {sizes})"


def summarizing(event: Summarizing) -> str:
    """That a summary is being written."""
    return f"Summing up {which_turns(event.turns)} in at most {plural(event.total, 'token')} ..."


def missing(view: ContextView) -> list[str]:
    """One line about what the model does not see, if there is anything."""
    if not view.missing:
        return []
    which = which_turns(view.missing)
    return [f"The model does not see {which} ({plural(view.forgotten_tokens, 'token')})."]


def error_of(failed: Failed) -> ChatKVError:
    """The error an engine told of, with its own code and exit status."""
    error = ChatKVError(failed.message, hint=failed.hint)
    error.code, error.exit_code = failed.code, failed.exit
    return error


def usage_json(usage: Usage) -> dict[str, Any]:
    """`usage`, `timings` and `reuse` of one reply."""
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.predicted_n,
            "total_tokens": usage.prompt_tokens + usage.predicted_n,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": usage.draft_n_accepted,
                "rejected_prediction_tokens": usage.draft_n - usage.draft_n_accepted,
            },
        },
        "timings": {
            "prompt_n": usage.prompt_n,
            "prompt_ms": round(usage.prompt_ms, 3),
            **({"summary_n": usage.summary_n} if usage.summary_n else {}),
            **({"summary_ms": round(usage.summary_ms, 3)} if usage.summary_n else {}),
            "predicted_n": usage.predicted_n,
            "predicted_ms": round(usage.predicted_ms, 3),
            "predicted_per_second": round(usage.tokens_per_second, 2),
            "draft_n": usage.draft_n,
            "draft_n_accepted": usage.draft_n_accepted,
            "steps": usage.steps,
            "restore_ms": round(usage.restore_ms, 3),
        },
        "reuse": {
            "tokens": usage.cached_tokens,
            "reusable_tokens": usage.reusable_tokens,
            "hit_rate": None if usage.hit_rate is None else round(usage.hit_rate, 4),
            "reason": usage.reuse_reason,
            "detail": usage.reuse_detail,
            "restored_pages": usage.restored_pages,
            "host_pages": usage.host_pages,
            "verified": usage.verified,
        },
    }


def reply_json(chat: ChatPort, done: Done, *, model: str, saved: bool = True) -> dict[str, Any]:
    """The object `ask --json` prints.

    Args:
        chat: The conversation the reply was given in; its last turn is this one.
        done: The end of the reply.
        model: Name of the model.
        saved: False for an ephemeral chat, which no id can find again.
    """
    turns = chat.turns()
    turn = turns[-1] if turns else None
    limit, seen = done.usage.context_limit, chat.context()
    return {
        "session": chat.id if saved else None,
        "name": chat.name,
        "fork": chat.fork_name,
        "turn": turn.number if turn else None,
        "text": done.text,
        "finish_reason": done.finish_reason,
        "seed": turn.seed if turn else None,
        "model": model,
        **usage_json(done.usage),
        "context": {
            "limit": limit,
            "used": done.usage.context_used,
            "reserved": done.usage.context_reserved,
            "missing": list(seen.missing),
            "why": {str(number): policy for number, policy in seen.why.items()},
        },
    }


def logprobs_json(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a reply or of a part of it; nothing where nobody asked."""
    if not found:
        return {}
    content = [
        {**_logprob_json(one), "top_logprobs": [_logprob_json(other) for other in one.top]}
        for one in found
    ]
    return {"logprobs": {"content": content}}


def _logprob_json(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "id": one.id, "logprob": one.logprob}


def turn_json(turn: TurnView) -> dict[str, Any]:
    """One turn of `show --json`."""
    return {
        "turn": turn.number,
        "prompt": turn.prompt,
        "text": turn.reply,
        "state": turn.state,
        "finish_reason": turn.finish_reason or None,
        "seed": turn.seed,
        "created_at": turn.created_at,
        "sibling": turn.sibling,
        "siblings": turn.siblings,
        "seen": turn.seen,
        **({"summary": True} if turn.summary else {}),
        "redacted": turn.redacted,
        "pinned": turn.pinned,
        **(usage_json(turn.usage) if turn.usage else {}),
    }


def summary(done: Done) -> str:
    """The numbers of a reply in one line."""
    usage = done.usage
    parts = [
        f"{usage.predicted_n} tok",
        f"{usage.tokens_per_second:.0f} tok/s",
        f"reused {usage.cached_tokens} of {usage.prompt_tokens}",
        f"{usage.tokens_per_step:.1f} tok/step",
    ]
    if done.finish_reason != "stop":
        parts.append(done.finish_reason.replace("_", " "))
    return " · ".join(parts)


def preview_words(found: Preview) -> str:
    """What going on with a chat costs, in one line."""
    parts = [
        f"{pages:,} {where}"
        for pages, where in (
            (found.pool_pages + found.host_pages, "in memory"),
            (found.disk_pages, f"from disk ({size(found.disk_bytes)})"),
            (found.computed_pages, f"to compute ({found.computed_tokens:,} tokens)"),
        )
        if pages
    ]
    pages = f"pages: {', '.join(parts)}" if parts else "nothing to read or compute"
    if found.ms is None:
        return pages
    return (
        f"about {found.ms:.0f} ms, {pages}"
        if found.ms < 1000
        else (f"about {found.ms / 1000:.1f} s, {pages}")
    )
