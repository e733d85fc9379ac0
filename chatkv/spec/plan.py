"""What a step should do, and the drafting modes a user can name. Knows words and numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, TypeAlias

from chatkv.errors import ConfigError
from chatkv.spec.proposal import Proposal
from chatkv.spec.tree import MAX_ROWS

Kind: TypeAlias = Literal["draft", "cheap", "probe", "control", "plain"]
"""`cheap` asks only those drafters that take next to no time."""


@dataclass(slots=True)
class Plan:
    """What the next step should do."""

    rows: Mapping[int, int]
    """Rows to ask the drafters for, root included, by sequence id; 1 = do not ask."""
    kind: Kind
    greedy: tuple[bool, ...]
    """Temperature 0 or not, in the order of `rows`."""
    reason: str
    """One sentence a user can read."""
    proposed: Seq[Proposal] = ()
    """What the drafters gave, run or not."""
    kept: Seq[Proposal] = ()
    """What is run of it."""
    is_probe: bool = False
    """Whether guesses are run that are not expected to be worth it."""
    is_sunk: bool = False
    """Whether guesses are run that were not worth asking for, now that they are here."""
    asked: tuple[str, ...] = ()
    """The drafters that take time for it and were asked, by name."""

    @property
    def asks(self) -> bool:
        """Whether drafters are asked at all."""
        return any(rows > 1 for rows in self.rows.values())


@dataclass(frozen=True, slots=True)
class Shape:
    """A drafting mode: `none`, `auto`, or `chain:N` and `tree:N` with N guesses."""

    kind: Literal["none", "auto", "chain", "tree"]
    guesses: int = 0

    @staticmethod
    def parse(mode: str) -> Shape:
        """Read a mode. Raises ConfigError."""
        match = re.fullmatch(r"(chain|tree):([1-9][0-9]?)", mode)
        if match and int(match[2]) < MAX_ROWS:
            kind = "chain" if match[1] == "chain" else "tree"
            return Shape(kind, int(match[2]))
        if mode == "none":
            return Shape("none")
        if mode == "auto":
            return Shape("auto")
        raise ConfigError(
            f"Unknown drafting mode {mode!r}.",
            hint=f"Use none, auto, chain:N or tree:N with N from 1 to {MAX_ROWS - 1}.",
        )
