"""Packed rows and what the target says over them, kept on the device. Knows no head."""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.errors import UsageError
from chatkv.models.dense import DenseWeights
from chatkv.spec.train.base import Base, Rows, last_rows
from chatkv.spec.train.packing import Packed
from chatkv.spec.train.unroll import Lesson

ROWS = 32
"""Rows of one pass of the target."""


@dataclass(frozen=True, slots=True)
class LessonStore:
    """Everything that training reads again and again.

    Args:
        states: [R, T, taps, H] of all rows; about 3.5 KB a token for the default model.
    """

    weights: DenseWeights
    rows: Rows
    states: Tensor
    log_total: Tensor
    """[R, T]."""
    draft_ids: Tensor
    draft_rows: Tensor
    place_of: Tensor

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        weights: DenseWeights,
        packed: Packed,
        draft_ids: npt.NDArray[np.int64],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> LessonStore:
        """Run the target over rows for as long as `may_go_on` says; the rest is left out.

        Raises:
            UsageError: There are none.
        """
        base, device, vocab = Base(weights), weights.device, weights.spec.vocab_size
        ids = torch.from_numpy(draft_ids).to(device)
        place_of = torch.full((vocab,), len(ids), dtype=torch.int64, device=device)
        place_of[ids] = torch.arange(len(ids), device=device)
        rows = Rows(
            *(
                torch.from_numpy(part).to(device)
                for part in (packed.ids, packed.documents, packed.positions, packed.written)
            )
        )
        states: Tensor | None = None
        log_total = torch.zeros(rows.ids.shape, dtype=torch.float32, device=device)
        ready = 0
        while ready < len(rows.ids) and (ready == 0 or may_go_on()):
            part = slice(ready, ready + ROWS)
            found = base.run(rows_of(rows, part))
            if states is None:
                shape = (len(rows.ids), *found.states.shape[1:])
                states = torch.empty(shape, dtype=found.states.dtype, device=device)
            states[part], log_total[part] = found.states, found.log_total
            ready += len(found.states)
        if states is None:
            raise UsageError(
                "There is no row of text to train on, beside the one that is kept to look at.",
                hint="Give the stage that writes more --minutes; what it wrote stays.",
            )
        every = slice(0, ready)
        return cls(
            weights, rows_of(rows, every), states[every], log_total[every], ids,
            weights.head[ids].contiguous(), place_of,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.states)

    @torch.no_grad()
    def lesson(self, places: Tensor, into: Lesson | None = None) -> Lesson:
        """The rows at these places, as a batch.

        Args:
            into: A lesson of as many rows that is overwritten and given back.
        """
        states = self.states[places]
        rows = rows_of(self.rows, places)
        hidden = last_rows(self.weights, states[:, :, -1].flatten(0, 1))
        made = Lesson(
            rows=rows,
            states=states,
            embedded=self.weights.embedding[rows.ids.long()],
            target=hidden @ self.draft_rows.T,
            log_total=self.log_total[places].flatten(),
            draft_rows=self.draft_rows,
            place_of=self.place_of,
        )
        if into is None:
            return made
        for old, new in zip(into.parts(), made.parts(), strict=True):
            old.copy_(new)
        return into


def rows_of(rows: Rows, places: Tensor | slice) -> Rows:
    """Some of the rows."""
    return Rows(rows.ids[places], rows.documents[places], rows.positions[places],
                rows.written[places])  # fmt: skip
