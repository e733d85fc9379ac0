"""Guesses of a trained head, from what the target itself computed for the last token.

Knows features and trees; how a head computes is in `chatkv/spec/heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chatkv.errors import HeadsMismatch
from chatkv.models import catalog
from chatkv.models.logits import Features, KeptRow
from chatkv.models.model import Model
from chatkv.spec.drafter import DraftContext, Reader
from chatkv.spec.drafters.ahead import Ahead, AheadGrower
from chatkv.spec.drafters.eagle import EagleDrafter
from chatkv.spec.heads.grown import tree_of
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows

WEIGHTS = Path(__file__).parent.parent / "weights"
"""Heads that ship with chatkv."""
KINDS = ("eagle", "recurrent", "parallel")
"""The best first. On a CPU a depth of an eagle head costs what one of a recurrent head does; on a
GPU its tree takes longer to grow, and gains more than that."""


class Grower(Protocol):
    """How a head runs on one kind of device."""

    def grow(
        self,
        taps: KeptRow,
        root: int,
        position: int,
        *,
        temperature: float,
        seed: int,
        max_rows: int,
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of a tree, its root first."""
        ...


class LaunchedGrower(AheadGrower, Protocol):
    """One that can begin from what the walk behind a step leaves."""

    def launch(self) -> None:
        """Grow; returns at once."""
        ...


class HeadsDrafter:
    """A tree from a head that reads one row: that which chose the root.

    The last row of a prompt is always computed, so there is a guess behind the first token too,
    after a resume as well as without one.

    Args:
        grower: The head, on the target's device.
        taps: The layers it reads.
        ahead: The same head, if it can begin before the host knows what a step gave.
    """

    name = "heads"
    tap_rows = 1
    reads_late = False

    def __init__(
        self, grower: Grower, taps: tuple[int, ...], ahead: LaunchedGrower | None = None
    ) -> None:
        self.grower = grower
        self.taps = taps
        self._launcher, self._ahead = ahead, Ahead(ahead)
        self._read: dict[int, tuple[int, Features]] = {}
        """By sequence: the newest rows, and the place behind them."""

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Nothing to take up: all it needs is read. What was grown from other ids is void."""
        self.void(seq_id)

    def read(self, seq_id: int, start: int, features: Features) -> None:
        """Keep the rows until newer ones come."""
        self._read[seq_id] = (start + len(features), features)

    def missing(self, seq_id: int) -> tuple[int, int] | None:
        """Never anything."""

    def catch_up(self, seq_id: int, tokens: Sequence[int]) -> None:
        """One row is enough."""

    def owed(self, seq_id: int, start: int, stop: int) -> tuple[int, int] | None:
        """Never anything."""

    def pass_by(self, seq_id: int, *, soon: bool) -> None:
        """The next step brings newer rows."""
        self._read.pop(seq_id, None)

    def clear(self) -> None:
        """Nothing is kept of a sequence that ended."""

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def ahead(self, seq_id: int) -> Callable[[], None] | None:
        """Has the next tree grown on the device, from what the step that runs there leaves."""
        launcher = self._launcher
        return None if launcher is None else lambda: self._ahead.begin(seq_id, launcher.launch)

    def grown(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        """The tree that was begun ahead, if it is the one for these ids."""
        tree = self._ahead.take(context, max_rows)
        if tree is not None:
            self._read.pop(context.seq_id, None)  # or the next step would have to copy them
        return tree

    def begun(self, seq_id: int) -> TreeRows | None:
        """Where the tree that was begun behind the running step will lie."""
        return self._ahead.begun(seq_id)

    def void(self, seq_id: int) -> None:
        """What was begun is for other rows."""
        self._ahead.void(seq_id)

    def has_read(self, seq_id: int) -> bool:
        """Never: it may have to guess without the tree that was begun."""
        return False

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """A step is through: what was begun behind it fits the sequence now."""
        self._ahead.observe(seq_id)

    def drop(self, seq_id: int) -> None:
        """Let go of the rows, and of what was begun."""
        self._read.pop(seq_id, None)
        self.void(seq_id)

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        root = int(context.tokens[-1])
        stop, features = self._read.pop(context.seq_id, (-1, ()))
        if stop != len(context.tokens) - 1 or max_rows < 2:
            return DraftTree.root(root)
        params = context.sampler.params
        self._ahead.replace()
        tokens, parents, chance = self.grower.grow(
            features[len(features) - 1],
            root,
            len(context.tokens),
            temperature=params.temperature,
            seed=params.seed,
            max_rows=max_rows,
        )
        return tree_of(tokens, parents, chance).best(max_rows)


def find_heads(model: Model) -> Path | None:
    """The file for a model's very weights: one that was trained here, one that ships, or None.

    Of several the kind that is the fastest.
    """
    from chatkv.spec.heads.file import kind_for

    for folder in (catalog.cache_dir() / "heads", WEIGHTS):
        kinds: dict[str | None, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            kinds.setdefault(kind_for(path, model.spec, model.tokenizer.tok_fp()), path)
        for kind in KINDS:
            if kind in kinds:
                return kinds[kind]
    return None


def load_heads(model: Model) -> Reader:
    """The drafter of a model's heads.

    Raises:
        HeadsMismatch: There are none, or they do not fit; says both values.
    """
    from chatkv.spec.heads import file as head_file

    found = find_heads(model)
    if found is None:
        for folder in (catalog.cache_dir() / "heads", WEIGHTS):
            for other in sorted(folder.glob("*.safetensors")):
                if other.name.startswith(model.spec.name.lower()):  # of another quantisation
                    head_file.load(other, model.spec, model.tokenizer.tok_fp())
        raise HeadsMismatch(
            f"There are no draft heads for {model.spec.name}.",
            hint="Leave `heads` out of --drafters, or train some: chatkv train-heads.",
        )
    opened = head_file.load(found, model.spec, model.tokenizer.tok_fp())
    if model.device == "cpu":
        from chatkv.spec.heads.cpu import grower_of
    else:
        from chatkv.spec.heads.device import grower_of
    grower: Any = grower_of(opened, model)
    taps, ahead = opened.head.shape.taps, grower if hasattr(grower, "rows") else None
    kind = EagleDrafter if opened.head.shape.kind == "eagle" else HeadsDrafter
    return kind(grower, taps, ahead)
