"""Why each prompt of a conversation was computed again, or was not: `chatkv explain`.

Works from what `chat.db` keeps: the tree of turns, the ids of their messages, and the counts that
each reply was stored with. Knows no engine and no page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sessions.counters import Sums
from sessions.divergence import Decoder, Divergence, Prompt, count
from sessions.store import ChatStore

STORED_REASONS = ("damaged", "evicted", "not_stored", "fingerprint", "faster", "off", "forgot")
"""What a reply may have been stored with beside `new`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt tokens, half-open."""

    start: int
    stop: int
    reason: str
    """`reused`, or why they were computed: one of the closed list."""


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn of the open path."""

    turn: int
    turn_id: int
    state: str
    prompt_tokens: int | None
    """None for a turn that was never answered to its end: nothing was counted."""
    reused: int | None
    computed: int | None
    hit_rate: float | None
    """Reused over what could have been; None if nothing could, or nobody counted."""
    restored_pages: int
    """From disk."""
    host_pages: int
    """From host memory."""
    verified: bool | None
    prompt_ms: float | None
    reason: str | None
    """Why the run of reused tokens ended where it did; None if nothing was counted."""
    note: str
    """In one clause what the reason leaves open, or nothing."""
    spans: tuple[Span, ...] = ()
    divergence: Divergence | None = None


def explain(
    store: ChatStore, session_id: str, tokenizer: Decoder | None = None
) -> list[TurnReport]:
    """A report for each turn of the open path.

    Args:
        store: chat.db.
        session_id: Which conversation.
        tokenizer: Of the model it was held with, to show ids as text.

    Raises:
        UnknownSession: There is none of that id.
        StoreError: Something in it cannot be read.
    """
    path = store.path(session_id)
    return [_report(Prompt(store, path[: place + 1], tokenizer)) for place in range(1, len(path))]


def explain_last(store: ChatStore, session_id: str, tokenizer: Decoder | None = None) -> TurnReport:
    """Of the last turn of the open path alone."""
    return _report(Prompt(store, store.path(session_id), tokenizer))


def _report(prompt: Prompt) -> TurnReport:
    row, usage = prompt.turn.turn, prompt.turn.turn.usage
    reused, divergence = count(usage, "cached_tokens"), prompt.divergence()
    spans: tuple[Span, ...] = ()
    reason = None
    if prompt.total is not None and reused is not None:
        known = max(reused, _known(prompt, prompt.total, divergence))
        fresh = "new" if divergence is None else "diverged"
        edges = (
            (0, reused, "reused"),
            (reused, known, _missed(prompt)),
            (known, prompt.total, fresh),
        )
        spans = tuple(Span(*edge) for edge in edges if edge[0] < edge[1])
        reason = next((span.reason for span in spans if span.reason != "reused"), "new")
    return TurnReport(
        turn=row.depth,
        turn_id=row.id,
        state=row.state,
        prompt_tokens=prompt.total,
        reused=reused,
        computed=count(usage, "prompt_n"),
        hit_rate=_hit_rate(usage),
        restored_pages=count(usage, "restored_pages") or 0,
        host_pages=count(usage, "host_pages") or 0,
        verified=usage.get("verified"),
        prompt_ms=usage.get("prompt_ms"),
        reason=reason,
        note=_note(prompt, reason),
        spans=spans,
        divergence=divergence,
    )


def _hit_rate(usage: Mapping[str, Any]) -> float | None:
    turn = Sums()
    turn.add_stored(usage)
    return turn.hit_rate


def _known(prompt: Prompt, total: int, divergence: Divergence | None) -> int:
    """How many leading tokens had been computed before, in this conversation."""
    if divergence is not None:
        return divergence.position
    if prompt.is_again:
        return total - 1  # the last one is always computed, for its logits
    reply = prompt.parent.reply
    render = None if reply is None or prompt.tok_fp is None else reply.render(prompt.tok_fp)
    if prompt.ids is None or render is None or not render.sampled:
        return 0  # a first turn, or nobody ever computed the reply before it in that form
    # The last id the model chose has no row yet, nor have the ids that close the reply.
    return total - len(prompt.ids) - (len(render.token_ids) - render.sampled[-1][1]) - 1


def _missed(prompt: Prompt) -> str:
    """Why known tokens were computed again."""
    stored = prompt.turn.turn.usage.get("reuse_reason")
    if stored in STORED_REASONS:
        return str(stored)
    if prompt.turn.forgets:
        return "forgot"
    return "fingerprint" if _models(prompt) else "not_stored"


def _note(prompt: Prompt, reason: str | None) -> str:
    if reason == "forgot" and prompt.turn.forgets:
        record = prompt.turn.forgets[-1]
        return f"{record.policy}: {record.num_tokens} tokens ({record.reason})"
    detail = prompt.turn.turn.usage.get("reuse_detail")
    models = _models(prompt)
    if detail and reason in STORED_REASONS:
        return str(detail) if reason != "fingerprint" else f"other {detail}"
    if models:
        return f"the model was {models[0]} and is {models[1]}"
    if prompt.left_out:
        return "the turn before it has no reply and is left out"
    if prompt.is_again:
        return "again: a sibling has the same prompt"
    if prompt.parent.turn.depth and prompt.parent.turn.state != "done":
        return "the reply before it was cut; what closes it is new"
    return ""


def _models(prompt: Prompt) -> tuple[str, str] | None:
    """The model before and the model now, where both are known and differ."""
    before, now = prompt.parent.turn.usage.get("model"), prompt.turn.turn.usage.get("model")
    return (before, now) if before and now and before != now else None
