"""The row kernels of a pass, by device: fused ones, or their plain versions on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chatkv.models import fused_triton as fused
from chatkv.models import heads_triton

HEADS = 8
"""Heads of one program that rotates: with thousands of rows, one each would be many small ones."""


@dataclass(frozen=True, slots=True)
class RowKernels:
    """What lies between the products of a pass; signatures as in `fused_triton.py`."""

    embed: Callable[..., Any]
    norm: Callable[..., Any]
    rotate: Callable[..., Any]
    gate: Callable[..., Any]


def kernels_for(device: torch.device) -> RowKernels:
    """The kernels that run there."""
    if device.type == "cpu":
        return RowKernels(
            fused.embed_rows_plain,
            fused.norm_rows_plain,
            heads_triton.rotate_rows_plain,
            fused.gate_rows_plain,
        )
    rotate = partial(heads_triton.rotate_rows, heads_a_program=HEADS)
    return RowKernels(fused.embed_rows, fused.norm_rows, rotate, fused.gate_rows)
