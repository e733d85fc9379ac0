"""What the engine asks of a model. Knows tokens, slots and logits; no weights and no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from chatkv.attention.call import AttentionCall
from chatkv.kv.format import PLAIN, KVFormat
from chatkv.kv.pool import PagePool
from chatkv.kv.table import Holes
from chatkv.models.spec import ModelSpec
from chatkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chatkv.models.logits import Features, StepLogits
    from chatkv.models.tree_rows import TreeRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T new rows of N sequences, for one forward pass."""

    tokens: npt.NDArray[np.int32]
    """[T] ids. Rows of one sequence are adjacent, parents before children."""
    positions: npt.NDArray[np.int32]
    """[T] position of each row."""
    slots: npt.NDArray[np.int64]
    """[T] physical slot of each row, the same in all layers; -1 stores nothing."""
    call: AttentionCall
    logit_rows: npt.NDArray[np.int32] | None = None
    """Rows whose logits are wanted, or None for all."""
    tapped: int = 0
    """Last rows whose tapped residuals are wanted where not all logits are."""
    grown: TreeRows | None = None
    """Tokens, positions and ancestors as the device has made them; those above are not read."""


class BackendFacts(Protocol):
    """What is shown of an attention backend."""

    @property
    def name(self) -> str: ...
    @property
    def mode(self) -> str: ...


class Model(Protocol):
    """A decoder with paged K/V."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def device(self) -> str:
        """Where it runs: `cpu`, `cuda`, `cuda:1`."""
        ...

    @property
    def backend(self) -> BackendFacts: ...
    @property
    def backend_name(self) -> str:
        """Backend, mode and numerics version, as stored with a witness."""
        ...

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        ...

    @property
    def max_step_rows(self) -> int:
        """Rows a step may have without any row's bits depending on the others."""
        ...

    def identity(self, page_tokens: int, kv: KVFormat = PLAIN) -> dict[str, object]:
        """Everything that changes the bits of a page in that format, for the fingerprint.

        Raises:
            BackendUnavailable: The device has no such pages.
        """
        ...

    def pool_tokens(self, context_limit: int, kv: KVFormat = PLAIN) -> int:
        """Tokens of the pool when nobody says: two contexts, or one where there is less room."""
        ...

    def new_pool(self, num_tokens: int, kv: KVFormat = PLAIN) -> PagePool:
        """A pool for at least so many tokens of this model.

        Raises:
            BackendUnavailable: The device has no such pages.
        """
        ...

    def chunk(self, offset: int) -> tuple[int, int]:
        """(first, rows) of the prompt chunk that holds the given id `offset` ids into its run."""
        ...

    def tap(self, layers: Sequence[int], prompt_rows: int = 1) -> None:
        """From the next step on, keep the residual behind these layers, counted from 1, for
        `StepLogits.features`; and of the last rows of a prompt chunk, for `prompt_features`. None
        is kept at first: it costs a little."""
        ...

    def step(self, batch: ForwardBatch, pool: PagePool) -> StepLogits:
        """Run the rows, store their K/V; the logits of the wanted rows.

        A row's bits depend on its own history alone. The result is good until the next step.
        """
        ...

    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        known: int,
        slots: npt.NDArray[np.int64],
        entries: npt.NDArray[np.int32],
        pool: PagePool,
        *,
        chunk_rows: int,
        want_logits: bool,
        tapped: int = 0,
        holes: Holes | None = None,
    ) -> npt.NDArray[np.float32] | None:
        """Run the given ids of one chunk behind `known` stored slots; [V] logits of the last one.

        Args:
            tokens: The new ids; with what is known of the chunk at most `chunk_rows`.
            start: Slot of the chunk's first row.
            known: Slot of the first new id, `start` or more.
            slots: [len(tokens)] physical slots of the new ids.
            entries: Page ids of the sequence.
            chunk_rows: Rows of the whole chunk, as `chunk` said: the shape, and so the bits.
            want_logits: Whether the last row's logits are needed.
            tapped: Last rows whose tapped residuals are wanted; at most as `tap` said.
            holes: Of the entries, if something was forgotten; positions are slots else.
        """
        ...

    def prompt_features(self, count: int) -> Features:
        """A copy of the tapped residuals of the last `count` rows of the chunk that ran last."""
        ...


@runtime_checkable
class RunsOn(Protocol):
    """A model that can begin a step while the tokens of the one in front are not here yet."""

    def run_on(self, batch: ForwardBatch, pool: PagePool) -> None:
        """Begin a step of a tree that grows behind the step that runs, all of whose work has been
        given to the device. If it is the next one that is asked for, it is not run again.

        Args:
            batch: Of one sequence, as if the step that runs kept no row; `slots` has more than
                there are rows: those for each number of rows that it may keep.
        """
        ...

    @property
    def was_begun(self) -> bool:
        """Whether the step that was asked for last had begun."""
        ...
