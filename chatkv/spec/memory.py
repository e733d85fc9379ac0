"""What the controller knows from earlier runs: a small file for each model, device and backend.

Knows a path and JSON; not what the numbers mean. The file is a cache: what cannot be read, or was
written by another version, is as good as none.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any, cast

FORMAT = 3
INTERVAL_S = 60.0
"""Between two writes, but for the last one."""


class DraftMemory:
    """A file of one engine's kind.

    Args:
        folder: Where such files are; made when something is written.
        kind: All that hit rates and costs depend on.
    """

    def __init__(self, folder: Path, kind: Mapping[str, object]) -> None:
        name = json.dumps({"format": FORMAT, **kind}, sort_keys=True, default=str)
        self.path = folder / f"{blake2b(name.encode(), digest_size=12).hexdigest()}.json"
        self._saved = monotonic()

    def load(self) -> dict[str, Any]:
        """What was saved; empty if there is nothing whole."""
        try:
            check, _, body = self.path.read_text(encoding="utf-8").partition("\n")
            found: object = json.loads(body) if check == _check(body) else None
        except (OSError, ValueError):
            return {}
        return cast(dict[str, Any], found) if isinstance(found, dict) else {}

    def save(self, known: Callable[[], Mapping[str, object]], *, now: bool = False) -> None:
        """Write it, but not too often; a disk that is full or read-only is no reason to fail."""
        if not now and monotonic() - self._saved < INTERVAL_S:
            return
        self._saved = monotonic()
        body = json.dumps(known(), allow_nan=False)
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(f"{_check(body)}\n{body}", encoding="utf-8")
            part.replace(self.path)
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _check(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
