"""Numbers that go to the device in one transfer: numpy arrays on this side, tensors on that.

Knows names, shapes and places. Knows not what the numbers mean.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGN = 256
"""Bytes. Kernels are compiled for aligned pointers."""

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name -> (dtype, shape)."""

_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float64: np.float64}


def places_of(fields: Fields) -> tuple[dict[str, int], int]:
    """Where each field begins in a block that holds them all, and how long that is, in bytes."""
    places: dict[str, int] = {}
    size = 0
    for name, (dtype, shape) in fields.items():
        places[name] = size
        size += -(-prod(shape) * dtype.itemsize // ALIGN) * ALIGN
    return places, size


class Staged:
    """One block of memory on each side, seen through named arrays.

    Args:
        fields: What there is, in this order.
        device: Where the block goes. On a CPU both sides are the same memory.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        places, size = places_of(fields)
        is_cuda = device.type == "cuda"
        self._source = torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        if not is_cuda:
            self._target = self._source
        # Looked up once: it is the same at every step, and asking takes longer than sending.
        self.stream = torch.cuda.current_stream(device) if is_cuda else None
        self._sent = torch.cuda.Event() if is_cuda else None
        self.host: dict[str, np.ndarray] = {}
        """Written by the caller between `begin` and `send`."""
        self.device: dict[str, Tensor] = {}
        """Read by kernels behind `send`."""
        for name, (dtype, shape) in fields.items():
            stop = places[name] + prod(shape) * dtype.itemsize
            piece = self._source[places[name] : stop].numpy()
            self.host[name] = piece.view(_DTYPES[dtype]).reshape(shape)
            self.device[name] = self._target[places[name] : stop].view(dtype).view(shape)

    def begin(self) -> dict[str, np.ndarray]:
        """The arrays to write, once the last transfer no longer reads them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.host

    def send(self) -> None:
        """Send everything, in order with the current stream; returns at once."""
        self.copy()
        self.mark()

    def copy(self, front: Tensor | None = None) -> None:
        """`send` for a graph, without what a graph cannot hold: `mark` comes behind it.

        Args:
            front: [bytes] uint8, already on the device: taken for the first fields instead of what
                was written here.
        """
        start = 0 if front is None else len(front)
        if front is not None:
            self._target[:start].copy_(front)
        if self._sent is not None:
            self._target[start:].copy_(self._source[start:], non_blocking=True)

    def mark(self) -> None:
        """From here on `begin` waits until the device has come to this point."""
        if self._sent is not None:
            self._sent.record(self.stream)

    def wait(self) -> None:
        """Return when the device has done all that it was given."""
        if self.stream is not None:
            self.stream.synchronize()
