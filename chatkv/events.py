"""What an engine tells while it works. Plain records that become JSON; no tensor, no widget.

A front reads them in this order for one reply: `Summarizing` (none or more), `Rendered`, `Prefill`
(none or more), `Delta` (one a step), then `Done` or `Failed`. `Loading` and `Ready` come once,
before the first reply. A `ForgetEvent` comes before everything that was computed without what it
names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, get_args


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is being read. `done` and `total` count bytes of `stage`."""

    type: ClassVar[str] = "loading"
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can take a request."""

    type: ClassVar[str] = "ready"
    model: str
    device: str
    backend: str
    mode: str
    context_limit: int
    drafting: str
    tok_fp: str
    """Hex digest of tokenizer, template and options: the key under which ids are stored."""
    notice: str = ""
    """One sentence the user should see once, or nothing."""
    trained_limit: int = 0
    """Positions the model was trained for; 0 where nobody said."""
    page_tokens: int = 1
    no_rebase: str = ""
    """What about the model forbids to move positions; empty if nothing does."""
    closing_tokens: int = 0
    """Ids that the template puts behind a reply, at most."""
    parameters: int = 0
    """Weights of the model, about; 0 where nobody said."""

    @property
    def limit_reason(self) -> str:
        """Which of its bounds the context is, in a clause; nothing where nobody said."""
        if not self.trained_limit:
            return ""
        if self.context_limit >= self.trained_limit:
            return "all the model was trained for"
        return f"as --context says; the model was trained for {self.trained_limit:,}"


@dataclass(frozen=True, slots=True)
class MessageIds:
    """The ids one message puts in front of the model."""

    index: int
    """Place of the message in the request."""
    ids: tuple[int, ...]
    sampled: tuple[tuple[int, int], ...]
    """Half-open spans of `ids` that the model chose."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids made for messages that had none, before anything is computed from them."""

    type: ClassVar[str] = "rendered"
    messages: tuple[MessageIds, ...]


@dataclass(frozen=True, slots=True)
class _Forgetting:
    """What goes out of the model's sight."""

    policy: str
    """Name of the policy; `user` for /forget, `rebase` where only positions move."""
    reason: str
    """`limit`: the context is full; `position`: the model was trained for no more; `user`."""
    turns: tuple[int, ...]
    """Numbers of the turns of which nothing is left in sight."""
    partly: tuple[int, ...]
    """Numbers of the turns of which something is."""
    num_tokens: int
    live_before: int
    """Tokens in sight, the new prompt included."""
    live_after: int
    limit: int


@dataclass(frozen=True, slots=True)
class ForgetPlanned(_Forgetting):
    """What the next turn would put out of the model's sight; nothing has happened."""

    type: ClassVar[str] = "forget_planned"
    replay_tokens: int
    """What would have to be computed if every stored page were lost."""
    restart_tokens: int
    """What computing the rest as a plain prompt would take."""


@dataclass(frozen=True, slots=True)
class ForgetEvent(_Forgetting):
    """Tokens left the model's sight."""

    type: ClassVar[str] = "forget"
    op: dict[str, Any]
    """As `sessions.context.Standing` has it: what has to be recorded."""


@dataclass(frozen=True, slots=True)
class RecallEvent:
    """Turns are in the model's sight again."""

    type: ClassVar[str] = "recall"
    turns: tuple[int, ...]
    num_tokens: int
    live_before: int
    live_after: int
    limit: int


@dataclass(frozen=True, slots=True)
class RedactEvent:
    """Turns and every stored page that saw them are gone."""

    type: ClassVar[str] = "redact"
    turns: tuple[int, ...]
    """Numbers on the open path, those of summaries of them too."""
    num_tokens: int
    pages: int
    """Stored pages that went."""


@dataclass(frozen=True, slots=True)
class Summarizing:
    """The model writes what will stand for turns that go: `done` of at most `total` tokens."""

    type: ClassVar[str] = "summarizing"
    turns: tuple[int, ...]
    """Numbers of the turns that go."""
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens so far: `reused` were found, `done` of `total` are in place."""

    type: ClassVar[str] = "prefill"
    reused: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself found a token, before any setting of the sampler."""

    id: int
    token: str
    """Its text; U+FFFD for bytes that are no whole code point."""
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in its place, best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens of one step, and the text that became whole with them."""

    type: ClassVar[str] = "delta"
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `ids`, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of one reply. Times in milliseconds; every one is measured by the engine."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose K/V were found in memory or on disk."""
    host_tokens: int = 0
    """Of these, the ones that came from host memory."""
    disk_tokens: int = 0
    """Of these, the ones that came from disk; the rest was in the pool."""
    token_bytes: int = 0
    """K/V of one token."""
    prompt_n: int = 0
    """Prompt tokens that were computed for this reply."""
    reusable_tokens: int = 0
    """Prompt tokens that had been computed before, so that they might have been found."""
    prompt_ms: float = 0.0
    summary_n: int = 0
    """Tokens of a summary that was written before this reply, used or not."""
    summary_ms: float = 0.0
    """What that took, its prompt included. Not part of the times beside it."""
    predicted_n: int = 0
    predicted_ms: float = 0.0
    steps: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    restore_ms: float = 0.0
    restored_pages: int = 0
    """Pages that came from disk."""
    host_pages: int = 0
    """Pages that came from host memory."""
    reuse_reason: str = "new"
    """Why no more was reused."""
    reuse_detail: str = ""
    """What goes with the reason, in a clause, or nothing."""
    verified: bool | None = None
    """Whether a forward pass agreed with the restored pages; None when nothing was restored."""
    context_limit: int = 0
    context_used: int = 0
    """Tokens the model sees behind this reply, its closing ids counted."""
    context_reserved: int = 0
    """Tokens that were kept free for the reply."""
    forgotten_tokens: int = 0
    """Tokens of the conversation that the model does not see."""
    pages_used: int = 0
    pages_total: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the reusable tokens that were found; None if nothing was reusable."""
        if not self.reusable_tokens:
            return None
        return min(self.cached_tokens, self.reusable_tokens) / self.reusable_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens a forward pass gained, the model's own token counted; 0 before the first."""
        return self.predicted_n / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode rate, prompt not counted."""
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The reply is whole. `ids` holds the closing ids too, which `sampled` leaves out."""

    type: ClassVar[str] = "done"
    finish_reason: str
    """`stop`, `length`, `context_full`, `cancelled`, or `dead_end`: the grammar let nothing follow
    and the reply is not whole."""
    text: str
    ids: tuple[int, ...]
    sampled: tuple[tuple[int, int], ...]
    usage: Usage = field(default_factory=Usage)
    notice: str = ""
    """One sentence about pages that could not be saved or proved, or nothing."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error; nothing that was acknowledged is lost."""

    type: ClassVar[str] = "failed"
    code: str
    exit: int
    message: str
    hint: str = ""


Event = (
    Loading
    | Ready
    | Rendered
    | ForgetPlanned
    | ForgetEvent
    | RecallEvent
    | RedactEvent
    | Summarizing
    | Prefill
    | Delta
    | Done
    | Failed
)


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object with its `type`."""
    return {"type": event.type, **asdict(event)}


def from_json(data: dict[str, Any]) -> Event:
    """The inverse of `to_json`. Raises KeyError or TypeError on anything else."""
    fields = dict(data)
    kind = _KINDS[fields.pop("type")]
    if kind is Rendered:
        return Rendered(tuple(_message_ids(message) for message in fields["messages"]))
    if kind is Done:
        fields["usage"] = Usage(**fields["usage"])
        fields["sampled"] = _spans(fields["sampled"])
    if kind is Delta:
        fields["logprobs"] = tuple(_logprob(found) for found in fields.get("logprobs", ()))
    for name in ("ids", "turns", "partly"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return kind(**fields)


def _logprob(data: dict[str, Any]) -> TokenLogprob:
    return TokenLogprob(**{**data, "top": tuple(_logprob(found) for found in data["top"])})


def _message_ids(data: dict[str, Any]) -> MessageIds:
    return MessageIds(data["index"], tuple(data["ids"]), _spans(data["sampled"]))


def _spans(data: Any) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in data)


_KINDS: dict[str, Any] = {kind.type: kind for kind in get_args(Event)}
