"""Keys at other positions: a stored page turned once, by the whole way, in float32.

A key turned twice drifts; so the page with the keys as first computed is kept, and whatever
positions its rows come to, they are made from that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.attention.hadamard import hadamard
from chatkv.attention.reference import dequantise
from chatkv.attention.store import quantise
from chatkv.kv.pool import PagePool


def turn_page(
    pool: PagePool, src: int, dst: int, shift: int, frequencies: npt.NDArray[np.float64]
) -> None:
    """Make `dst` the page that `src` would be had its rows stood `shift` positions earlier.

    Args:
        pool: Of both; `dst` has one holder.
        shift: Positions, below 0 for later ones.
        frequencies: [D / 2] radians a position of channel pairs (i, i + D / 2).
    """
    pool.copy_into(src, dst)
    for rows in pool.tensors:
        if pool.scales is None or (rows is not pool.data and rows is not pool.scales):
            rows[:, dst, 0] = turn_back(rows[:, src, 0].float(), shift, frequencies).to(rows.dtype)
    if pool.scales is None:
        return
    keys = dequantise(pool.data[:, src, 0], pool.scales[:, src, 0], torch.float32)
    keys = hadamard(turn_back(hadamard(keys), shift, frequencies))
    codes, scales = quantise(keys, pool.data.dtype)
    pool.data[:, dst, 0] = codes
    pool.scales[:, dst, 0] = scales.to(pool.scales.dtype)


def turn_back(keys: Tensor, shift: int, frequencies: npt.NDArray[np.float64]) -> Tensor:
    """[..., D] float32 keys as they are `shift` positions earlier."""
    angles = torch.as_tensor(shift * frequencies)
    # On the host and rounded once, as the angles of new rows are.
    cos, sin = angles.cos().float().to(keys.device), angles.sin().float().to(keys.device)
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
