"""What passes between a step and whoever grows the next tree, without leaving the device.

Knows tensors and where they lie; no tree and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chatkv.models.staged import Fields, Staged, places_of


def row_fields(rows: int) -> Fields:
    """The inputs of a step that depend on the tree it runs; they lie in front of all others."""
    return {
        "tokens": (torch.int32, (rows,)),
        "positions": (torch.int32, (rows,)),
        "ancestors": (torch.int64, (rows, 1)),
    }


@dataclass(frozen=True, slots=True)
class TreeRows:
    """A tree as rows of a step, in one block of memory that a step takes as it is."""

    block: Tensor
    """[bytes] uint8."""
    tokens: Tensor
    """[R] int32."""
    positions: Tensor
    """[R] int32."""
    ancestors: Tensor
    """[R, 1] int64."""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> TreeRows:
        """No tree yet."""
        fields = row_fields(rows)
        places, size = places_of(fields)
        block = torch.zeros(size, dtype=torch.uint8, device=device)
        views = {
            name: block[places[name] :].view(dtype)[: torch.Size(shape).numel()].view(shape)
            for name, (dtype, shape) in fields.items()
        }
        return cls(block, **views)


@dataclass(frozen=True, slots=True)
class WalkedRows:
    """The rows of a step that its walk keeps, where the step and the walk left them."""

    tapped: Tensor
    """[taps, T, H] float32 of all rows of the step."""
    path: Tensor
    """[16] int32: which of them stay, in order."""
    count: Tensor
    """[1] int32: how many."""
    picks: Tensor
    """[T] int32: the id behind each row."""


class Carried:
    """What the next tree of one sequence grows from: left by the walk down the tree before, or sent
    from the host.

    Args:
        taps: How many layers are tapped.
        hidden: Their width.
        device: Where all of it lies.
    """

    def __init__(self, taps: int, hidden: int, device: torch.device) -> None:
        self.taps = torch.zeros(taps, hidden, dtype=torch.float32, device=device)
        """[taps, H] float32 of the row that chose the root."""
        self.walked: WalkedRows | None = None
        """All rows of the step that was picked from last, until its shape runs again."""
        self._staged = Staged(
            {
                "root": (torch.int32, (1,)),
                "position": (torch.int32, (1,)),
                "seed": (torch.int64, (1,)),
                "inverse_t": (torch.float64, (1,)),
            },
            device,
        )
        there = self._staged.device
        self.root: Tensor = there["root"]
        """[1] int32, the token that was chosen last."""
        self.position: Tensor = there["position"]
        """[1] int32, of the token behind the root."""
        self.seed: Tensor = there["seed"]
        """[1] int64; -1 at temperature 0."""
        self.inverse_t: Tensor = there["inverse_t"]
        """[1] float64, 1 / temperature; 1 at temperature 0."""

    def send(
        self, taps: Tensor | None, root: int, position: int, *, temperature: float, seed: int
    ) -> None:
        """Set everything; returns at once. Without taps, for whoever does not read them."""
        here = self._staged.begin()
        here["root"][0], here["position"][0] = root, position
        here["seed"][0] = seed if temperature > 0 else -1
        here["inverse_t"][0] = 1 / temperature if temperature > 0 else 1
        self._staged.send()
        if taps is not None:
            self.taps.copy_(taps)
