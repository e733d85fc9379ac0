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
from chatkv.spec.drafters.eagle import EagleDrafter
from chatkv.spec.heads.grown import tree_of
from chatkv.spec.proposal import GrownTree
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

if TYPE_CHECKING:
    from chatkv.models.tree_rows import TreeRows

WEIGHTS = Path(__file__).parent.parent / "weights"
"""Heads that ship with chatkv."""
CPU_KINDS = ("eagle", "recurrent", "parallel")
DEVICE_KINDS = ("recurrent", "eagle", "parallel")
"""The best first. On a CPU a depth of an eagle head costs what one of a recurrent head does; on a
device it is a hundred small kernels, and the recurrent head has its own."""


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


class AheadGrower(Protocol):
    """A head whose tree grows where the model runs, and can be run there before it is seen here."""

    depth: int
    """Guesses on a path at most."""

    @property
    def rows(self) -> TreeRows:
        """The tree as rows of a step."""
        ...

    def launch(self) -> None:
        """Grow from what the walk behind a step leaves; returns at once."""
        ...

    def read(self) -> tuple[list[int], list[int], list[float]]:
        """The tree that was launched last, as `Grower.grow` gives it."""
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

    def __init__(
        self, grower: Grower, taps: tuple[int, ...], ahead: AheadGrower | None = None
    ) -> None:
        self.grower = grower
        self.taps = taps
        self._ahead = ahead
        self._read: dict[int, tuple[int, Features]] = {}
        """By sequence: the newest rows, and the place behind them."""
        self._launched: int | None = None
        """The sequence whose next tree is being grown, its step not yet observed."""
        self._growing: int | None = None
        """The sequence whose next tree is being grown, or is there."""

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

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def ahead(self, seq_id: int) -> Callable[[], None] | None:
        """Has the next tree grown on the device, from what the step that runs there leaves."""
        grower = self._ahead
        if grower is None:
            return None

        def begin() -> None:
            self._launched = self._growing = None
            grower.launch()
            self._launched = seq_id

        return begin

    def grown(self, context: DraftContext, max_rows: int) -> GrownTree | None:
        """The tree that was begun ahead, if it is the one for these ids."""
        growing, self._growing = self._growing, None
        grower = self._ahead
        if grower is None or growing != context.seq_id or max_rows < len(grower.rows.tokens):
            return None
        self._read.pop(context.seq_id, None)  # or the next step would have to copy them
        root = int(context.tokens[-1])
        return GrownTree(root, grower.depth, grower.rows, lambda: tree_of(*grower.read()))

    def void(self, seq_id: int) -> None:
        """What was begun is for other rows."""
        if self._growing == seq_id:
            self._growing = None

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """A step is through: what was begun behind it fits the sequence now."""
        self.void(seq_id)
        if self._launched == seq_id:
            self._launched, self._growing = None, seq_id

    def drop(self, seq_id: int) -> None:
        """Let go of the rows, and of what was begun."""
        self._read.pop(seq_id, None)
        self.void(seq_id)

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        root = int(context.tokens[-1])
        stop, features = self._read.get(context.seq_id, (-1, ()))
        if stop != len(context.tokens) - 1 or max_rows < 2:
            return DraftTree.root(root)
        params = context.sampler.params
        self._launched = self._growing = None
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

    Of several the kind that is fastest on the model's device.
    """
    from chatkv.spec.heads.file import kind_for

    order = CPU_KINDS if model.device == "cpu" else DEVICE_KINDS
    for folder in (catalog.cache_dir() / "heads", WEIGHTS):
        kinds: dict[str | None, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            kinds.setdefault(kind_for(path, model.spec, model.tokenizer.tok_fp()), path)
        for kind in order:
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
    taps = opened.head.shape.taps
    if opened.head.shape.kind == "eagle":
        return EagleDrafter(grower, taps)
    return HeadsDrafter(grower, taps, grower if hasattr(grower, "rows") else None)
