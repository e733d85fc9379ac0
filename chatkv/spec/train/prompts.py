"""What conversations begin with: prompts from files, and prompts the model makes up.

Knows the project's tokenizer and JSON lines; no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chatkv.errors import UsageError
from chatkv.tokenizer import Tokenizer

SHORTEST, LONGEST = 8, 400
"""Tokens of a made-up prompt that is kept."""
WINDOW = 5
"""Ids that are compared to tell whether two prompts are near each other."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The ids a chat template puts around user messages."""

    head: tuple[int, ...]
    """Before the first message: system text and the user's header."""
    footer: tuple[int, ...]
    """Behind a user message, up to where the reply begins."""
    between: tuple[int, ...]
    """Behind a reply that its stop id ended, up to the next message."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        """Found by rendering two messages that differ."""

        def around(first: bool) -> tuple[list[int], list[int]]:
            one, other = (tokenizer.user_ids(text, first) for text in ("a", "b"))
            at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            return one[:at], one[at + 1 :]

        header, footer = around(True)
        later, _ = around(False)
        return cls(
            (*tokenizer.head_ids(), *header),
            tuple(footer),
            (*tokenizer.closing_ids(ended_by_eos=True), *later),
        )


def read_prompts(places: Sequence[Path]) -> list[list[str]]:
    """User turns of every row of JSON lines files, or of all `*.jsonl` in folders, in one order.

    Raises:
        UsageError: A file is missing or a line is not {"turns": [...]}.
    """
    files = [f for place in places for f in (sorted(place.glob("*.jsonl")) or [place])]
    prompts: list[list[str]] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").strip("\n").split("\n")
            prompts += [[str(turn) for turn in json.loads(line)["turns"]] for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{file} holds no prompts: {error}.", hint='One {"turns": ["..."]} a line.'
            ) from error
    return prompts


class Novelty:
    """Which made-up prompts are kept: of a sensible length and unlike those before."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()
        self.kept = 0
        self.dropped = 0

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether a prompt is kept; if so it is remembered."""
        windows = {tuple(ids[i : i + WINDOW]) for i in range(len(ids) - WINDOW + 1)}
        known = sum(window in self._seen for window in windows)
        if not SHORTEST <= len(ids) <= LONGEST or 2 * known > len(windows):
            self.dropped += 1
            return False
        self._seen |= windows
        self.kept += 1
        return True
