"""Long repeats in an answer, which flatter every drafter. Knows ids alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

REPEAT = 16
"""A token that continues this many tokens seen before is part of a long repeat."""


def has_repeats(ids: npt.NDArray[np.int32], first: int, stop: int) -> bool:
    """Whether a token of the answer continues a repeat of `REPEAT` tokens."""
    seen: set[bytes] = set()
    for end in range(REPEAT, stop):
        # The window before a token of the answer, that token included.
        window = ids[end - REPEAT : end + 1].tobytes()
        if end >= first and window in seen:
            return True
        seen.add(window)
    return False
