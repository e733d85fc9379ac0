"""Drafters and controller as the engine uses them: trees before a step, learning after it.

Knows sequences and guesses; no model, no pages. It may cost time; it cannot change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from chatkv.models.logits import Features
from chatkv.sequence import Sequence
from chatkv.spec.control import Controller, Plan
from chatkv.spec.drafter import DraftContext
from chatkv.spec.guarded import GuardedDrafters
from chatkv.spec.proposal import GrownTree, Proposal, settled
from chatkv.spec.stats import DraftStats, StepRecord
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted
from chatkv.spec.view import TokenView

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows

SILENT_TOKENS = 512
"""Tokens without a guess that was run, from which on a drafter is named."""


class Drafting:
    """Guesses for all sequences of one engine.

    Args:
        drafters: Behind their guard.
        costs: Rows -> milliseconds of a forward pass on this machine.
        mode: `auto`, `none`, `chain:N` or `tree:N`.
        guard: Whether slow drafting switches itself off; `verify` pins its shapes instead.
        look_again: Lets `read` have rows [start, stop) of a sequence that are in place.
    """

    def __init__(
        self,
        drafters: GuardedDrafters,
        costs: Mapping[int, float],
        mode: str,
        *,
        guard: bool = True,
        look_again: Callable[[Sequence, int, int], None] | None = None,
    ) -> None:
        self.drafters = drafters
        self.wants_picks = drafters.wants_picks
        self.tap_rows = drafters.reader.tap_rows if drafters.reader is not None else 0
        """Rows of a step, and last rows of a prompt, that somebody reads."""
        self._look_again = look_again
        self.controller = Controller(costs, mode, guard=guard)
        self._stats: dict[int, DraftStats] = {}
        self._plan: Plan | None = None
        self._begun: int | None = None
        """The sequence whose next step has begun ahead."""
        self._holds = False
        """Whether the next step is to wait for its guesses: there were some worth running beside
        the tree of a step that had begun."""
        self._late: Callable[[], None] | None = None

    def set_mode(self, mode: str) -> None:
        """Change the mode, if it is another. Raises ConfigError."""
        if mode != self.controller.mode:
            self.learn()
            self.controller.set_mode(mode)

    def follow(self, seq: Sequence) -> None:
        """A sequence has its prompt in place and its first token chosen."""
        self._stats[seq.id] = DraftStats()
        self.drafters.follow(seq.id, TokenView(seq.tokens))

    def void(self, seq: Sequence) -> None:
        """The sequence's next rows stand elsewhere: what was begun ahead is not for them."""
        self._begun = None
        self.drafters.void(seq.id)

    def wants_rows(self, seq_id: int) -> bool:
        """Whether somebody wants to read the rows that a step keeps."""
        return self.tap_rows > 0 and self.drafters.wants_rows(seq_id)

    def read(self, seq_id: int, start: int, features: Features) -> None:
        """Tapped residuals of rows that were computed, from place `start` on."""
        self.drafters.read(seq_id, start, features)

    def prepare(self, seqs: Seq[Sequence]) -> None:
        """Let drafters catch up with rows they have not read or used yet: work that is owed once
        for a prompt or a resume, and no part of what a step costs."""
        if not self.controller.may_ask:
            return
        for seq in seqs:
            if self._look_again and (span := self.drafters.missing(seq.id)) is not None:
                self._look_again(seq, *span)
            self.drafters.catch_up(seq.id, TokenView(seq.tokens))

    @property
    def reads_late(self) -> bool:
        """Whether `read_late` may have something to do."""
        reader = self.drafters.reader
        return reader is not None and reader.reads_late and self.controller.shape.kind != "none"

    def read_late(self, seq: Sequence) -> Iterator[None]:
        """Let a drafter read rows that are in place, a few at a time: those it would know if the
        sequence had not been computed by another process. What it has read when the iterator is
        closed stays of use to a sequence that begins with the same ids."""
        assert self._look_again is not None
        place = seq.table.first_cut, seq.table.num_tokens
        self.drafters.follow(seq.id, TokenView(seq.tokens))
        try:
            span, last = self.drafters.owed(seq.id, *place), None
            while span is not None and span != last:  # or there is no room to compute them
                self._look_again(seq, *span)
                span, last = self.drafters.owed(seq.id, *place), span
                yield
        finally:
            self.drafters.drop(seq.id)

    @property
    def has_begun(self) -> bool:
        """Whether the next step has begun."""
        return self._begun is not None

    def propose(self, seqs: Seq[Sequence]) -> list[Proposal]:
        """The trees to run, one a sequence; the root alone is a plain step."""
        begun = len(seqs) == 1 and self._begun == seqs[0].id
        self._begun, self._holds = None, False
        plan = self._plan = self.controller.plan(
            [seq.id for seq in seqs],
            [seq.sampler.params.temperature == 0 for seq in seqs],
            has_begun=begun,
        )
        if not plan.asks:
            self._pass_by(seqs)
            return self.controller.prune([DraftTree.root(seq.tokens[-1]) for seq in seqs], plan)
        contexts = [DraftContext(seq.id, TokenView(seq.tokens), seq.sampler) for seq in seqs]
        rows = [plan.rows[seq.id] for seq in seqs]
        trees = self.drafters.propose(
            contexts,
            rows,
            self.controller.stays_unseen,
            self.controller.enough,
            self.controller.affordable,
            self.controller.waits,
        )
        plan.asked = self.drafters.asked
        self._pass_by(seqs)
        if begun and isinstance(tree := trees[0], GrownTree) and tree.runs_beside:
            tree.runs_beside, self._holds = False, True
        return [
            _cut(tree, seq)
            for tree, seq in zip(self.controller.prune(trees, plan), seqs, strict=True)
        ]

    def _pass_by(self, seqs: Seq[Sequence]) -> None:
        """Tell the drafter that reads layers that its rows are not needed for this step."""
        reader, plan = self.drafters.reader, self._plan
        if reader is not None and plan is not None and reader.name not in plan.asked:
            for seq in seqs:
                self.drafters.pass_by(seq.id, soon=plan.kind not in ("plain", "cheap"))

    def spare(self, seq: Sequence, tree: Proposal) -> int:
        """Rows that a step of this tree may keep, if the next step may begin behind it; else 0.

        It may if nothing can be in its way: no end of the reply or of the context, no setting that
        wants the logits, and no guesses that were to be run beside the tree.
        """
        if not isinstance(tree, GrownTree) or tree.others is not None or self._holds:
            return 0
        edits, wants = seq.sampler.edits_rows, seq.sampler.params.logprobs is not None
        if edits or wants or seq.max_depth < 2 * tree.depth + 1:
            return 0
        return tree.depth + 1 if self.controller.may_run_on else 0

    def behind(
        self, seqs: Seq[Sequence], run_on: Callable[[TreeRows], None] | None = None
    ) -> Callable[[], None]:
        """What there is to do while the model runs a step, all its launches made: begin the next
        tree behind it, and the step of that tree if it may, and learn from the step before.

        Args:
            run_on: Begins that step.
        """
        begin, plan = None, self._plan
        if len(seqs) == 1 and plan is not None and plan.kind not in ("plain", "cheap"):
            begin = None if seqs[0].sampler.edits_rows else self.drafters.ahead(seqs[0].id)

        def work() -> None:
            for tree in plan.proposed if plan is not None else ():
                settled(tree)  # its place is needed for the next one
            if begin is not None:
                begin()
                rows = self.drafters.begun(seqs[0].id) if run_on is not None else None
                if run_on is not None and rows is not None:
                    run_on(rows)
                    self._begun = seqs[0].id
            self.learn()

        return work

    def observe(
        self, seqs: Seq[Sequence], accepted: Seq[Accepted], record: Callable[[], StepRecord]
    ) -> None:
        """A step ran the trees proposed last. Drafters hear of it now, the rest learns later.

        Args:
            record: Its times and counts, when there is time to count.
        """
        for seq, gained in zip(seqs, accepted, strict=True):
            self.drafters.observe(seq.id, gained)
        seq_id, plan = seqs[0].id if len(seqs) == 1 else None, self._plan

        def late() -> None:
            step = record()
            if seq_id is not None:
                self._stats[seq_id].add(step)
            self.controller.observe(step, accepted, plan)

        self.learn()
        self._late = late

    def learn(self) -> None:
        """Learn from the last step, if that has not happened."""
        late, self._late = self._late, None
        if late is not None:
            late()

    def drop(self, seq: Sequence) -> DraftStats:
        """Forget a sequence; what drafting did for it comes back."""
        self.learn()
        self.drafters.drop(seq.id)
        return self._stats.pop(seq.id, DraftStats())

    def explain(self) -> str:
        """One sentence: what drafting does now, and why; and who had nothing to say or failed."""
        self.learn()
        told = self.controller.explain()
        stats = self.controller.stats
        heard = {name for name, _ in stats.offered}
        silent = [name for name in self.drafters.names if name not in heard]
        if stats.tokens >= SILENT_TOKENS and silent and heard:
            told += f" No guess of {' or '.join(silent)} was run in {stats.tokens} tokens."
        names = ", ".join(self.drafters.names) or "nobody"
        return " ".join([told, f"Drafters: {names}.", *self.drafters.failures[-1:]])


def _cut(tree: Proposal, seq: Sequence) -> Proposal:
    """Without rows that the end of the reply or of the context makes useless.

    A tree that nobody has seen stays whole as long as there is a place for all of it: waiting for
    it takes longer than its last rows.
    """
    left = seq.max_depth
    if isinstance(tree, GrownTree):
        if tree.others is not None and max(tree.others.depths) > left > 0:
            tree.beside = _shallow(tree.others, left)
        if tree.depth <= left or 0 < left < tree.depth <= seq.free_depth:
            return tree
        if left <= 0:
            return DraftTree.root(tree.root)
        tree = tree.settle()
    return tree if max(tree.depths) <= left else _shallow(tree, left)


def _shallow(tree: DraftTree, depth: int) -> DraftTree:
    return tree.subset([row for row, own in enumerate(tree.depths) if own <= depth])
