"""The policies by name: their parameters, and which of them a model can follow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from chatkv.errors import ConfigError
from chatkv.forget.layout import Limits

SUMMARY_PARAMETERS = 1_000_000_000
"""Models with fewer write no summary that one could go on from."""
ANSWERS = ("ask", "stop")
"""Instead of a policy, what only a person can answer: show the plan first, or send nothing."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Refuse what does not fit."""

    name: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class TurnsPolicy:
    """The oldest unprotected turns, whole, until low water."""

    name: ClassVar[str] = "turns"
    low: float = 0.75
    """Forget until so much of the context is used, so that it happens seldom."""
    keep_last: int = 2
    """Turns before the current one that stay."""

    def __post_init__(self) -> None:
        _expect(0 < self.low <= 1, self.name, "low", self.low, "a share of the context, 0 to 1")
        _expect(self.keep_last >= 0, self.name, "keep_last", self.keep_last, "0 or more")


@dataclass(frozen=True, slots=True)
class OldestPolicy:
    """Over `limit_tokens`, the oldest unprotected `drop_tokens`; again until the rest fits."""

    name: ClassVar[str] = "oldest"
    limit_tokens: int = 4096
    drop_tokens: int = 1024
    edge: str = "turn"
    """`turn` goes on to the end of the turn reached, `token` cuts exactly."""
    keep_last: int = 2
    """Turns before the current one that stay."""

    def __post_init__(self) -> None:
        _expect(self.limit_tokens >= 1, self.name, "limit_tokens", self.limit_tokens, "1 or more")
        _expect(
            self.limit_tokens <= 8 * self.drop_tokens <= 8 * self.limit_tokens,
            self.name,
            "drop_tokens",
            self.drop_tokens,
            f"{-(-self.limit_tokens // 8)} to {self.limit_tokens}: less would forget at every turn",
        )
        _expect(self.edge in ("turn", "token"), self.name, "edge", self.edge, "turn or token")
        _expect(self.keep_last >= 0, self.name, "keep_last", self.keep_last, "0 or more")


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """The first pages and the latest tokens, page by page, in steps of an eighth of the window."""

    name: ClassVar[str] = "window"
    sink_pages: int = 1
    window_tokens: int | None = None
    """None is half the context."""

    def __post_init__(self) -> None:
        _expect(self.sink_pages >= 1, self.name, "sink_pages", self.sink_pages, "1 or more")
        _expect(
            self.window_tokens is None or self.window_tokens >= 8,
            self.name,
            "window_tokens",
            self.window_tokens,
            "8 or more",
        )

    def window(self, limits: Limits) -> int:
        """The latest tokens kept."""
        return limits.context // 2 if self.window_tokens is None else self.window_tokens


@dataclass(frozen=True, slots=True)
class SummarizePolicy:
    """As `turns`, but the model first writes down what goes; the plan only says which turns."""

    name: ClassVar[str] = "summarize"
    shrink: float = 4.0
    """A summary that is not so many times shorter is not used."""
    ask: bool = True
    """Whether the user is asked before a summary is written."""
    force: bool = False
    """Use it with a model that is too small for it, too."""
    low: float = 0.75
    """As of `turns`."""
    keep_last: int = 2
    """As of `turns`."""

    def __post_init__(self) -> None:
        _expect(self.shrink > 1, self.name, "shrink", self.shrink, "more than 1")
        _ = self.as_turns

    @property
    def as_turns(self) -> TurnsPolicy:
        """What is done where a summary is of no use."""
        return TurnsPolicy(self.low, self.keep_last)


Policy = ErrorPolicy | TurnsPolicy | OldestPolicy | WindowPolicy | SummarizePolicy
POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (ErrorPolicy, TurnsPolicy, OldestPolicy, WindowPolicy, SummarizePolicy)
}


def parse_policy(text: str) -> Policy:
    """`turns`, or `oldest:limit_tokens=4096,drop_tokens=1024`.

    Raises:
        ConfigError: Unknown name or parameter, or a value that makes no sense; says which do.
    """
    name, _, rest = text.strip().partition(":")
    if name not in POLICIES:
        raise ConfigError(
            f"Unknown forget policy {name!r}.", hint=f"Use one of {', '.join(POLICIES)}."
        )
    kind = POLICIES[name]
    known = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no parameters"
            raise ConfigError(f"Policy {name} has no parameter {key!r}.", hint=f"It {takes}.")
        values[key] = _value(name, key, value.strip(), known[key])
    return kind(**values)


def asks_first(policy: str) -> bool:
    """Whether a person has to answer before a turn makes the model forget.

    What is no policy at all is not asked about: the engine refuses it by name.
    """
    try:
        return policy in ANSWERS or getattr(parse_policy(policy), "ask", False)
    except ConfigError:
        return False


def policy_text(policy: Policy) -> str:
    """What `parse_policy` makes this policy of; defaults are left out."""
    plain = type(policy)()
    changed = [
        f"{field.name}={_spelled(getattr(policy, field.name))}"
        for field in fields(policy)
        if getattr(policy, field.name) != getattr(plain, field.name)
    ]
    return ":".join([policy.name, ",".join(changed)]) if changed else policy.name


def check_policy(policy: Policy, limits: Limits) -> None:
    """Refuse a policy that this model or context cannot follow.

    Raises:
        ConfigError: Says which trait of the model, or which number.
    """
    if isinstance(policy, SummarizePolicy) and not policy.force:
        _expect_large(limits.parameters)
    if not isinstance(policy, WindowPolicy):
        return
    if limits.no_rebase:
        raise ConfigError(
            f"Policy window moves positions, but the model has {limits.no_rebase}.",
            hint="Use turns or oldest: they begin anew where positions run out.",
        )
    sinks, window = policy.sink_pages * limits.page_tokens, policy.window(limits)
    if sinks + window > limits.context:
        raise ConfigError(
            f"Policy window keeps {sinks} + {window} tokens, "
            f"but the context is {limits.context} tokens.",
            hint=f"Use window_tokens={max(8, limits.context - sinks)} or less.",
        )


def _expect_large(parameters: int) -> None:
    if parameters and parameters < SUMMARY_PARAMETERS:
        raise ConfigError(
            f"Policy summarize wants a model of {SUMMARY_PARAMETERS / 1e9:.0f} billion parameters, "
            f"and this one has {parameters / 1e9:.2f}.",
            hint="Use turns, or try it all the same: summarize:force=yes.",
        )


def _expect(holds: bool, policy: str, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"Policy {policy}: {name} is {value}.", hint=f"Use {wanted}.")


def _value(policy: str, key: str, text: str, kind: str) -> Any:
    try:
        match kind:
            case "int" | "int | None":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return _YES_NO[text]
            case _:
                return text
    except (KeyError, ValueError):
        what, example = _KINDS.get(kind, ("a whole number", "1024"))
        raise ConfigError(
            f"Policy {policy}: {key} is {text!r}, not {what}.", hint=f"Write {key}={example}."
        ) from None


_YES_NO = {"yes": True, "no": False}
_KINDS = {"float": ("a number", "0.75"), "bool": ("yes or no", "yes")}


def _spelled(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
