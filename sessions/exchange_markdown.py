"""One path of a chat as Markdown, and back: each message stands under a mark that a renderer does
not show.

Knows text alone. A line of a message that looks like a mark, or like what begins a chat, gets a
backslash in front, and loses it when it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from sessions.exchange_files import BadFile, Limits
from sessions.exchange_plain import Talk, check_talk, dump
from sessions.records import TurnPath
from sessions.tree import clean_title

ROLES = ("system", "user", "assistant")
_MARK = re.compile(
    r"(?:^---\ntitle: (?P<title>.*)\n---\n\n?)?"
    r"^<!-- chatkv turn \d{1,9} (?P<role>\w+) -->$",
    re.M | re.A,
)
_LIKE_A_MARK = re.compile(r"^(?=\\*(?:<!-- chatkv turn |---\ntitle: ))", re.M)
_ESCAPED = re.compile(r"^\\(?=\\*(?:<!-- chatkv turn |---\ntitle: ))", re.M)


def write_markdown(title: str, turns: Sequence[TurnPath]) -> Iterator[str]:
    """Front matter, then each message under its mark."""
    yield from ("---", f"title: {dump(title)}", "---")
    for turn in turns:
        if turn.turn.redacted_at is None:
            for message in turn.messages:
                if message.row.content:
                    mark = f"<!-- chatkv turn {turn.turn.depth} {message.row.role} -->"
                    yield from ("", mark, "", _LIKE_A_MARK.sub(r"\\", message.row.content))


def read_markdown(stream: BinaryIO, limits: Limits) -> Iterator[tuple[int, str, Talk] | BadFile]:
    """Line, title and messages of each chat of a file that `write_markdown` wrote.

    Raises:
        BadFile: Nothing of it can be read.
    """
    text = _read(stream, limits)
    marks = list(_MARK.finditer(text))
    if not marks or text[: marks[0].start()].strip():
        raise BadFile(
            1,
            "no front matter or mark of a message begins it.",
            hint="Markdown that chatkv exported can be read: <!-- chatkv turn 1 user -->.",
        )
    starts = [0, *(i for i, mark in enumerate(marks) if i and mark["title"] is not None)]
    for first, stop in zip(starts, [*starts[1:], len(marks)], strict=True):
        line = 1 + text.count("\n", 0, marks[first].start())
        end = marks[stop].start() if stop < len(marks) else len(text)
        try:
            yield line, *_talk(text[:end], marks[first:stop], line, limits)
        except BadFile as error:
            yield error


def _read(stream: BinaryIO, limits: Limits) -> str:
    raw = stream.read(limits.line_bytes + 1)
    if len(raw) > limits.line_bytes:
        raise BadFile(
            1, f"more than {limits.line_bytes:,} bytes of Markdown.", hint="Export as chatkv."
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise BadFile(line, "no UTF-8.", hint="Save the file as UTF-8.") from None


def _talk(text: str, marks: Sequence[re.Match[str]], line: int, limits: Limits) -> tuple[str, Talk]:
    """Title and messages of the chat at the end of `text`, whose marks these are."""
    talk: list[tuple[str, str]] = []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(marks, ends, strict=True):
        if mark["role"] == "summary":  # what it stands for is all there; nobody asked it
            del talk[-1:]
            continue
        if mark["role"] not in ROLES:
            raise BadFile(
                line,
                f"a message has the role {mark['role'][:40]!r}.",
                hint=f"Markdown can bring back {', '.join(ROLES)}.",
            )
        # A blank line stands behind the mark, and another before the next one.
        body = text[mark.end() : end].removeprefix("\n").removeprefix("\n").removesuffix("\n")
        body = body if mark is marks[-1] else body.removesuffix("\n")
        talk.append((mark["role"], _ESCAPED.sub("", body)))
    return _title(marks[0]["title"]), check_talk(line, talk, limits)


def _title(written: str | None) -> str:
    try:
        title = json.loads(written or '""')
    except ValueError:
        title = written
    return clean_title(title if isinstance(title, str) else "")
