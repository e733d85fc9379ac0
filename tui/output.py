"""What commands write. Replies and data go to stdout, all else to stderr.

Text from outside passes `safe_text` on its way to a terminal and is exact on its way to a pipe.
Knows streams, JSON and columns; no store and no engine.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, TextIO

from chatkv.errors import ChatKVError

VERSION = 1
"""The `v` of every JSON object."""


def write(text: str, *, exact: bool = False) -> None:
    """Write text to stdout at once; cleaned on a terminal unless `exact`."""
    _put(sys.stdout, text, exact)


def line(text: str) -> None:
    """Write one line of data to stdout."""
    write(text + "\n")


def note(text: str) -> None:
    """Write one line for the person at the terminal to stderr."""
    _put(sys.stderr, text + "\n", exact=False)


def write_json(data: dict[str, Any]) -> None:
    """Write one JSON object with its version on a line of its own."""
    # A terminal would obey control characters that JSON may hold as they are.
    escaped = is_terminal(sys.stdout)
    write(json.dumps({"v": VERSION, **data}, ensure_ascii=escaped) + "\n", exact=True)


def write_error(error: ChatKVError, *, as_json: bool, as_event: bool = False) -> None:
    """Show an error: an object on stdout, or a sentence and what to do next on stderr."""
    if as_event:
        write_json({"type": "error", "error": error.to_json()})
    elif as_json:
        write_json({"error": error.to_json()})
    else:
        note(f"chatkv: {error.message}")
        if error.hint:
            note(f"  {error.hint}")


def confirm(question: str) -> None:
    """Ask the person at the terminal; anything but a yes ends the command."""
    import click

    from tui.safe_text import safe_line

    click.confirm(safe_line(question), abort=True, err=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees what is written there."""
    return stream is not None and not stream.closed and stream.isatty()


def columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Lines of a table, each column as wide as its widest cell.

    Args:
        rows: Cells; line breaks and tabs inside one become spaces.
        right: Numbers of the columns that end, rather than start, below each other.
    """
    table = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded = [
            " " * (width - cells(cell)) + cell
            if number in right
            else cell + " " * (width - cells(cell))
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def cells(text: str) -> int:
    """How many terminal cells a text takes, near enough for a table."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def when(unix_ms: int) -> str:
    """A time for a table: the hour today, else the date."""
    time = datetime.fromtimestamp(unix_ms / 1000)
    return time.strftime("%H:%M" if time.date() == datetime.now().date() else "%Y-%m-%d")


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _put(stream: TextIO | None, text: str, exact: bool) -> None:
    if stream is None:  # closed before we began
        return
    if not exact and is_terminal(stream):
        from tui.safe_text import safe_text

        text = safe_text(text)
    try:
        # Replies are UTF-8 whatever the locale says: a pipe gets the bytes the model meant.
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
        stream.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is sys.stdout:
            raise ChatKVError(f"The output cannot be written: {error.strerror}.") from error
