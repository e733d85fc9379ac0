"""Taking one JSON object of a foreign file apart, field by field. What is left over is refused.

Knows which values a store can hold and a front can show. Knows no format.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields as fields_of
from typing import Any, cast

from chatkv.errors import ChatKVError
from chatkv.events import Usage
from chatkv.sampling import SamplingParams
from sessions.exchange_files import LIMITS, BadFile, Value, nearest
from sessions.records import KV_SALT
from sessions.tree import now_ms

_BIG = (1 << 53) - 1
"""The largest whole number that every reader of JSON keeps."""
_DAY_MS = 86_400_000
_CUT = "Nothing of this conversation was stored. Mend the line, or export it again."
_SAMPLING = {field.name for field in fields_of(SamplingParams)}
_COUNTS = {field.name for field in fields_of(Usage)} - {"reuse_reason", "reuse_detail", "verified"}


class Fields:
    """The fields of one object.

    Args:
        value: What should be an object. Raises BadFile if it is none.
        what: What it is called in errors.
    """

    def __init__(self, value: Value, what: str) -> None:
        found = value.json
        if not isinstance(found, dict):
            raise BadFile(value.line, f"{what} is no object.", hint=_CUT)
        self.line = value.line
        self._what = what
        self._left = dict(cast("dict[str, Any]", found))
        self._known: list[str] = []
        self.notes: list[str] = []
        """What was left out, for the person who imports."""

    def bad(self, why: str) -> BadFile:
        return BadFile(self.line, f"{why}.", hint=_CUT)

    def has(self, name: str) -> bool:
        self._known.append(name)
        return name in self._left

    def take(self, name: str, kind: type, *, or_none: bool = False) -> Any:
        """The value of a field, which must be there and of that kind (or null, or missing)."""
        if not self.has(name) and not or_none:
            close = nearest(name, self._left) if self._left else _CUT
            raise BadFile(self.line, f"{self._what} has no field {name!r}.", hint=close)
        value = self._left.pop(name, None)
        if (value is None and or_none) or type(value) is kind:
            return value
        kinds = {str: "text", int: "whole number", bool: "true or false", list: "list"}
        raise self.bad(f"{name!r} is no {kinds.get(kind, 'object')}")

    def leave(self, name: str, *, needed: bool = False) -> Any:
        """The value of a field as it is; None if it may be missing and is."""
        if needed and name not in self._left:
            self.take(name, object)
        self._known.append(name)
        return self._left.pop(name, None)

    def ignore(self, names: Sequence[str]) -> None:
        """Drop fields that mean nothing here."""
        for name in names:
            self.leave(name)

    def end(self) -> None:
        """Refuse what nobody took."""
        for name in self._left:
            raise BadFile(
                self.line,
                f"{self._what} has a field {name[:40]!r}, which nobody knows.",
                hint=nearest(name, self._known),
            )

    def text(self, name: str, most: int = LIMITS.text_chars) -> str:
        return self.short(name, self.take(name, str), most)

    def short(self, name: str, text: str, most: int) -> str:
        """`text` if it is not too long."""
        if len(text) > most:
            raise BadFile(
                self.line,
                f"{name!r} has {len(text):,} characters; the most is {most:,}.",
                hint="Cut it into several messages.",
            )
        return text

    def number(self, name: str, *, or_none: bool = False, most: int = _BIG) -> Any:
        """A whole number from 0 on, or None if that is allowed."""
        value = self.take(name, int, or_none=or_none)
        if value is not None and not 0 <= value <= most:
            raise self.bad(f"{name!r} is not between 0 and {most}")
        return value

    def counted(self, name: str, expected: int) -> None:
        """The number of a record, which is known beforehand."""
        if (found := self.number(name)) != expected:
            raise self.bad(f"{name!r} is {found}, and {expected} comes here")

    def time(self, name: str, *, or_none: bool = False) -> Any:
        """A time; one that lies ahead becomes now, or nothing new would ever be the newest."""
        value = self.number(name, or_none=or_none)
        now = now_ms()
        return value if value is None or value <= now + _DAY_MS else now

    def flag(self, name: str) -> bool:
        return self.take(name, bool)

    def choice(self, name: str, known: Sequence[str]) -> str:
        value = self.take(name, str)
        if value not in known:
            raise BadFile(
                self.line, f"there is no {name} {value[:40]!r}.", hint=nearest(value, known)
            )
        return value

    def list(self, name: str) -> Sequence[Any]:
        return self.take(name, list)

    def objects(self, name: str) -> Sequence[Fields]:
        return [Fields(Value(self.line, item), f"{name!r}") for item in self.list(name)]

    def free(self, name: str) -> dict[str, Any]:
        """An object with any fields."""
        return self.take(name, dict)

    def seeded(self, name: str) -> dict[str, Any]:
        """What a turn was sampled with, which is history: only its seed is ever shown."""
        found = self.free(name)
        if type(found.get("seed", 0)) is not int and found["seed"] is not None:
            raise self.bad(f"the seed of {name!r} is no whole number")
        return found

    def sampling(self, name: str) -> dict[str, Any]:
        """Settings of the sampler, each as it may be set; others are kept and mean nothing."""
        found = self.free(name)
        known = {key: v for key, v in found.items() if key in _SAMPLING and v is not None}
        if isinstance(known.get("stop"), list):
            known["stop"] = tuple(known["stop"])
        try:
            if type(known.get("seed", 0)) is not int:
                raise ValueError("seed")
            SamplingParams(**known)
        except (ChatKVError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.bad(f"{name!r} cannot be used ({str(error)[:200]})") from error
        return found

    def usage(self, name: str) -> dict[str, Any]:
        """What a reply cost; the process that wrote it is left out."""
        found = {key: value for key, value in self.free(name).items() if key != "writer"}
        for key, value in found.items():
            if key in _COUNTS and (type(value) not in (int, float) or not abs(value) <= _BIG):
                raise self.bad(f"{key!r} of {name!r} is no number")
            if key == "verified" and type(value) is not bool and value is not None:
                raise self.bad(f"{key!r} of {name!r} is no true or false")
            if key in ("reuse_reason", "reuse_detail", "finish_reason") and type(value) is not str:
                raise self.bad(f"{key!r} of {name!r} is no text")
        return found

    def settings(self, name: str) -> dict[str, Any]:
        """What a chat remembers. A model is looked up by name alone, never by a foreign path."""
        found = dict(self.free(name))
        found.pop(KV_SALT, None)  # or a file could choose whose pages a chat reads
        inner = Fields(Value(self.line, found), f"{name!r}")
        if "sampling" in found:
            inner.sampling("sampling")
        for key in ("model", "spec"):
            if type(found.get(key, "")) is not str and found[key] is not None:
                raise self.bad(f"{key!r} of {name!r} is no text")
        model = found.get("model") or ""
        if model.lower().endswith(".gguf") or {"/", "\\", os.sep} & set(model) or model[:1] == "~":
            del found["model"]
            self.notes.append("the chat names its model by a path, which is left out")
        return found
