"""How the value of a setting is read: from text (a flag, the environment) or from a TOML value.

Each reader returns the value or raises ValueError with what it wants. Knows no names of settings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from chatkv.config import SPEC_MODES
from chatkv.errors import ConfigError
from chatkv.forget import ANSWERS, parse_policy
from chatkv.sampling import Grammar


def text(raw: Any) -> str:
    """Text that is not blank."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("must be text")
    return raw


MOST = 2**63 - 1
"""The largest number that a store or an engine takes."""
MOST_GUESSED = 62
"""Rows that a drafting mode may name."""


def whole(low: int, high: int = MOST) -> Callable[[Any], int]:
    """A whole number from `low` to `high`."""
    wants = f"must be a whole number of {low} or more"
    bound = f"must be a whole number from {low} to {high}"
    wants = wants if high == MOST else bound

    def read(raw: Any) -> int:
        if isinstance(raw, bool | float) or not isinstance(raw, int | str):
            raise ValueError(wants)
        try:
            value = int(raw)
        except ValueError:
            raise ValueError(wants) from None
        if not low <= value <= high:
            raise ValueError(wants if value < low else bound)
        return value

    return read


def number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], float]:
    """A finite number from `low` (or above it) to `high`."""
    bounds = f"above {low:g}, up to {high:g}" if open_low else f"from {low:g} to {high:g}"
    wants = f"must be a number {bounds}"

    def read(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError(wants)
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(wants) from None
        if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            raise ValueError(wants)
        return value

    return read


HOTTEST = 2.0
"""The highest temperature; above it a reply is noise."""
_warm = number(0, HOTTEST)


def temperature(raw: Any) -> float:
    """0, or from 0.01 to the hottest."""
    wants = (
        f"must be 0 (always the likeliest token), or 0.01 to {HOTTEST:g}, above which text is noise"
    )
    try:
        value = _warm(raw)
    except ValueError:
        raise ValueError(wants) from None
    if 0 < value < 0.01:
        raise ValueError(wants)
    return value


def yes_no(raw: Any) -> bool:
    """True or false, also as yes, no, 1, 0."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    value = raw if isinstance(raw, bool) else words.get(str(raw).lower())
    if value is None:
        raise ValueError("must be true or false")
    return value


def one_of(*names: str) -> Callable[[Any], str]:
    """One of these names."""

    def read(raw: Any) -> str:
        if raw not in names:
            raise ValueError(f"must be {' or '.join(names)}")
        return raw

    return read


def device(raw: Any) -> str:
    """`auto`, or a device as torch spells it."""
    if not isinstance(raw, str) or not re.fullmatch(r"auto|cpu|npu|cuda(:[0-9]+)?", raw):
        raise ValueError("must be auto, cpu, cuda, cuda:N or npu")
    return raw


def mode(raw: Any) -> str:
    """A drafting mode."""
    match = SPEC_MODES.fullmatch(raw) if isinstance(raw, str) else None
    if not match or int(match[2] or 1) > MOST_GUESSED:
        raise ValueError(f"must be none, auto, chain:N or tree:N with N from 1 to {MOST_GUESSED}")
    return match[0]


def names(raw: Any) -> tuple[str, ...]:
    """A list of names; in text with commas between."""
    parts = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not all(isinstance(p, str) and p for p in parts):
        raise ValueError("must be a list of names")
    return tuple(parts)


def wholes(low: int) -> Callable[[Any], tuple[int, ...]]:
    """A list of whole numbers from `low` on; in text with commas between."""
    one = whole(low)

    def read(raw: Any) -> tuple[int, ...]:
        parts = raw.split(",") if isinstance(raw, str) else raw
        try:
            return tuple(one(part) for part in parts)
        except (TypeError, ValueError):
            raise ValueError(f"must be whole numbers of {low} or more, as 1,2") from None

    return read


def overflow(raw: Any) -> str:
    """A forget policy with its parameters, or `ask` or `stop`."""
    if not isinstance(raw, str):
        raise ValueError("must be text such as turns")
    if raw in ANSWERS:
        return raw
    try:
        parse_policy(raw)
    except ConfigError as error:
        message = error.message[0].lower() + error.message[1:]
        raise ValueError(f"{message.removesuffix('.')}. {error.hint}".removesuffix(".")) from None
    return raw


def texts(raw: Any) -> tuple[str, ...]:
    """A list of texts, each as it stands."""
    parts = [raw] if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not all(isinstance(p, str) and p for p in parts):
        raise ValueError("must be a list of texts, none of them empty")
    return tuple(parts)


def biases(raw: Any) -> dict[str, float]:
    """Numbers by token id; in text a JSON object."""
    wants = 'must be numbers from -100 to 100 by token id, as {"1234": -100}'
    try:
        table = json.loads(raw) if isinstance(raw, str) else raw
        found = {str(int(token)): float(value) for token, value in table.items()}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(wants) from None
    if not all(int(token) >= 0 and -100 <= value <= 100 for token, value in found.items()):
        raise ValueError(wants)
    return found


def grammar(raw: Any) -> str | None:
    """A grammar as `KIND:TEXT`, or `none`."""
    if not isinstance(raw, str):
        raise ValueError("must be text such as regex:[0-9]+")
    try:
        found = Grammar.parse(raw)
    except ConfigError as error:
        message = error.message[0].lower() + error.message[1:]
        raise ValueError(message.removesuffix(".")) from None
    return None if found is None else str(found)


def size(raw: Any) -> int:
    """Bytes, also as `4GiB` or `4G`, which are the same, or `4GB`, which is a little less."""
    units = {"": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {f"{letter}ib": 1024**power, letter: 1024**power, f"{letter}b": 1000**power}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(raw).lower())
    if isinstance(raw, bool) or not match or match[2] not in units:
        raise ValueError('must be a size such as "4GiB"')
    wanted = float(match[1]) * units[match[2]]
    if wanted > MOST:
        raise ValueError(f"must be a size up to {MOST} bytes")
    return int(wanted)


def bindings(raw: Any) -> dict[str, str]:
    """Keys of actions."""
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ValueError('must be a table such as "chat.stop" = "escape,ctrl+x"')
    return dict(raw)
