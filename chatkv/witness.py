"""Proof that stored pages still mean what they meant: the logits their last row gave.

Knows logits; no page and no file. After a restore the row is computed again; an exact backend must
give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from chatkv.kv.store import Snapshot

TOP = 8


@dataclass(frozen=True, slots=True)
class Witness:
    """What one row of logits leaves behind."""

    digest: bytes
    """16 bytes: BLAKE2b of the float32 bytes."""
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]

    @staticmethod
    def of(logits: npt.NDArray[np.float32]) -> Witness:
        """Of [V] float32 logits; best first, lower id first among equals."""
        best = np.argpartition(-logits, TOP)[: TOP + 1]
        order = sorted(best.tolist(), key=lambda token: (-float(logits[token]), token))[:TOP]
        data = np.ascontiguousarray(logits, dtype="<f4").tobytes()
        return Witness(
            digest=blake2b(data, digest_size=16, person=b"chatkv.logits").digest(),
            top_ids=tuple(order),
            top_values=tuple(float(logits[token]) for token in order),
        )

    def snapshot(self, head_key: bytes, num_tokens: int, backend: str) -> Snapshot:
        """The record that stands behind the page `head_key`."""
        return Snapshot(head_key, num_tokens, self.digest, self.top_ids, self.top_values, backend)

    def agrees(self, snapshot: Snapshot) -> bool:
        """Whether an exact backend computed the same row: the same bits."""
        return self.digest == snapshot.logits_hash
