"""What proposals teach the calibration. Knows plans, trees and what the model chose; no cost."""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.spec.calibration import Calibration
from chatkv.spec.plan import Plan
from chatkv.spec.proposal import GrownTree, settled
from chatkv.spec.stats import follow
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted


class Lessons:
    """Fills a calibration."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._followed: dict[int, tuple[DraftTree, int]] = {}
        self.guessed_steps = 0
        """Proposals that had a guess."""

    def learn(self, plan: Plan, accepted: Sequence[Accepted]) -> None:
        """Whole proposals teach, run or not: the model chooses its tokens in any case.

        One proposal a sequence is followed through later steps, so that depths which were never
        worth a row become known too.
        """
        going: dict[int, tuple[DraftTree, int]] = {}
        proposed = [settled(tree) for tree in plan.proposed] or [None] * len(accepted)
        for proposal in plan.proposed:
            if isinstance(proposal, GrownTree) and proposal.beside is not None:
                outcomes, _ = follow(proposal.beside, 0, accepted[0].tokens)
                self._calibration.learn(outcomes, plan.greedy[0])
        for seq_id, tree, gained, greedy in zip(
            plan.rows, proposed, accepted, plan.greedy, strict=True
        ):
            followed = self._followed.get(seq_id)
            row: int | None = None
            if followed is not None:
                outcomes, row = follow(*followed, gained.tokens)
                self._calibration.learn(outcomes, greedy)
                if row is not None:
                    going[seq_id] = (followed[0], row)
            if tree is not None and len(tree) > 1:
                outcomes, reached = follow(tree, 0, gained.tokens)
                self._calibration.learn(outcomes, greedy)
                self.guessed_steps += 1
                if row is None and reached is not None:
                    going[seq_id] = (tree, reached)
        self._followed = going
