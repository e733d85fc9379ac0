"""Which parts of a long transcript are mounted. Counts and ranges only; no widget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_TURNS = 12
MAX_WEIGHT = 200
OPENING_TURNS = 4


@dataclass(slots=True)
class Window:
    """A half-open range of parts. A part is a turn's head (number 0) or a piece of its reply."""

    parts: list[tuple[int, int]] = field(default_factory=list)
    """(turn, number) of every part, mounted or not."""
    weights: list[int] = field(default_factory=list)
    """Widgets of every part."""
    start: int = 0
    stop: int = 0

    def lay_out(self, weights: Sequence[Sequence[int]]) -> None:
        """Take the weights of all turns; the range stays, cut to what there is."""
        self.parts = [(turn, n) for turn, all_ in enumerate(weights) for n in range(len(all_))]
        self.weights = [weight for all_ in weights for weight in all_]
        self.stop = min(self.stop, len(self.parts))
        self.start = min(self.start, self.stop)

    @property
    def weight(self) -> int:
        """Widgets mounted."""
        return sum(self.weights[self.start : self.stop])

    @property
    def at_end(self) -> bool:
        return self.stop == len(self.parts)

    @property
    def turns_above(self) -> int:
        """Turns of which nothing is mounted, before the first that is."""
        return self.parts[self.start][0] if self.start < len(self.parts) else 0

    @property
    def turns_below(self) -> int:
        """Turns of which nothing is mounted, after the last that is."""
        if not self.parts or not self.stop:
            return 0
        return self.parts[-1][0] - self.parts[self.stop - 1][0]

    def fits(self, start: int, stop: int, max_turns: int = MAX_TURNS) -> bool:
        """Whether that range is within the bounds. One part always is."""
        if stop - start <= 1:
            return True
        turns = self.parts[stop - 1][0] - self.parts[start][0] + 1
        return turns <= max_turns and sum(self.weights[start:stop]) <= MAX_WEIGHT

    def tail(self, turns: int = OPENING_TURNS) -> tuple[int, int]:
        """The range of the last turns."""
        start = stop = len(self.parts)
        while start > 0 and self.fits(start - 1, stop, turns):
            start -= 1
        return start, stop

    def from_turn(self, turn: int, turns: int = OPENING_TURNS) -> tuple[int, int]:
        """The range that starts with a turn."""
        start = stop = self.place(turn)
        while stop < len(self.parts) and self.fits(start, stop + 1, turns):
            stop += 1
        return start, stop

    def place(self, turn: int, number: int = 0) -> int:
        """Index of a part."""
        return self.parts.index((turn, number))

    def part_above(self) -> int:
        """Where the range would start with one more part on top; a reply brings its prompt."""
        start = self.start - 1
        return start - 1 if self.parts[start][1] == 1 else start

    def part_below(self) -> int:
        """Where the range would stop with one more part below; a prompt brings its reply."""
        stop = self.stop + 1
        heads_reply = stop < len(self.parts) and self.parts[stop][1] == 1
        return stop + 1 if heads_reply else stop
