"""Bytes between host memory and the device that holds the pages. Knows no page and no sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

BUFFERS = 4
"""Page images on their way to the device at once."""
Pending = Callable[[], bytes]
"""Bytes on their way to the host: waits for them. Called once, from any thread."""


class Staging:
    """The way to and from one device: plain copies on a CPU, pinned buffers for a CUDA device.

    Copies to the device are ordered with the work of the current stream; nobody waits for them.
    Copies from it leave on a stream of their own, behind the work given so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []
        self._next = 0
        self._leaving = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, views: Sequence[Tensor]) -> Pending:
        """The bytes of uint8 views, one behind the other, as they are now whatever is written
        next."""
        if self._leaving is None:
            payload = b"".join(rows.numpy().tobytes() for rows in views)
            return lambda: payload
        # Copied in order with the current stream's work, also where they lie in one piece; only the
        # slow way to the host is left to the other stream.
        rows = torch.cat([view.flatten() for view in views])
        buffer = torch.empty(rows.numel(), dtype=torch.uint8, pin_memory=True)
        self._leaving.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._leaving):
            buffer.copy_(rows, non_blocking=True)
            rows.record_stream(self._leaving)
            done = self._leaving.record_event()

        def wait() -> bytes:
            done.synchronize()
            return buffer.numpy().tobytes()

        return wait

    def write(self, payload: bytes | memoryview, views: Sequence[Tensor]) -> None:
        """Put as many bytes as the uint8 views hold into them, one behind the other."""
        source = np.frombuffer(payload, dtype=np.uint8)
        sizes = [rows.numel() for rows in views]
        if self.device.type == "cpu":
            for rows, part in zip(views, np.split(source, np.cumsum(sizes)[:-1]), strict=True):
                rows.numpy()[...] = part.reshape(rows.shape)
            return
        buffer, done = self._buffer(source.size)
        buffer.numpy()[...] = source
        parts = torch.split(buffer.to(self.device, non_blocking=True), sizes)
        for rows, part in zip(views, parts, strict=True):
            rows.copy_(part.view(rows.shape))
        done.record()

    def _buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned bytes that no copy is using any more, and the event to record behind the next."""
        place, self._next = self._next, (self._next + 1) % BUFFERS
        if place == len(self._buffers):
            room = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._buffers.append((room, torch.cuda.Event()))
        room, done = self._buffers[place]
        done.synchronize()
        if room.numel() < size:
            room = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._buffers[place] = (room, done)
        return room[:size], done
