"""Which format a file has, and its conversations one after another.

Knows the formats by their first value. Knows no store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from typing import Any, BinaryIO, cast

from sessions.exchange import FORMAT
from sessions.exchange_chatkv import Tree
from sessions.exchange_files import BadFile, Limits, Value, nearest, values
from sessions.exchange_markdown import read_markdown, write_markdown
from sessions.exchange_plain import Talk, read_talk, rows_of, write_openai, write_sharegpt
from sessions.records import SessionRow, TurnPath

FORMATS = ("chatkv", "openai", "sharegpt", "markdown")
WRITERS = {"openai": write_openai, "sharegpt": write_sharegpt, "markdown": write_markdown}
"""Formats of one path, each with what writes a title and turns as lines."""
_MARKDOWN = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:---\r?\n|<!-- chatkv turn )")
_MESSAGE = ("role", "from")
"""What a message has and a conversation has not."""


@dataclass(frozen=True, slots=True)
class ReadChat:
    """One conversation of a file, whole and checked, with numbers for ids."""

    line: int
    sessions: list[SessionRow]
    turns: list[TurnPath]
    talk: Talk | None
    """Its roles and texts, if the format knows no more."""
    notes: Sequence[str] = ()


def read_chats(stream: BinaryIO, kind: str, limits: Limits) -> Iterator[ReadChat | BadFile]:
    """The conversations of a file; in the place of one that cannot be read, why.

    Args:
        stream: The file.
        kind: One of `FORMATS`, or auto, which looks at how it begins.
        limits: The most that is taken.

    Raises:
        BadFile: Nothing more can be read.
    """
    source = BufferedReader(cast("Any", stream)) if not hasattr(stream, "peek") else stream
    if kind == "auto" and _MARKDOWN.match(cast("Any", source).peek(64)):
        kind = "markdown"
    if kind == "markdown":
        for found in read_markdown(source, limits):
            if isinstance(found, BadFile):
                yield found
            else:
                line, title, talk = found
                yield ReadChat(line, *rows_of(title, talk), talk=talk)
        return
    rest = values(source, limits)
    first = next(rest, None)
    if first is None:
        raise BadFile(1, "the file is empty.", hint="Nothing was stored.")
    if kind == "auto":
        if isinstance(first, BadFile):
            raise first
        kind = detect(first)
    found_values = chain([first], rest)
    if kind == "chatkv":
        yield from _trees(found_values, limits)
    else:
        yield from _talks(found_values, kind, limits)


def detect(first: Value) -> str:
    """The format of a file that begins with this value. Raises BadFile."""
    value = first.json
    for _ in range(2):  # a list of messages, or of such lists
        if isinstance(value, list) and value:
            value = cast("list[Any]", value)[0]
    if isinstance(value, dict):
        keys = cast("dict[str, Any]", value)
        marks: dict[str, str] = {"format": "chatkv", "messages": "openai", "role": "openai"}
        marks |= {"conversations": "sharegpt", "from": "sharegpt"}
        for mark, kind in marks.items():
            if mark in keys:
                return kind
        shown = ", ".join(repr(key[:40]) for key in list(keys)[:5])
        raise BadFile(
            first.line,
            f"no format that is known begins with the fields {shown or 'of an empty object'}.",
            hint=nearest(next(iter(keys), ""), marks),
        )
    raise BadFile(
        first.line,
        "no conversation begins here.",
        hint=f"Known formats: {', '.join(FORMATS)}. A file of ours begins with {FORMAT!r}.",
    )


def _trees(found: Iterator[Value | BadFile], limits: Limits) -> Iterator[ReadChat | BadFile]:
    """The chats of a `chatkv` file. Behind a bad line all is skipped up to the next header."""
    tree: Tree | None = None
    begun = False
    for value in found:
        try:
            if isinstance(value, BadFile):
                raise value
            record = value.json
            if isinstance(record, dict) and "format" in record:
                done, tree = tree, None
                if done is not None:
                    yield _finished(done)
                begun, tree = True, Tree(value, limits)
            elif tree is not None:
                tree.add(value)
            elif not begun:
                raise BadFile(value.line, "no header.", hint=f"A file begins with {FORMAT!r}.")
        except BadFile as error:
            begun, tree = True, None
            yield error
    if tree is not None:
        yield _finished(tree)


def _finished(tree: Tree) -> ReadChat | BadFile:
    try:
        return ReadChat(tree.line, *tree.finish(), talk=None, notes=tree.notes)
    except BadFile as error:
        return error


def _talks(
    found: Iterator[Value | BadFile], kind: str, limits: Limits
) -> Iterator[ReadChat | BadFile]:
    """The conversations of a file of messages: one a value, or a list of them."""
    for value in found:
        if isinstance(value, BadFile):
            yield value
            continue
        items = _split(value)
        for place, item in enumerate(items, 1):
            try:
                title, talk = read_talk(item, kind, limits)
            except BadFile as error:
                which = f"conversation {place}: " if len(items) > 1 else ""
                yield BadFile(error.line, which + error.why, hint=error.hint)
            else:
                yield ReadChat(item.line, *rows_of(title, talk), talk=talk)


def _split(value: Value) -> list[Value]:
    """A list of conversations as its items; a list of messages is one."""
    found = value.json
    if not isinstance(found, list):
        return [value]
    items = cast("list[Any]", found)
    if not items or any(isinstance(items[0], dict) and mark in items[0] for mark in _MESSAGE):
        return [value]
    return [Value(value.line, item) for item in items]
