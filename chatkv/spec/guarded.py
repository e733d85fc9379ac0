"""The guard around the drafters that run. Knows ids, trees and failures; no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from chatkv.models.logits import Features
from chatkv.spec.drafter import AheadReader, DraftContext, Drafter, Reader
from chatkv.spec.proposal import GrownTree, Proposal
from chatkv.spec.tree import MAX_ROWS, DraftTree, sanitize
from chatkv.spec.verify import Accepted

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedDrafters:
    """Several drafters as one that never raises and returns only trees that are safe to run.

    A drafter that raises or returns nonsense is switched off for the conversations of that call
    and named once in `failures` and in the log; the step goes on without it.

    Args:
        drafters: Asked in this order; their trees are merged.
        vocab_size: Ids from here on are never guessed.
    """

    def __init__(self, drafters: Sequence[Drafter], *, vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self.vocab_size = vocab_size
        self.reader: Reader | None = next(
            (cast(Reader, drafter) for drafter in drafters if getattr(drafter, "taps", ())), None
        )
        """The drafter that reads layers, if there is one."""
        self._ahead = self.reader if isinstance(self.reader, AheadReader) else None
        self.costly = tuple(
            drafter
            for drafter in drafters
            if drafter is self.reader or getattr(drafter, "guess_ms", None) is not None
        )
        """Those that take time: the one that reads layers, and those that price their guesses."""
        self.asked: tuple[str, ...] = ()
        """Names of those of them that were asked last."""
        self.wants_picks = any(getattr(drafter, "wants_picks", False) for drafter in drafters)
        """Whether some drafter learns from what the model picks behind wrong guesses too."""
        self.failures: list[str] = []
        self._off: set[tuple[str, int]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters, failed ones included."""
        return tuple(drafter.name for drafter in self.drafters)

    def is_off(self, name: str, seq_id: int) -> bool:
        """Whether this drafter failed in this conversation."""
        return bool(self._off) and (name, seq_id) in self._off

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Tell all drafters; a changed sequence gives a failed one no second chance."""
        for drafter in self._running([seq_id]):
            self._try(drafter, [seq_id], lambda d=drafter: d.follow(seq_id, tokens))

    def wants_rows(self, seq_id: int) -> bool:
        """Whether a drafter wants to be handed the rows that the step keeps."""
        if (reader := self.reader) is None or self.is_off(reader.name, seq_id):
            return False
        return self._ahead is None or not self._ahead.has_read(seq_id)

    def read(self, seq_id: int, start: int, features: Features) -> None:
        """Hand rows to the drafter that reads layers."""
        if (reader := self.reader) is not None and not self.is_off(reader.name, seq_id):
            self._try(reader, [seq_id], lambda: reader.read(seq_id, start, features))

    def missing(self, seq_id: int) -> tuple[int, int] | None:
        """Rows in place that the drafter would like to read; said once."""
        if (reader := self.reader) is not None and not self.is_off(reader.name, seq_id):
            return self._try(reader, [seq_id], lambda: reader.missing(seq_id))
        return None

    def catch_up(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Let the drafter that reads layers use the rows it has."""
        if (reader := self.reader) is not None and not self.is_off(reader.name, seq_id):
            self._try(reader, [seq_id], lambda: reader.catch_up(seq_id, tokens))

    def owed(self, seq_id: int, start: int, stop: int) -> tuple[int, int] | None:
        """A few rows of [start, stop) that the drafter would like to read in idle time."""
        if (reader := self.reader) is not None and not self.is_off(reader.name, seq_id):
            return self._try(reader, [seq_id], lambda: reader.owed(seq_id, start, stop))
        return None

    def pass_by(self, seq_id: int, *, soon: bool) -> None:
        """A step runs for which the drafter that reads layers was not asked."""
        if (reader := self.reader) is not None and not self.is_off(reader.name, seq_id):
            self._try(reader, [seq_id], lambda: reader.pass_by(seq_id, soon=soon))

    def clear(self) -> None:
        """Let go of what the drafter that reads layers keeps of dropped sequences."""
        if (reader := self.reader) is not None:
            self._try(reader, [], reader.clear)

    def void(self, seq_id: int) -> None:
        """What was begun ahead for a sequence is not to be run."""
        if (reader := self._ahead) is not None:
            self._try(reader, [seq_id], lambda: reader.void(seq_id))

    def give_up(self, seq_id: int, error: Exception) -> None:
        """Switch off the drafter whose tree turned out to be none."""

        def fail() -> None:
            raise error

        if (reader := self._ahead) is not None:
            self._try(reader, [seq_id], fail)

    def ahead(self, seq_id: int) -> Callable[[], None] | None:
        """Begins the next tree of a sequence where the model runs, behind the step that is there;
        None if no drafter can."""
        reader = self._ahead
        if reader is None or self.is_off(reader.name, seq_id):
            return None
        begin = self._try(reader, [seq_id], lambda: reader.ahead(seq_id))
        return None if begin is None else lambda: self._try(reader, [seq_id], begin)

    def begun(self, seq_id: int) -> TreeRows | None:
        """Where the tree will lie that was begun behind the step that runs, if one was."""
        reader = self._ahead
        if reader is None or self.is_off(reader.name, seq_id):
            return None
        return self._try(reader, [seq_id], lambda: reader.begun(seq_id))

    def propose(
        self,
        contexts: Sequence[DraftContext],
        max_rows: Sequence[int],
        stays_unseen: Callable[[GrownTree], bool] | None = None,
        enough: Callable[[Sequence[DraftTree]], bool] | None = None,
        affordable: Callable[[str, float | None], int] | None = None,
        waits: Callable[[str], bool] | None = None,
    ) -> Sequence[Proposal]:
        """One tree for each context: the root alone where nobody has a guess.

        Drafters that take time are asked last, and not at all where that cannot be worth it. A tree
        that was begun ahead comes as it is, unless others have guesses to add.

        Args:
            stays_unseen: Whether it comes unseen although others have the guesses `beside` it, and
                decides whether those run as well.
            enough: Whether these are so good that no drafter which takes time need be asked.
            affordable: Rows for the drafter of that name, which takes so long for each guess.
            waits: Whether a tree of that drafter which is not there is waited for now, rather than
                begun behind a step without it.
        """
        found: list[list[DraftTree]] = [[] for _ in contexts]
        for drafter in self.drafters:
            if drafter not in self.costly:
                self._ask(drafter, contexts, max_rows, found)
        rows = {drafter.name: _rows(drafter, affordable) for drafter in self.costly}
        asked = [drafter for drafter in self.costly if rows[drafter.name] > 1]
        grown = self._grown(contexts, max_rows) if self.reader in asked else None
        if grown is None and asked and self._spare(found, contexts, enough):
            asked = []
        if grown is None and waits is not None and self._comes_next(contexts):
            asked = [own for own in asked if own is not self.reader or waits(own.name)]
        for drafter in asked:
            if drafter is not self.reader or grown is None:
                limits = [min(most, rows[drafter.name]) for most in max_rows]
                self._ask(drafter, contexts, limits, found)
        self.asked = tuple(drafter.name for drafter in asked)
        if grown is not None:
            if not found[0]:
                return [grown]
            grown.beside = self._merged(found[0], grown.root, max_rows[0])
            if stays_unseen is not None and not self.wants_picks and stays_unseen(grown):
                return [grown]
            assert self.reader is not None
            tree = self._try(self.reader, [contexts[0].seq_id], grown.settle)
            found[0] += [tree] if tree is not None else []
        return [
            self._merged(trees, int(context.tokens[-1]), limit)
            for trees, context, limit in zip(found, contexts, max_rows, strict=True)
        ]

    def _ask(
        self,
        drafter: Drafter,
        contexts: Sequence[DraftContext],
        max_rows: Sequence[int],
        found: Sequence[list[DraftTree]],
    ) -> None:
        """Add a drafter's trees to those that were found, where it has a guess."""
        places: Sequence[int] = range(len(contexts))
        some, limits = contexts, max_rows
        if self._off:
            places = [p for p in places if not self.is_off(drafter.name, contexts[p].seq_id)]
            some, limits = [contexts[p] for p in places], [max_rows[p] for p in places]
        if not places:
            return

        def ask() -> list[DraftTree]:
            return [
                sanitize(
                    tree,
                    root=int(context.tokens[-1]),
                    vocab_size=self.vocab_size,
                    max_rows=limit,
                )
                for tree, context, limit in zip(
                    drafter.propose(some, limits), some, limits, strict=True
                )
            ]

        trees = self._try(drafter, [context.seq_id for context in some], ask)
        for place, tree in zip(places, trees or (), strict=False):
            if len(tree) > 1 and len(tree := _fitting(tree, contexts[place])) > 1:
                found[place].append(tree)

    def _spare(
        self,
        found: Sequence[list[DraftTree]],
        contexts: Sequence[DraftContext],
        enough: Callable[[Sequence[DraftTree]], bool] | None,
    ) -> bool:
        if enough is None or not all(found):
            return False
        roots = [int(context.tokens[-1]) for context in contexts]
        return enough(
            [self._merged(own, root, MAX_ROWS) for own, root in zip(found, roots, strict=True)]
        )

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """Tell all drafters what the step gained."""
        for drafter in self.drafters:
            if not self.is_off(drafter.name, seq_id):
                self._try(drafter, [seq_id], partial(drafter.observe, seq_id, accepted))

    def drop(self, seq_id: int) -> None:
        """Forget the sequence, failures included."""
        for drafter in self.drafters:
            self._try(drafter, [seq_id], lambda d=drafter: d.drop(seq_id))
        self._off = {(name, other) for name, other in self._off if other != seq_id}

    def _comes_next(self, contexts: Sequence[DraftContext]) -> bool:
        """Whether the next tree of the only sequence can be begun behind the step."""
        if self._ahead is None or len(contexts) > 1 or contexts[0].sampler.edits_rows:
            return False
        return self.ahead(contexts[0].seq_id) is not None

    def _grown(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> GrownTree | None:
        """What was begun ahead for the only sequence."""
        reader = self._ahead
        if len(contexts) > 1 or reader is None or self.is_off(reader.name, contexts[0].seq_id):
            return None
        return self._try(
            reader, [contexts[0].seq_id], lambda: reader.grown(contexts[0], max_rows[0])
        )

    def _running(self, seq_ids: Sequence[int]) -> list[Drafter]:
        return [
            drafter
            for drafter in self.drafters
            if not any(self.is_off(drafter.name, seq_id) for seq_id in seq_ids)
        ]

    def _try(self, drafter: Drafter, seq_ids: Sequence[int], call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # a drafter only guesses: no bug of it may stop a reply
            self._off.update((drafter.name, seq_id) for seq_id in seq_ids)
            said = " ".join([type(error).__name__, *str(error).split()])
            message = f"{drafter.name} is off for this conversation: {said:.200}"
            self.failures.append(message)
            logger.warning(message, exc_info=error)
            return None

    @staticmethod
    def _merged(trees: list[DraftTree], root: int, max_rows: int) -> DraftTree:
        if not trees:
            return DraftTree.root(root)
        return trees[0] if len(trees) == 1 else DraftTree.merge(trees, max_rows)


def _rows(drafter: Drafter, affordable: Callable[[str, float | None], int] | None) -> int:
    if affordable is None:
        return MAX_ROWS
    return affordable(drafter.name, getattr(drafter, "guess_ms", None))


def _fitting(tree: DraftTree, context: DraftContext) -> DraftTree:
    """Without rows that the reply's grammar forbids, and all below them."""
    if context.sampler.grammar is None or len(tree) == 1:
        return tree
    kept = [0]
    parents: list[int] = tree.parents.tolist()
    for row in range(1, len(tree)):
        if parents[row] in kept:
            path = tree.path(row)
            if context.sampler.fitting(context.tokens, path) == len(path):
                kept.append(row)
    return tree.subset(kept)
