"""What steps cost and gained. Knows counts and milliseconds; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

Counts: TypeAlias = dict[tuple[str, int], int]
"""(source, depth) -> how many; depth 1 is right below the root."""

Outcome: TypeAlias = tuple[str, int, int, bool]
"""(source, depth, bin, right) of one guess."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one or more sequences. Times are wall-clock milliseconds."""

    rows: int
    """Rows of the forward pass, all sequences together."""
    tokens: int
    """Tokens gained, all sequences together."""
    sequences: int = 1
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    """The forward pass."""
    accept_ms: float = 0.0
    """Picking tokens and keeping rows."""
    host_ms: float = 0.0
    """All the rest of the step."""
    hidden_ms: float = 0.0
    """What of draft, accept and host was done while a pass ran: this step's, which had begun ahead,
    or the next one's."""
    had_begun: bool = False
    """Whether this step's had: its parts overlap."""
    offered: Counts = field(default_factory=dict[tuple[str, int], int])
    """Guesses that were run and whose parent was right."""
    accepted: Counts = field(default_factory=dict[tuple[str, int], int])
    """Those of them that were right."""

    @staticmethod
    def of(
        trees: Sequence[DraftTree],
        accepted: Sequence[Accepted],
        *,
        rows: int | None = None,
        draft_ms: float = 0.0,
        verify_ms: float = 0.0,
        accept_ms: float = 0.0,
        host_ms: float = 0.0,
        hidden_ms: float = 0.0,
        had_begun: bool = False,
    ) -> StepRecord:
        """The record of a step that ran these trees and, after `until`, kept this.

        Args:
            rows: Of the pass, if some were run twice.
        """
        offered: Counts = {}
        right: Counts = {}
        for tree, gained in zip(trees, accepted, strict=True):
            for source, depth, _, hit in trials(tree, gained.tokens):
                offered[source, depth] = offered.get((source, depth), 0) + 1
                right[source, depth] = right.get((source, depth), 0) + hit
        return StepRecord(
            rows=sum(len(tree) for tree in trees) if rows is None else rows,
            tokens=sum(len(gained.tokens) for gained in accepted),
            sequences=len(trees),
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            accept_ms=accept_ms,
            host_ms=host_ms,
            hidden_ms=hidden_ms,
            had_begun=had_begun,
            offered=offered,
            accepted=right,
        )

    @property
    def drafted(self) -> bool:
        """Whether the step ran any guess."""
        return self.rows > self.sequences

    @property
    def wall_ms(self) -> float:
        """The whole step."""
        return self.draft_ms + self.verify_ms + self.accept_ms + self.host_ms


def trials(tree: DraftTree, tokens: Sequence[int]) -> list[Outcome]:
    """The outcome of each guess whose parent was right.

    `tokens` are what the model chose from the root on, so the tree need not have been run.
    """
    return follow(tree, 0, tokens)[0]


def follow(tree: DraftTree, row: int, tokens: Sequence[int]) -> tuple[list[Outcome], int | None]:
    """Outcomes below `row`, and the row that was reached; None once no guess was right."""
    found: list[Outcome] = []
    place: int | None = row
    for token in tokens:
        if place is None:
            break
        for below in tree.children(place):
            right = int(tree.tokens[below]) == token
            for source, score in zip(tree.sources, tree.bins[below].tolist(), strict=True):
                if score:
                    found.append((source, tree.depths[below], score, right))
        place = tree.child(place, token)
    return found, place


@dataclass(slots=True)
class DraftStats:
    """Sums over steps; two of them add up."""

    steps: int = 0
    plain_steps: int = 0
    tokens: int = 0
    plain_tokens: int = 0
    rows: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0
    host_ms: float = 0.0
    hidden_ms: float = 0.0
    plain_ms: float = 0.0
    """Wall time of the plain steps alone."""
    offered: Counts = field(default_factory=dict[tuple[str, int], int])
    accepted: Counts = field(default_factory=dict[tuple[str, int], int])

    def add(self, step: StepRecord) -> None:
        """Count one more step."""
        plain = not step.drafted
        self.merge(
            DraftStats(
                steps=step.sequences,
                plain_steps=step.sequences if plain else 0,
                tokens=step.tokens,
                plain_tokens=step.tokens if plain else 0,
                rows=step.rows,
                draft_ms=step.draft_ms,
                verify_ms=step.verify_ms,
                accept_ms=step.accept_ms,
                host_ms=step.host_ms,
                hidden_ms=step.hidden_ms,
                plain_ms=step.wall_ms if plain else 0.0,
                offered=step.offered,
                accepted=step.accepted,
            )
        )

    def merge(self, other: DraftStats) -> None:
        """Add the sums of `other` to these."""
        self.steps += other.steps
        self.plain_steps += other.plain_steps
        self.tokens += other.tokens
        self.plain_tokens += other.plain_tokens
        self.rows += other.rows
        self.draft_ms += other.draft_ms
        self.verify_ms += other.verify_ms
        self.accept_ms += other.accept_ms
        self.host_ms += other.host_ms
        self.hidden_ms += other.hidden_ms
        self.plain_ms += other.plain_ms
        for mine, theirs in ((self.offered, other.offered), (self.accepted, other.accepted)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count

    def __add__(self, other: DraftStats) -> DraftStats:
        """The sums of both."""
        total = DraftStats()
        total.merge(self)
        total.merge(other)
        return total

    @property
    def wall_ms(self) -> float:
        """All steps together."""
        return self.draft_ms + self.verify_ms + self.accept_ms + self.host_ms

    @property
    def overhead_share(self) -> float:
        """The part of the time in which no pass ran."""
        return 1 - (self.verify_ms + self.hidden_ms) / self.wall_ms

    @property
    def tau(self) -> float | None:
        """Tokens gained a step and sequence, the model's own token included."""
        return self.tokens / self.steps if self.steps else None

    @property
    def speedup(self) -> float | None:
        """Rate of the drafted steps over that of the plain ones, where both were measured."""
        drafted_ms = self.wall_ms - self.plain_ms
        if not (self.plain_tokens and self.plain_ms > 0 and drafted_ms > 0):
            return None
        drafted = (self.tokens - self.plain_tokens) / drafted_ms
        return drafted / (self.plain_tokens / self.plain_ms)

    def acceptance(self, source: str) -> list[float | None]:
        """Chance that a guess was right given that its parent was, by depth from 1 on."""
        deepest = max((depth for name, depth in self.offered if name == source), default=0)
        rates: list[float | None] = []
        for depth in range(1, deepest + 1):
            offered = self.offered.get((source, depth), 0)
            rates.append(self.accepted.get((source, depth), 0) / offered if offered else None)
        return rates

    def to_json(self) -> dict[str, object]:
        """Plain numbers for `--json` and for the stored usage of a turn."""
        sources = sorted({name for name, _ in self.offered})
        return {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "tokens": self.tokens,
            "rows": self.rows,
            "tokens_per_step": self.tau,
            "speedup": self.speedup,
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "accept_ms": round(self.accept_ms, 3),
            "host_ms": round(self.host_ms, 3),
            "hidden_ms": round(self.hidden_ms, 3),
            "offered": {name: self._by_depth(self.offered, name) for name in sources},
            "accepted": {name: self._by_depth(self.accepted, name) for name in sources},
        }

    @staticmethod
    def _by_depth(counts: Counts, source: str) -> list[int]:
        deepest = max((depth for name, depth in counts if name == source), default=0)
        return [counts.get((source, depth), 0) for depth in range(1, deepest + 1)]
