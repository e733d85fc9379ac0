"""The target's own noise of the draft ids, at the positions a tree's depths stand for."""

# Kernel bodies are not Python to a type checker.
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv import noise
from chatkv.sampling_triton_math import gumbel


def draft_noise(seeds: Tensor, positions: Tensor, draft_ids: Tensor, out: Tensor) -> None:
    """out [N, depth, K] float32: noise of id k at position + depth index.

    Args:
        seeds: [N] int64; -1 asks for no noise.
        positions: [N] int32, of the token behind the root.
        draft_ids: [K] int64.
    """
    rows, depth, width = out.shape
    _noise[(rows * depth, triton.cdiv(width, 1024))](
        seeds, positions, draft_ids, out, depth, width, BLOCK=1024, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def draft_noise_plain(seeds: Tensor, positions: Tensor, draft_ids: Tensor, out: Tensor) -> None:
    ids = draft_ids.cpu().numpy()
    for row, (seed, first) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for depth in range(out.shape[1]):
            if seed < 0:
                out[row, depth] = 0
            else:
                out[row, depth] = torch.from_numpy(noise.gumbel(seed, first + depth, ids))


@triton.jit
def _noise(seeds, positions, ids, out, depth, width, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    row = line // depth
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    seed = tl.load(seeds + row)
    position = (tl.load(positions + row) + (line % depth).to(tl.int32)).to(tl.uint32)
    token = tl.load(ids + at, mask=inside, other=0).to(tl.int32)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    drawn = tl.where(seed < 0, 0.0, gumbel(token, position, key0, key1))
    tl.store(out + line * width + at, drawn, mask=inside)
