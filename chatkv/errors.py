"""Every error raised on purpose. Knows words and numbers, nothing of what raised them."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """`1 turn`, `3,000 turns`, `2 replies`, `2 matches`: how messages tell counts."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ly"):  # reply
        noun = f"{noun[:-1]}ies"
    else:
        noun += "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}"


class ChatKVError(Exception):
    """Base of every error raised on purpose.

    Args:
        message: What happened, with the numbers.
        hint: What to do next. May be empty.
    """

    code = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def to_json(self) -> dict[str, str | int]:
        """The `error` object of every `--json` output."""
        return {
            "code": self.code,
            "exit": self.exit_code,
            "message": self.message,
            "hint": self.hint,
        }


class ConfigError(ChatKVError):
    """A setting, flag or environment variable that cannot be used."""

    code = "config"
    exit_code = 2


class UsageError(ChatKVError):
    """A request that makes no sense: an empty prompt, `--max-tokens 0`."""

    code = "usage"
    exit_code = 2


class ModelError(ChatKVError):
    """A model that cannot be loaded."""

    code = "model"
    exit_code = 4


class UnknownModel(ModelError):
    """No model of that name, in no place we look."""

    code = "unknown_model"


class BadWeights(ModelError):
    """A model file that is missing, truncated, of another hash or of an unknown architecture."""

    code = "bad_weights"


class HeadsMismatch(ModelError):
    """Draft heads made for another model or quantisation."""

    code = "heads_mismatch"


class BackendUnavailable(ChatKVError):
    """No attention backend can serve this call; says why for each."""

    code = "backend_unavailable"
    exit_code = 4


class OutOfPages(ChatKVError):
    """The pool cannot give the pages asked for, after evicting all it may."""

    code = "out_of_pages"
    exit_code = 5

    def __init__(self, *, needed: int, free: int, page_size: int) -> None:
        super().__init__(
            f"Need {needed} pages of {page_size} tokens, but {free} are free.",
            hint="Close other chats, or start with a larger pool.",
        )


class ContextFull(ChatKVError):
    """The conversation and the reply do not fit the model's context.

    Args:
        used: Tokens in sight before this turn.
        needed: Tokens this turn needs more.
        limit: Of the context.
        protected: Of `used`, tokens that no policy may forget; None where no policy was asked.
        least: The smallest context that would do; 0 if none would, None if nobody knows.
        first: Nothing was said before this turn: `used` is the system prompt.
    """

    code = "context_full"
    exit_code = 5

    def __init__(
        self,
        *,
        used: int,
        needed: int,
        limit: int,
        protected: int | None = None,
        least: int | None = None,
        first: bool = False,
    ) -> None:
        kept = "" if protected is None or first else f" ({protected} of them protected)"
        ways = ["unpin or /forget turns" if protected and not first else "shorten the prompt"]
        if least != 0:
            larger = "a larger --context" if least is None else f"--context {least} or more"
            ways.insert(0 if first else 1, f"use {larger}")
        if not first:
            ways += ["fork from an earlier turn", "start a new chat"]
        *others, last = ways
        hint = f"{', '.join(others)}, or {last}." if others else f"{last}."
        who = "system prompt" if first else "conversation"
        super().__init__(
            f"The {who} holds {used} tokens{kept} and this turn needs {needed} more, "
            f"but the context is {limit} tokens.",
            hint=hint[0].upper() + hint[1:],
        )
        self.used, self.needed, self.limit, self.protected = used, needed, limit, protected


class StoreError(ChatKVError):
    """A store that is damaged, read-only, full or busy."""

    code = "store"
    exit_code = 6


class StoreBusy(StoreError):
    """Another process holds the lock longer than we wait."""

    code = "store_busy"


class SchemaTooNew(StoreError):
    """The store was written by a newer chatkv."""

    code = "schema_too_new"


class UnknownSession(StoreError):
    """No conversation of that name or id, or more than one."""

    code = "unknown_session"
    exit_code = 3


class EngineLost(ChatKVError):
    """The engine process ended; the conversation is safe."""

    code = "engine_lost"
    exit_code = 8


class TimedOut(ChatKVError):
    """The time limit passed; what had arrived is saved."""

    code = "timeout"
    exit_code = 124


class Cancelled(ChatKVError):
    """Stopped by the user before anything was computed."""

    code = "cancelled"
    exit_code = 130

    def __init__(self) -> None:
        super().__init__("Stopped before the model was ready.", hint="Send the prompt again.")
