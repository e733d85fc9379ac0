"""Sums over the replies of one temperature and mode: rates, speed-ups, what the steps did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from chatkv.spec.stats import DraftStats
from sessions.bench.measure import Timing
from sessions.bench.spec_play import Pair, WatchedController

PARTS = ("draft", "verify", "accept", "host")
"""Of a step, as `StepRecord` has them."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Decoding of some replies, plain and drafted. A speed-up never stands without the tokens a
    step that it came from."""

    replies: int
    tokens: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speedup: float
    tokens_per_step: float
    sources: list[Source]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Sums | None:
        """None if not one token was chosen by a step."""
        tokens = sum(pair.tokens for pair in pairs)
        if not tokens:
            return None
        plain = sum(pair.plain_ms for pair in pairs)
        drafted = sum(pair.drafted_ms for pair in pairs)
        stats = _stats(pairs)
        return cls(
            replies=len(pairs),
            tokens=tokens,
            plain_tokens_per_s=1000 * tokens / plain,
            drafted_tokens_per_s=1000 * tokens / drafted,
            speedup=plain / drafted,
            tokens_per_step=stats.tokens / stats.steps,
            sources=_sources(stats),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """What came of one drafter's guesses, by depth from 1 on; a guess counts if its parent was
    right."""

    name: str
    offered: list[int]
    accepted: list[int]
    acceptance: list[float | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One temperature in one mode. Times a step are of the drafted runs, plain steps included."""

    temperature: float
    mode: str
    all: Sums
    without_repeats: Sums | None
    """Replies of which no token continues a long repeat."""
    categories: dict[str, Sums]
    speedup_median: float
    """Over prompts, as the next three."""
    speedup_p10: float
    speedup_p90: float
    share_below_1: float
    """Prompts that drafting made slower, however little."""
    steps: int
    plain_steps: int
    probes: int
    plain_reasons: dict[str, int]
    draft_ms: float
    verify_ms: float
    accept_ms: float
    host_ms: float
    shares: dict[str, float]
    """Of a step: `draft`, `verify`, `accept` and `host`, 1 together."""
    overhead_share: float
    """Of the time: that in which no forward pass ran."""
    expected_tokens_per_s: float | None
    """By the controller's chances and costs, for the steps that were run."""
    plain_first_token_ms: float
    """Median over replies, as the next one."""
    drafted_first_token_ms: float
    plain_prefill_tokens_per_s: float
    drafted_prefill_tokens_per_s: float
    explain: str

    @classmethod
    def of(
        cls,
        temperature: float,
        controller: WatchedController,
        pairs: Sequence[Pair],
        categories: Mapping[str, str],
    ) -> Row | None:
        """The row of these replies; None if not one token was chosen by a step.

        Args:
            temperature: Of all of them.
            controller: Watched them.
            pairs: The replies.
            categories: Of prompts, by id; a prompt without one is in none.
        """
        total = Sums.of(pairs)
        if total is None:
            return None
        stats = _stats(pairs)
        prompts = _grouped(pairs, {pair.prompt: pair.prompt for pair in pairs})
        speedups = [sums.speedup for own in prompts.values() if (sums := Sums.of(own))]
        spread = Timing.of(speedups)
        computed = sum(pair.computed for pair in pairs)
        groups = _grouped(pairs, categories)
        parts = {name: getattr(stats, f"{name}_ms") for name in PARTS}
        return cls(
            temperature=temperature,
            mode=controller.mode,
            all=total,
            without_repeats=Sums.of([pair for pair in pairs if not pair.repeats]),
            categories={name: sums for name, own in groups.items() if (sums := Sums.of(own))},
            speedup_median=spread.median,
            speedup_p10=spread.p10,
            speedup_p90=spread.p90,
            share_below_1=sum(speedup < 1 for speedup in speedups) / len(speedups),
            steps=stats.steps,
            plain_steps=stats.plain_steps,
            probes=controller.probes,
            plain_reasons=dict(controller.reasons),
            draft_ms=stats.draft_ms / stats.steps,
            verify_ms=stats.verify_ms / stats.steps,
            accept_ms=stats.accept_ms / stats.steps,
            host_ms=stats.host_ms / stats.steps,
            shares={part: ms / stats.wall_ms for part, ms in parts.items()},
            overhead_share=stats.overhead_share,
            expected_tokens_per_s=controller.expected_rate,
            plain_first_token_ms=median(pair.plain_first_ms for pair in pairs),
            drafted_first_token_ms=median(pair.drafted_first_ms for pair in pairs),
            plain_prefill_tokens_per_s=1000 * computed / sum(pair.plain_first_ms for pair in pairs),
            drafted_prefill_tokens_per_s=1000
            * computed
            / sum(pair.drafted_first_ms for pair in pairs),
            explain=controller.explain(),
        )


def _stats(pairs: Sequence[Pair]) -> DraftStats:
    stats = DraftStats()
    for pair in pairs:
        stats.merge(pair.stats)
    return stats


def _grouped(pairs: Sequence[Pair], names: Mapping[str, str]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if name := names.get(pair.prompt):
            groups.setdefault(name, []).append(pair)
    return groups


def _sources(stats: DraftStats) -> list[Source]:
    found: list[Source] = []
    for name in sorted({name for name, _ in stats.offered}):
        rates = stats.acceptance(name)
        depths = range(1, len(rates) + 1)
        found.append(
            Source(
                name,
                [stats.offered.get((name, depth), 0) for depth in depths],
                [stats.accepted.get((name, depth), 0) for depth in depths],
                rates,
            )
        )
    return found
