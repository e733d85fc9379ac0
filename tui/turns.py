"""Which turns `3`, `1-4`, `-2` or `1,5-7` mean. Knows numbers; no chat."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chatkv.errors import UnknownSession, UsageError, plural

_ONE = re.compile(r"(-?\d{1,9})(?:-(-?\d{1,9}))?")


def turn_numbers(text: str, count: int) -> list[int]:
    """The numbers of turns that `text` names, in order, each once.

    Args:
        text: Numbers and ranges with commas or spaces between; -1 is the last turn.
        count: How many turns there are.

    Raises:
        UsageError: Something in it is no turn, or there is nothing.
        UnknownSession: There is no such turn.
    """
    words = text.replace(",", " ").split()
    if not words:
        raise UsageError("Which turns?", hint="Write 3, 1-4 or -2.")
    found: set[int] = set()
    for word in words:
        match = _ONE.fullmatch(word)
        if match is None:
            raise UsageError(f"{word[:40]!r} is no turn.", hint="Write 3, 1-4 or -2.")
        first = _place(match[1], count)
        last = first if match[2] is None else _place(match[2], count)
        if last < first:
            raise UsageError(f"{word} ends before it begins.", hint=f"Write {last}-{first}.")
        found.update(range(first, last + 1))
    return sorted(found)


def _place(word: str, count: int) -> int:
    number = int(word)
    place = number + count + 1 if number < 0 else number
    if not 1 <= place <= count:
        raise UnknownSession(
            f"There is no turn {word}.", hint=f"This chat has {plural(count, 'turn')}."
        )
    return place


def which_turns(numbers: Sequence[int]) -> str:
    """`turn 1`, `turns 1-3, 7`."""
    return f"turn{'s' if len(set(numbers)) > 1 else ''} {spans(numbers)}"


def spans(numbers: Sequence[int]) -> str:
    """`1-3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
