"""A stream that passes for a terminal and keeps what a person would have been sent."""

from __future__ import annotations

import io


class Terminal(io.TextIOWrapper):
    """Write to it as to stdout; or read from it what was typed."""

    def __init__(self, typed: str = "") -> None:
        self._bytes = io.BytesIO(typed.encode())
        super().__init__(self._bytes, encoding="utf-8")

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """All that was written."""
        self.flush()
        return self._bytes.getvalue().decode()
