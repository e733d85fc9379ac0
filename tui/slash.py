"""Slash commands: what a line means. Parsing and suggestions only; the screen does the work."""

from __future__ import annotations

import difflib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chatkv.errors import UsageError
from tui import schema
from tui.actions import ALIASES, COMMANDS, Command
from tui.safe_text import SafeText, safe_line

BY_NAME = {command.name: command for command in COMMANDS}


@dataclass(frozen=True, slots=True)
class Slash:
    """A command line, taken apart."""

    name: str
    rest: str
    """All after the name, stripped."""

    @property
    def words(self) -> list[str]:
        return self.rest.split()


def parse(text: str) -> Slash | str:
    """A command, or the text to send: `//text` is `/text`, anything without a slash is itself.

    Raises:
        UsageError: The line starts with a slash and is no command; nothing of it may be sent.
    """
    if not text.startswith("/"):
        return text
    if text.startswith("//"):
        return text[1:]
    name, _, rest = text[1:].partition(" ")
    name = ALIASES.get(name.strip(), name.strip())
    if name not in BY_NAME:
        raise _unknown(name, rest)
    return Slash(name, rest.strip())


def suggest(text: str) -> list[Command]:
    """The commands that what is typed may become."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    name, space, _ = text[1:].partition(" ")
    if space:
        known = BY_NAME.get(ALIASES.get(name, name))
        return [known] if known else []
    return [command for command in COMMANDS if command.name.startswith(name)]


def complete(text: str) -> SafeText | None:
    """The text with its command name completed as far as it is clear; None when nothing is."""
    found = suggest(text)
    if not found or " " in text:
        return None
    if len(found) == 1:
        return SafeText(f"/{found[0].name} ")
    first, last = min(c.name for c in found), max(c.name for c in found)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    return SafeText("/" + first[:same])


def setting(slash: Slash) -> tuple[str, Any]:
    """Key and value of `/set KEY VALUE`; `null` takes a setting away.

    A value may be written as JSON: several stop texts, or one with a line break.

    Raises:
        UsageError: One of them is missing.
        ConfigError: There is no such setting, or it cannot have that value.
    """
    name, _, value = slash.rest.partition(" ")
    if not name or not value.strip():
        raise UsageError("/set takes a name and a value.", hint="For example: /set temperature 0.7")
    key = schema.key_of(name)
    raw: Any = value.strip()
    with suppress(ValueError):
        found = json.loads(raw)
        if found is None:
            return key.removeprefix("sampling."), None
        raw = found if isinstance(found, str | list) else raw
    return key.removeprefix("sampling."), schema.read(key, raw)


def topic(slash: Slash) -> str:
    """The command that `/help COMMAND` is about, if any. Raises UsageError."""
    name = slash.rest.removeprefix("/")
    name = ALIASES.get(name, name)
    if name and name not in BY_NAME:
        raise _unknown(name)
    return name


def turn_and_name(slash: Slash) -> tuple[int | None, str]:
    """`[TURN] [NAME]`: a leading number is a turn."""
    first, _, rest = slash.rest.partition(" ")
    return (int(first), rest.strip()) if re.fullmatch(r"\d{1,9}", first) else (None, slash.rest)


def _unknown(name: str, rest: str = "") -> UsageError:
    settings = [key.removeprefix("sampling.") for key in schema.SETTINGS if "sampling." in key]
    near = difflib.get_close_matches(name, [*BY_NAME, *ALIASES, *settings], 1, 0.6)
    if not near:
        hint = "/help lists them."
    elif near[0] in settings:
        hint = f"Did you mean /set {safe_line(f'{near[0]} {rest}'.strip())[:40]}?"
    else:
        hint = f"Did you mean /{ALIASES.get(near[0], near[0])}?"
    return UsageError(
        f"There is no command /{safe_line(name)[:40]}.",
        hint=f"{hint} //... sends a text that starts with a slash.",
    )
