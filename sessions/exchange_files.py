"""Files of others, read with care: sizes are checked before anything is parsed, values before they
are kept.

Knows limits, lines and JSON. Knows no format and no store.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn, cast

from chatkv.errors import ChatKVError
from sessions.columns import storable


class BadFile(ChatKVError):
    """A file that cannot be imported, or one conversation in it; names the line."""

    code = "bad_file"

    def __init__(self, line: int, why: str, *, hint: str = "") -> None:
        super().__init__(f"Line {line}: {why}", hint=hint)
        self.line, self.why = line, why


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that is taken from one file."""

    file_bytes: int = 2 << 30
    line_bytes: int = 64 << 20
    """Of a line, and of a file that is one JSON value over several lines."""
    values: int = 4_000_000
    """In one line: numbers, texts, lists and objects."""
    depth: int = 64
    """Lists and objects inside one another."""
    text_chars: int = 16 << 20
    """Of one message."""
    turns: int = 1_000_000
    """Of one conversation; its messages too."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Value:
    """One JSON value and the line it begins on."""

    line: int
    json: object


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_UNREADABLE = "Nothing of this conversation was stored. Export it again, or mend the line."


def values(stream: BinaryIO, limits: Limits = LIMITS) -> Iterator[Value | BadFile]:
    """The JSON values of a file: one a line, or one over all lines.

    A line that holds none is yielded as the error that tells why, and reading goes on: it may
    belong to one conversation of many.

    Raises:
        BadFile: The file or a line is too long; then nothing more can be read.
    """
    lines = _lines(stream, limits)
    number, line = next(lines, (0, b""))
    if not number:
        return
    line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        first = _parsed(number, line, limits)
    except BadFile as error:
        if _is_open(line):  # one value that is spread over lines
            yield _whole(number, line, lines, limits)
            return
        yield error
    else:
        yield Value(number, first)
    for number, line in lines:
        try:
            yield Value(number, _parsed(number, line, limits))
        except BadFile as error:
            yield error


def _lines(stream: BinaryIO, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    try:
        size = os.fstat(stream.fileno()).st_size
    except (OSError, ValueError):
        size = 0
    number, most = 0, f"the most is {limits.file_bytes:,} bytes"
    split = "Split it: each conversation can be imported from a file of its own."
    if size > limits.file_bytes:
        raise BadFile(1, f"the file has {size:,} bytes; {most}.", hint=split)
    total = 0
    while line := stream.readline(limits.line_bytes + 1):
        number += 1
        total += len(line)
        if len(line) > limits.line_bytes:
            raise BadFile(
                number,
                f"more than {limits.line_bytes:,} bytes, which is the most.",
                hint="Write one conversation a line (JSON lines), or shorten this one.",
            )
        if total > limits.file_bytes:
            raise BadFile(number, f"the file goes on; {most}.", hint=split)
        if line.strip():
            yield number, line


def _is_open(line: bytes) -> bool:
    """Whether a list or object begins here that does not end here."""
    bare = _STRING.sub(b"", line)
    ends = sum(map(bare.count, (b"]", b"}")))
    return sum(map(bare.count, (b"[", b"{"))) > ends


def _whole(
    number: int, first: bytes, rest: Iterator[tuple[int, bytes]], limits: Limits
) -> Value | BadFile:
    parts, size, before = [first], len(first), number
    for last, line in rest:
        # Blank lines count, or the parser would name the wrong one.
        parts.append(b"\n" * (last - before - 1) + line)
        before = last
        size += len(line)
        if size > limits.line_bytes:
            raise BadFile(
                last,
                f"one JSON value of more than {limits.line_bytes:,} bytes, which is the most.",
                hint="Write one conversation a line (JSON lines).",
            )
    try:
        return Value(number, _parsed(number, b"".join(parts), limits))
    except BadFile as error:
        return error


def _parsed(number: int, line: bytes, limits: Limits) -> Any:
    """The value of a line, none of whose parts is larger or deeper than allowed."""
    bare = _STRING.sub(b"", line)
    count = sum(map(bare.count, (b",", b"[", b"{")))
    if count > limits.values:
        raise BadFile(
            number,
            f"{count:,} values; the most is {limits.values:,}.",
            hint="Write one conversation a line, or leave token ids out.",
        )
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > limits.depth:
            raise BadFile(
                number,
                f"lists and objects are nested deeper than {limits.depth}, which is the most.",
                hint="No format that is known needs that; look at what wrote the file.",
            )
    try:
        text = line.decode("utf-8")
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise BadFile(number, f"no UTF-8 at byte {error.start + 1}.", hint=_UNREADABLE) from error
    except json.JSONDecodeError as error:
        line_number = number + error.lineno - 1
        raise BadFile(
            line_number, f"no JSON: {error.msg} at column {error.colno}.", hint=_UNREADABLE
        ) from error
    except ValueError as error:  # digits without end, a number that is none
        raise BadFile(number, f"a number that cannot be kept: {error}.", hint=_UNREADABLE) from None
    return _clean(found) if "\\u" in text else found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number


def _clean(value: Any) -> Any:
    """Lone surrogates can be written in JSON and nowhere else; they become U+FFFD."""
    match value:
        case str():
            return storable(value)
        case list():
            return [_clean(item) for item in cast("list[Any]", value)]
        case dict():
            items = cast("dict[str, Any]", value)
            return {storable(key): _clean(item) for key, item in items.items()}
        case _:
            return value


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names what was probably meant."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:100].lower(), names, 1, 0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."
