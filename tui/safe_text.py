"""Text from outside, made harmless for a terminal. Knows code points; no widget, no markup.

Models, prompts, titles, imported chats and error messages may hold anything; Textual and Rich hand
escape sequences, C1 bytes and bidi overrides on to the terminal. Here they turn into stand-ins.
The mapping works code point by code point and keeps no state, so a sequence cut between two tokens
is caught too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NewType

SafeText = NewType("SafeText", str)
"""Text that `safe_text` made, or words of our own. Widgets take nothing else."""

NOTHING = SafeText("")

MAX_MARKS = 8
"""Combining marks shown on one base; the rest are counted."""
MAX_LINE_CELLS = 20_000
"""Longest line handed to a widget."""

_JOINERS = "\u200c\u200d"  # needed by emoji and scripts; invisible, so they count as marks
_HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff"
    "\ud800-\udfff]"
)


def safe_text(text: str) -> SafeText:
    """The text with nothing in it that moves a cursor, hides or reorders.

    C0 and DEL become their control pictures, C1, bidi controls and invisible characters `‹U+009B›`,
    lone surrogates the replacement character; at most 8 marks stay on one base, and lines over
    20,000 cells are folded. Newline, tab, joiners and variation selectors stay. The original is not
    changed: keep it for storing and copying.
    """
    stream = SafeStream()
    return SafeText(stream.push(text) + stream.flush())


def safe_line(text: str) -> SafeText:
    """`safe_text` on one line: runs of white space become one space."""
    return SafeText(" ".join(safe_text(text).split()))


def pasted(text: str) -> str:
    """Pasted or imported text with every line end a newline. Terminals paste newlines as CR."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


class SafeStream:
    """`safe_text` for text that comes in pieces: any cuts give the same whole.

    A run of marks that may still grow past the limit is held back until it ends.
    """

    def __init__(self) -> None:
        self._marks = 0
        self._column = 0

    def push(self, text: str) -> SafeText:
        """The next piece, made safe."""
        if not text:
            return NOTHING
        text = _HOSTILE.sub(_stand_in, text)
        if text.isascii() and self._marks <= MAX_MARKS:
            self._marks = 0
        else:
            text = self._limit_marks(text)
        return SafeText(self._fold(text))

    def flush(self) -> SafeText:
        """What was held back, at the end of the text."""
        return SafeText(self._fold(self._end_of_marks()))

    def _limit_marks(self, text: str) -> str:
        out: list[str] = []
        for char in text:
            if _is_mark(char):
                self._marks += 1
                if self._marks <= MAX_MARKS:
                    out.append(char)
            else:
                out.append(self._end_of_marks())
                out.append(char)
        return "".join(out)

    def _end_of_marks(self) -> str:
        dropped, self._marks = self._marks - MAX_MARKS, 0
        return f"‹+{dropped} marks›" if dropped > 0 else ""

    def _fold(self, text: str) -> str:
        """Break lines that are too long. A code point past ASCII counts two cells."""
        lines = text.split("\n")
        if self._column + 2 * max(map(len, lines)) > MAX_LINE_CELLS:
            lines = list(self._fold_each(lines))
        elif len(lines) == 1:
            self._column += _cells(text)
            return text
        else:
            self._column = _cells(lines[-1])
        return "\n".join(lines)

    def _fold_each(self, lines: list[str]) -> Iterator[str]:
        for number, line in enumerate(lines):
            start, column = 0, self._column if number == 0 else 0
            for index, char in enumerate(line):
                width = _cells(char)
                if column + width > MAX_LINE_CELLS:
                    yield line[start:index]
                    start, column = index, 0
                column += width
            yield line[start:]
            self._column = column


def _cells(text: str) -> int:
    return len(text) if text.isascii() else len(text) + sum(char > "\x7f" for char in text)


def _is_mark(char: str) -> bool:
    return char in _JOINERS or (
        not char.isascii() and unicodedata.category(char) in ("Mn", "Me", "Cf")
    )


def _stand_in(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    return f"‹U+{code:04X}›"
