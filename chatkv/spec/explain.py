"""One sentence on what drafting does, and why. Knows sums, costs and words; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from chatkv.spec.costs import CostTable
from chatkv.spec.guard import WallClockGuard
from chatkv.spec.stats import DraftStats, StepRecord


def explain(
    mode: str,
    steps: Iterable[StepRecord],
    stats: DraftStats,
    costs: CostTable,
    guard: WallClockGuard,
    *,
    guessed: bool,
) -> str:
    """The sentence.

    Args:
        mode: Not `none`.
        steps: The last ones, which it speaks about.
        stats: Of all steps.
        guessed: Whether anybody ever had a guess.
    """
    recent = DraftStats()
    for step in steps:
        recent.add(step)
    if not recent.steps:
        return f"Drafting is on ({mode}); nothing has been measured yet."
    if guard.rest_tokens:
        return (
            f"Plain for {guard.rest_tokens} more tokens: drafted steps ran at "
            f"{guard.measured or 0:.2f}x the plain rate."
        )
    share = recent.plain_steps / recent.steps
    if not guessed:
        return f"Plain: no guess came up in {stats.tokens} tokens."
    if share > 0.95:
        return (
            f"Plain in {share:.0%} of the steps: guesses are not worth their time here"
            f"{_first_guesses(stats, costs)}."
        )
    faster = f", {recent.speedup:.2f}x the plain rate" if recent.speedup else ""
    drafted = recent.steps - recent.plain_steps
    gained = (recent.tokens - recent.plain_tokens) / drafted
    rows = (recent.rows - recent.plain_steps) / drafted
    who = " and ".join(sorted({name for name, _ in recent.offered})) or "nobody"
    return (
        f"Drafting ({mode}): {who} guessed, {rows:.1f} rows{_cost(round(rows), costs)} gave "
        f"{gained:.2f} tokens a drafted step{faster}; plain in {share:.0%} of the steps."
    )


def _cost(rows: int, costs: CostTable) -> str:
    ms, one = costs.ms(rows), costs.ms(1)
    return f" at {ms / one:.2f}x the time of one" if ms and one and rows > 1 else ""


def _first_guesses(stats: DraftStats, costs: CostTable) -> str:
    """What a second row costs, and how often the first guess was right."""
    offered = sum(count for (_, depth), count in stats.offered.items() if depth == 1)
    right = sum(count for (_, depth), count in stats.accepted.items() if depth == 1)
    ms, one = costs.ms(2), costs.ms(1)
    if not offered or not ms or not one:
        return ""
    return f"; {right / offered:.0%} of the first ones are right, two rows take {ms / one:.2f}x"
