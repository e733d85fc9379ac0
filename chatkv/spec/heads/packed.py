"""Weights of a head in eight bits: blocks of 32 inputs with a scale each. Knows tensors only.

It is the layout of Q8_0, which a CPU computes with: packing there loses nothing more.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
SCALE = ".scale"
"""What the name of a matrix's scales ends in."""


def fits(weight: Tensor) -> bool:
    """Whether a weight is a matrix, or several, of whole blocks."""
    return weight.dim() >= 2 and weight.shape[-1] % BLOCK == 0


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] int8 codes and [..., K / 32] float16 scales of a weight [..., K]."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    codes = (blocks * inverse[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(-2), scales


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., K] float32."""
    return (codes.float().unflatten(-1, (-1, BLOCK)) * scales.float()[..., None]).flatten(-2)
