"""What an engine is built with. Plain objects: only `tui/settings.py` reads files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from chatkv.errors import ConfigError

SPEC_MODES = re.compile(r"none|auto|(chain|tree):([1-9][0-9]?)")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine, checked when built."""

    threads: int | None = None
    """CPU threads; None is every core the process may use."""
    context_limit: int | None = None
    """Tokens a conversation may hold; None is what the model was trained for."""
    pool_tokens: int | None = None
    """Tokens the page pool holds over all open conversations; None is two contexts."""
    host_bytes: int = 0
    """Host memory for pages that leave the pool; 0 keeps none."""
    restore: Literal["auto", "always", "never"] = "auto"
    """Whether stored pages are read: where that is faster than computing them, always, or never."""
    spec: str = "auto"
    """Drafting: `none`, `auto`, `chain:N` or `tree:N` (N guessed rows)."""
    drafters: tuple[str, ...] = ("auto",)
    """Names of the drafters to ask, first come first merged. `auto` is all that cost nothing to
    have: `ngram`, `history` with a token log, `heads` where some are here for the model."""
    kv_dtype: str = "bf16"
    """How keys and values are stored: `bf16` (the model's dtype), `int8`, `int4` or `fp8`."""
    keep_layers: tuple[int, ...] = ()
    """Layers, counted from 1, that stay plain where the others are quantised."""

    def __post_init__(self) -> None:
        if not SPEC_MODES.fullmatch(self.spec):
            raise ConfigError(
                f"Unknown drafting mode {self.spec!r}.",
                hint="Use none, auto, chain:N or tree:N with N from 1 to 62.",
            )
        if self.restore not in ("auto", "always", "never"):
            raise ConfigError(f"restore is {self.restore!r}.", hint="Use auto, always or never.")
        if self.host_bytes < 0:
            raise ConfigError(f"host_bytes is {self.host_bytes}.", hint="Use 0 or more.")
        for name in ("threads", "context_limit", "pool_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}.", hint="Use a number of 1 or more.")
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > cores:
            raise ConfigError(
                f"threads is {self.threads}, but this machine has {cores} cores.",
                hint=f"Use a number from 1 to {cores}, or leave it out.",
            )
