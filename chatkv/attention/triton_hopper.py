"""What a Hopper device can do for a call, and how `triton_wide.attend_wide` is launched there."""

# Launches take options that the decorated function does not name.
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.attention.triton_launch import WIDE_ROWS

WIDE_TILE = 64
RING = 160 * 1024
"""Bytes of keys and values in shared memory."""


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device; (0, 0) of another."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels can start before the one they depend on has ended: Hopper and later."""
    return capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether it has the products that `attend_wide` is written for; no later device has them."""
    return capability(device) == (9, 0)


def can_be_wide(call: AttentionCall, q: Tensor, pages: Tensor, tile: int) -> bool:
    """Whether `attend_wide` may serve a call: stored as q, whole tiles, no hole, no window."""
    return (
        is_hopper(q.device)
        and pages.dtype == q.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in (64, 128)
        and tile == WIDE_TILE
        and pages.shape[3] % tile == 0
        and pages.is_contiguous()
        and pages.numel() // pages.shape[-1] < 2**31
        and call.valid is None
        and call.window is None
    )


def attend_wide(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    sequences: Tensor,
    limits: Tensor,
    partials: tuple[Tensor, Tensor, Tensor],
    factor: float,
    rows: int,
    parts: int,
    **options: Any,
) -> None:
    """Write the partial softmaxes of a call that `can_be_wide`.

    Args:
        rows: (row, query head) pairs of the longest sequence under one kv head.
        parts: Most parts of a sequence.
        options: What the kernel shares with `attend_past`.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from chatkv.attention import triton_wide

    head_dim = q.shape[-1]
    box = [WIDE_TILE, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    pairs = sequences.shape[0] * pages.shape[2]
    blocks = triton.cdiv(rows, WIDE_ROWS)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    triton_wide.attend_wide[(min(processors, blocks * pairs * parts),)](
        q,
        TensorDescriptor.from_tensor(pages.view(-1, head_dim), box, layout),
        page_table,
        sequences,
        limits,
        *partials,
        factor,
        page_table.shape[1],
        partials[0].shape[1],
        q.stride(0),
        blocks,
        pairs,
        STAGES=RING // (4 * WIDE_TILE * head_dim),
        num_warps=4,
        **options,
    )
