"""Heads times one orthogonal matrix: what a few large channels hold is spread over all of them.

Knows rows of one head; no pages and no codes. QuaRot (Ashkboos et al., 2024): where queries and
keys are both multiplied, scores are what they were, and rounded keys lose less.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(rows: Tensor) -> Tensor:
    """[..., D] float32 rows times a symmetric orthogonal matrix: twice, they are what they were.

    With B the largest power of two that divides D / 2, channels are mixed in sets of 2 B: the same
    B neighbours of both halves of a head. Where D is a power of two, the matrix is Sylvester's over
    the root of D. Sums have a fixed order: halves first, then channels 1, 2, ... B / 2 apart.
    """
    half = rows.shape[-1] // 2
    block = half & -half
    for step in (half, *(1 << i for i in range(block.bit_length() - 1))):
        a, b = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack([a + b, a - b], -2).flatten(-3)
    return rows * (2 * block) ** -0.5
