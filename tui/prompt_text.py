"""What is asked: the words of the command line, stdin and files as one prompt. Knows text only."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from chatkv.errors import UsageError
from tui import output

REPLACEMENT = "\ufffd"


def decode(data: bytes, what: str) -> str:
    """UTF-8 text; bytes that are none become U+FFFD, said once on stderr."""
    text = data.decode("utf-8", "replace")
    if REPLACEMENT in text and REPLACEMENT.encode() not in data:
        output.note(
            f"chatkv: {what} is not valid UTF-8; the bytes in question became {REPLACEMENT}"
        )
    return text


def readable(argument: str) -> str:
    """An argument without the lone surrogates that stand for bytes the locale cannot read."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return decode(argument.encode("utf-8", "surrogateescape"), "an argument")
    return argument


def check(prompt: str) -> None:
    """Refuse a prompt of white space. Raises UsageError."""
    if not prompt.strip():
        raise UsageError("The prompt is empty.", hint='Write it in quotes: chatkv ask "..."')


def assemble(prompt: str | None, files: Sequence[Path] = ()) -> str:
    """PROMPT, a blank line, stdin when it is no terminal, then each file fenced with its name.

    Args:
        prompt: The argument; `-` or None is stdin alone.
        files: Files to put behind it.

    Raises:
        UsageError: Nothing is left to ask, or a file cannot be read.
    """
    parts = [] if prompt in (None, "-") else [prompt]
    if sys.stdin is not None and (prompt == "-" or not output.is_terminal(sys.stdin)):
        parts.append(decode(sys.stdin.buffer.read(), "stdin").rstrip("\n"))
    parts += [_fenced(path) for path in files]
    text = "\n\n".join(part for part in parts if part and part.strip())
    check(text)
    return text


def last_code_block(text: str) -> str | None:
    """The inside of the last fenced code block, its closing fence missing or not; None if none."""
    block: list[str] | None = None
    last: list[str] | None = None
    fence = ""
    for row in text.splitlines(keepends=True):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", row)
        if block is None and mark:
            block, fence = [], mark[1]
        elif block is not None and mark and mark[1].startswith(fence) and row.strip() == mark[1]:
            last, block = block, None
        elif block is not None:
            block.append(row)
    found = block if block is not None else last
    return None if found is None else "".join(found)


def _fenced(path: Path) -> str:
    try:
        text = decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"The file {path} cannot be read: {error.strerror}.") from error
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{path.name}\n{text.rstrip()}\n{fence}"
