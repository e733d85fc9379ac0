"""Messages between the front and the engine's process: four bytes of length, then JSON.

Knows bytes and JSON values only.
"""

from __future__ import annotations

import json
import struct
import threading
from typing import IO, Any, cast

LIMIT_BYTES = 64 << 20
"""A longer frame is a bug or a foreign program writing to the pipe."""

PROTOCOL = 1
"""Front and engine refuse each other when theirs differ."""


class FrameError(Exception):
    """Bytes that are no frame."""


class FrameWriter:
    """Writes whole frames; safe from several threads."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, value: dict[str, Any]) -> None:
        """Write one frame. Raises OSError or ValueError when the other side is gone."""
        data = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
        if len(data) > LIMIT_BYTES:
            raise FrameError(f"A frame of {len(data)} bytes; the limit is {LIMIT_BYTES}.")
        with self._lock:
            self._stream.write(struct.pack("<I", len(data)) + data)
            self._stream.flush()


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next frame, or None at the end of the stream.

    Raises:
        FrameError: The stream ended inside a frame, or holds something else.
    """
    head = _exactly(stream, 4)
    if head is None:
        return None
    (size,) = struct.unpack("<I", head)
    if size > LIMIT_BYTES:
        raise FrameError(f"A frame of {size} bytes; the limit is {LIMIT_BYTES}.")
    data = _exactly(stream, size)
    if data is None:
        raise FrameError("The stream ended inside a frame.")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise FrameError("A frame that is no object.")
    return cast("dict[str, Any]", value)


def _exactly(stream: IO[bytes], size: int) -> bytes | None:
    parts: list[bytes] = []
    left = size
    while left:
        part = stream.read(left)
        if not part:
            if parts:
                raise FrameError("The stream ended inside a frame.")
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
