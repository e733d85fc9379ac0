"""Every error raised on purpose. Knows words and numbers, nothing of what raised them."""

from __future__ import annotations


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
    """

    code = "context_full"
    exit_code = 5

    def __init__(self, *, used: int, needed: int, limit: int, protected: int | None = None) -> None:
        kept = "" if protected is None else f" ({protected} of them protected)"
        ways = "Unpin or /forget turns" if protected else "Shorten the prompt"
        super().__init__(
            f"The conversation holds {used} tokens{kept} and this turn needs {needed} more, "
            f"but the context is {limit} tokens.",
            hint=f"{ways}, use a larger --context, fork from an earlier turn, or start a new chat.",
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
