"""How many guesses are worth their time. Knows trees, costs, hit rates; cannot change the text.

Arithmetic, not learning: chances come from counting, costs from the clock of this machine. The
largest expected rate of tokens wins, and plain decoding must be beaten clearly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from chatkv.spec.calibration import Calibration
from chatkv.spec.costs import CostTable, DraftCosts
from chatkv.spec.explain import explain
from chatkv.spec.guard import WallClockGuard
from chatkv.spec.lessons import Lessons
from chatkv.spec.plain_state import PlainState
from chatkv.spec.plan import Kind, Plan, Shape
from chatkv.spec.proposal import GrownTree, Proposal, settled
from chatkv.spec.stats import DraftStats, StepRecord
from chatkv.spec.tree import MAX_DEPTH, MAX_ROWS, DraftTree
from chatkv.spec.unseen import UnseenTrees
from chatkv.spec.verify import Accepted

BAR = 1.03
"""Predicted rate over plain from which drafting is worth it."""
CHEAP_SHARE = 0.01
"""A draft below this share of a plain step is looked at in the plain state too."""
ASKED, ASKED_TRIES = 32, 8
"""Drafted steps for which every drafter was asked: those that are remembered, and how many of them
give an expectation."""
WINDOW = 256
"""Steps that `explain` speaks about."""


class Controller:
    """Decides, step by step, between plain decoding and a tree of some size.

    Each step: `plan`, ask the drafters, `prune`, run the trees, `observe`.

    Args:
        costs: Rows -> milliseconds of a forward pass, measured at load.
        mode: `auto`, `none`, `chain:N` or `tree:N`.
        guard: The wall-clock guard. Off only where a test needs a pinned shape to stay.
    """

    def __init__(self, costs: Mapping[int, float], mode: str = "auto", *, guard: bool = True):
        self.costs = CostTable(costs)
        self.calibration = Calibration()
        self.stats = DraftStats()
        self.guard = WallClockGuard(strikes=guard)
        self.mode = mode
        self.shape = Shape.parse(mode)
        self._plan: Plan | None = None
        self.unseen = UnseenTrees()
        self._lessons = Lessons(self.calibration)
        self.drafts = DraftCosts()
        self._asked: deque[tuple[int, float]] = deque(maxlen=ASKED)
        self._idle = PlainState()
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW)

    def set_mode(self, mode: str) -> None:
        """Change the mode; what was learnt stays, a resting guard is lifted."""
        self.shape, self.mode = Shape.parse(mode), mode
        self.guard.wake()
        self._idle.reset()

    @property
    def may_ask(self) -> bool:
        """Whether the next step may ask drafters that cost something."""
        if self.shape.kind == "none" or self.guard.rest_tokens:
            return False
        return self.shape.kind != "auto" or not self._idle.holds or self._idle.is_due

    def plan(
        self,
        seq_ids: Sequence[int],
        greedy: Sequence[bool] | None = None,
        *,
        has_begun: bool = False,
    ) -> Plan:
        """Whether to ask the drafters, and for how many rows.

        Args:
            has_begun: The step has begun already, with a tree that nobody has seen.
        """
        cool = tuple(greedy) if greedy is not None else (False,) * len(seq_ids)
        self.guard.expect(len(seq_ids))
        kind, rows, reason = self._decide(len(seq_ids), has_begun)
        self._plan = Plan(dict.fromkeys(seq_ids, rows), kind, cool, reason)
        return self._plan

    def prune(self, trees: Sequence[Proposal], plan: Plan) -> list[Proposal]:
        """The part of the proposed trees that is worth running: the root alone is plain.

        A tree that nobody has seen yet is run whole, or not at all.
        """
        plan.proposed = trees
        if len(trees) == 1 and isinstance(trees[0], GrownTree) and self._takes_whole(trees[0]):
            pays = self.shape.kind != "auto" or self._pays_whole(trees[0], plan)
            plan.kept = [trees[0] if pays else DraftTree.root(trees[0].root)]
        else:
            plan.kept = self._pruned([settled(tree) for tree in trees], plan)
        return list(plan.kept)

    def stays_unseen(self, tree: GrownTree) -> bool:
        """Whether a tree that nobody has seen is better run so than joined with those beside it.

        They run as well where what they add behind the end of its path is worth their rows. To be
        joined they have to wait for it: only if there are no rows for them and they are surer.
        """
        plan, others = self._plan, tree.beside
        if plan is None or others is None or self.shape.kind != "auto":
            tree.runs_beside = others is not None and self._takes_whole(tree, len(others) - 1)
            return tree.runs_beside
        chances = self.calibration.chances(others, plan.greedy[0])
        most = self.costs.sizes[-1] - tree.size + 1
        if most < 2:
            return sum(chances) <= self.unseen.tokens
        if len(others) > most:
            others = tree.beside = others.best(most, chances)
            chances = self.calibration.chances(others, plan.greedy[0])
        slower = self.unseen.slower
        if slower is None:
            sizes, ahead_ms = (tree.size, tree.size + len(others) - 1), self.drafts.ahead_ms
            own_ms, both_ms = [(self.costs.ms(rows) or 0.0) + ahead_ms for rows in sizes]
            slower = both_ms / max(own_ms, 1e-9)
        tree.runs_beside = self.unseen.gains(chances[1:], others.depths[1:]) > slower
        return True

    def _pruned(self, trees: Sequence[DraftTree], plan: Plan) -> list[DraftTree]:
        if plan.kind in ("plain", "control"):
            return [tree.best(1) for tree in trees]
        chances = [
            self.calibration.chances(tree, greedy)
            for tree, greedy in zip(trees, plan.greedy, strict=True)
        ]
        if self.shape.kind == "auto":
            rows = self._fastest(chances, plan)
            return [tree.subset(kept) for tree, kept in zip(trees, rows, strict=True)]
        size = self.shape.guesses + 1
        return [
            tree.with_chance(chance).chain(size)
            if self.shape.kind == "chain"
            else tree.best(size, chance)
            for tree, chance in zip(trees, chances, strict=True)
        ]

    def observe(
        self, step: StepRecord, accepted: Sequence[Accepted], plan: Plan | None = None
    ) -> None:
        """Learn from a step, the last one unless its plan is named.

        `accepted` is in the order of the plan, after `until`.
        """
        plan = plan or self._plan
        if plan is None:
            return
        self._lessons.learn(plan, accepted)
        unseen = step.drafted and _is_whole(plan)
        if unseen:
            beside = step.rows > len(settled(plan.proposed[0]))
            self.unseen.took(step.wall_ms, beside=beside)
            if not beside:
                self.unseen.add(step.tokens)
        self.stats.add(step)
        self._recent.append(step)
        self._idle.spend(step.wall_ms)
        # A device's step has a few sizes, and none between them.
        rows = self.costs.size_for(step.rows) if unseen else step.rows
        if not step.had_begun:  # its parts overlap
            spare_ms, plain = self._idle.spare_ms, not step.drafted
            lost_ms = self.costs.observe(rows, step.verify_ms, plain=plain, spare_ms=spare_ms)
            self._idle.give(lost_ms)
        if plan.asks and not step.had_begun:
            self.drafts.observe(plan.asked, step.draft_ms, ahead=_is_whole(plan))
        if plan.asks and step.drafted and plan.asked:
            self._asked.append((step.tokens, step.draft_ms + step.verify_ms))
        self.guard.observe(step)
        self._update_plain_state(step, plan)

    def to_json(self) -> dict[str, object]:
        """What the next run should know."""
        return {
            "calibration": self.calibration.to_json(),
            "costs": self.costs.to_json(),
            "guard": self.guard.to_json(),
            "drafts": self.drafts.to_json(),
            "whole": self.unseen.to_json(),
            "asked": list(self._asked),
            "plain_state": self._idle.to_json(),
        }

    def recall(self, known: Mapping[str, Any]) -> None:
        """Go on from `to_json` of an earlier run. Times count only if they are of the same cost
        table; what makes no sense is left out."""
        with suppress(KeyError, ValueError, TypeError):
            self.calibration.recall(known["calibration"])
        with suppress(KeyError, ValueError, TypeError):
            if dict(known["costs"]["base"]) == self.costs.base:
                self.costs.recall(known["costs"])
                self.guard.recall(known["guard"])
                self.drafts.recall(known["drafts"])
                self.unseen.recall(known["whole"])
                self._asked.extend((int(tokens), float(ms)) for tokens, ms in known["asked"])
                self._idle.recall(known["plain_state"])

    def explain(self) -> str:
        """One sentence for the status line: what drafting does now, and why."""
        if self.shape.kind == "none":
            return "Drafting is off."
        return explain(
            self.mode,
            self._recent,
            self.stats,
            self.costs,
            self.guard,
            guessed=self._lessons.guessed_steps > 0,
        )

    @property
    def may_run_on(self) -> bool:
        """Whether the next step of the only sequence may begin before this one's tokens are here:
        nothing that is known speaks against the tree that grows."""
        plan, shape = self._plan, self.shape.kind
        if plan is None or plan.kind != "draft" or self.guard.rest_tokens:
            return False
        if self.guard.wants_control or not isinstance(plan.kept[0], GrownTree):
            return False
        return plan.kept[0].others is None and (shape != "auto" or self.unseen.is_known)

    def _decide(self, sequences: int, has_begun: bool) -> tuple[Kind, int, str]:
        if self.shape.kind == "none":
            return "plain", 1, "drafting is off"
        if self.guard.rest_tokens:
            return "plain", 1, "drafted steps were slower than plain ones"
        if self.guard.wants_control and not has_begun:
            return "control", 1, "a plain step now and then, to know what it costs"
        if self.shape.kind != "auto":
            rows = MAX_ROWS if self.shape.kind == "tree" else self.shape.guesses + 1
            return "draft", min(rows, MAX_ROWS), f"the shape is pinned to {self.mode}"
        room = self.costs.sizes[-1] - sequences + 1
        if room < 2:
            return "plain", 1, f"{sequences} sequences fill the largest step"
        rows = min(room, MAX_ROWS)
        if not self._idle.holds:
            return "draft", rows, "guesses are checked when they are worth their time"
        if self._idle.is_due:
            return "probe", rows, "a try after a while of plain steps"
        if self._is_cheap(sequences):
            return "cheap", rows, "no guess is worth its time"
        return "plain", 1, "no guess is worth its time"

    def _is_cheap(self, sequences: int) -> bool:
        """Whether to ask those drafters in the plain state that take next to no time."""
        plain_ms = self.costs.ms(sequences)
        return plain_ms is not None and self.drafts.cheap_ms <= CHEAP_SHARE * plain_ms

    def affordable(self, name: str, guess_ms: float | None) -> int:
        """Rows that a drafter which takes time may have in a tree; 1 is not to ask it.

        Args:
            guess_ms: Of each guess, where guesses come one by one; else None. Such a chain gets as
                long as pays if its guesses are as good as they were, and in a probe if all are
                right: a drafter that could not pay then is never asked.
        """
        plan = self._plan
        if plan is None or guess_ms is None or self.shape.kind != "auto":
            return 1 if plan is not None and plan.kind == "cheap" else MAX_ROWS
        plain_ms, sequences = self.costs.ms(len(plan.rows)), len(plan.rows)
        if plan.kind == "cheap" or plain_ms is None:
            return 1
        best, guesses, chance, gain = BAR / plain_ms, 0, 1.0, 1.0
        for depth in range(1, MAX_DEPTH + 1):
            if plan.kind != "probe":
                chance *= self.calibration.share_right(name, depth, plan.greedy[0])
            gain += chance
            ms, spent = self.costs.ms(sequences * (depth + 1)), sequences * depth * guess_ms
            if ms is None or (plan.kind == "probe" and depth > 1 and spent > self._idle.spare_ms):
                break
            if gain / (ms + spent) > best:
                best, guesses = gain / (ms + spent), depth
        return 1 + guesses

    def enough(self, trees: Sequence[DraftTree]) -> bool:
        """Whether the guesses of cheap drafters alone are expected to gain more than steps for
        which every drafter was asked did lately."""
        plan = self._plan
        if plan is None or self.shape.kind != "auto" or len(trees) != 1:
            return False
        if len(self._asked) < ASKED_TRIES:
            return False
        chances = sorted(self.calibration.chances(trees[0], plan.greedy[0])[1:], reverse=True)
        draft_ms = self.drafts.ms(())
        rate = sum(tokens for tokens, _ in self._asked) / sum(ms for _, ms in self._asked)
        return self._best_count(chances, 1, rate, float("inf"), draft_ms) > 0

    def waits(self, name: str) -> bool:
        """Whether a tree that can be begun behind this step is waited for in front of it.

        Either way the steps behind have theirs. Until it is known what waiting takes, it is.
        """
        plan, ms, wait_ms = self._plan, self.costs.ms(1), self.drafts.ms((name,))
        if plan is None or plan.kind != "draft" or self.shape.kind != "auto" or ms is None:
            return True
        token_ms = (ms + self.drafts.ahead_ms) / self.unseen.tokens
        return wait_ms - self.drafts.ahead_ms <= ms - token_ms

    def draft_cost(self, plan: Plan) -> float:
        """Milliseconds that asking as `plan` did takes; 0 while nothing is known."""
        return self.drafts.ms(plan.asked, ahead=_is_whole(plan))

    def _takes_whole(self, tree: GrownTree, more: int = 0) -> bool:
        """Whether the mode leaves a tree of that size, and so many rows more, as it is."""
        kind = self.shape.kind
        return kind == "auto" or (kind == "tree" and len(tree) + more <= self.shape.guesses + 1)

    def _pays_whole(self, tree: GrownTree, plan: Plan) -> bool:
        """Whether a tree that nobody has seen is worth its time, going by those before it."""
        ms, plain_ms = self.costs.ms(len(tree)), self.costs.ms(1)
        if ms is None or plain_ms is None:
            return False
        if self.unseen.is_known:
            rate = self.unseen.tokens / (ms + self.drafts.ahead_ms)
            if rate > BAR / plain_ms:
                return True
            if plan.kind != "probe":
                return False
        elif plan.kind != "probe":
            return True
        plan.is_probe = ms <= plain_ms + self._idle.spare_ms
        return plan.is_probe

    def _fastest(self, trees: list[list[float]], plan: Plan) -> list[list[int]]:
        """Rows of each tree that give the best expected rate, if it beats plain, be it only since
        asking is paid for; else a probe.

        Args:
            trees: Chances of the rows of each tree.
        """
        sequences = len(trees)
        guesses = sorted(
            (-chance, place, row)
            for place, chances in enumerate(trees)
            for row, chance in enumerate(chances)
            if row
        )
        kept = [[0] for _ in trees]
        plain_ms = self.costs.ms(sequences)
        if not guesses or plain_ms is None:
            return kept
        chances = [-chance for chance, _, _ in guesses]
        draft_ms = self.draft_cost(plan)
        bar = BAR * sequences / plain_ms
        count = self._best_count(chances, sequences, bar, float("inf"), draft_ms)
        if not count and plan.kind == "probe":
            affordable = plain_ms + self._idle.spare_ms
            count = self._best_count(chances, sequences, 0.0, affordable, draft_ms)
            plan.is_probe = count > 0
        elif not count and draft_ms > 0:
            count = self._best_count(chances, sequences, bar, float("inf"), 0.0)
            plan.is_sunk = count > 0
        for _, place, row in guesses[:count]:
            kept[place].append(row)
        return [sorted(rows) for rows in kept]

    def _best_count(
        self, chances: list[float], sequences: int, bar: float, limit_ms: float, draft_ms: float
    ) -> int:
        """How many guesses, most probable first, give the best rate above `bar`; 0 for none.

        Chances never rise along a path, so the first k of them are the best k guesses.
        """
        best, count = bar, 0
        for size in self.costs.sizes:
            some = chances[: max(0, size - sequences)]
            ms = self.costs.ms(sequences + len(some))
            if not some or ms is None or ms > limit_ms:
                continue
            rate = (sequences + sum(some)) / (ms + draft_ms)
            if rate > best:
                best, count = rate, len(some)
        return count

    def _update_plain_state(self, step: StepRecord, plan: Plan) -> None:
        """Some plain decisions in a row make the plain state; one good draft leaves it."""
        if plan.kind == "control" or self.shape.kind != "auto":
            return
        plain_ms = self.guard.plain_ms(self.costs.ms(step.sequences) or float("inf"))
        worth_ms = step.tokens / step.sequences * plain_ms
        if plan.asked:
            self._idle.asked(worth_ms, step.wall_ms)
        if not step.drafted or plan.is_sunk:
            self._idle.plain(step.tokens)
            if plan.kind == "probe" and step.draft_ms > CHEAP_SHARE * plain_ms:
                self._idle.lost(step.draft_ms)
            return
        if plan.is_probe and step.wall_ms * BAR > worth_ms:
            self._idle.lost(max(step.wall_ms - worth_ms, 0.0))
            return
        if plan.kind == "probe":
            self.unseen.clear()
        if plan.is_probe:
            self._idle.won()
        else:
            self._idle.leave()


def _is_whole(plan: Plan) -> bool:
    """Whether a tree that nobody had seen was proposed."""
    return len(plan.proposed) == 1 and isinstance(plan.proposed[0], GrownTree)
