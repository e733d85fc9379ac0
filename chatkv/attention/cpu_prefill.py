"""Attention of one prompt chunk on the CPU, through torch's own kernel.

Knows one sequence, its stored history and the chunk's own keys. A row's bits are not those of the
step kernel, but a function of the chunk's shape and of the row's own history: the shape of the call
never depends on how much of the chunk is real, and a key that is masked weighs exactly 0.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, entries: Tensor, start: int, num_rows: int
) -> Tensor:
    """Attend a chunk of C rows, the first `num_rows` of them real, to what is stored and to itself.

    Args:
        q: [C, HQ, D] bfloat16 or float32, rotated.
        k, v: [C, HK, D], the chunk's own keys and values. Rows from num_rows on may hold anything.
        pages: [P, 2, HK, S, D] of one layer. Slots from `start` on are not used.
        entries: [>= ceil(start / S)] int32 page ids.
        start: Slot of the first row.
        num_rows: Real rows, 1 to C.

    Returns:
        out: [C, HQ, D]; rows from num_rows on are undefined.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, size = k.shape[1], pages.shape[3]
    group = num_heads // num_kv_heads
    both = torch.empty((2, num_kv_heads, start + rows, head_dim), dtype=q.dtype)
    history = pages[entries[: -(-start // size)].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)
    both[:, :, :start] = history[:, :, :start]
    # A weight of 0 times NaN is NaN: what fills the chunk has to be finite.
    both[:, :, start + num_rows :] = 0
    for own, rows_of in zip((k, v), both, strict=True):
        rows_of[:, start : start + num_rows] = own[:num_rows].transpose(0, 1)
    # Heads that share keys become rows, so that a key is read once for all of them.
    queries = q.view(rows, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    out = F.scaled_dot_product_attention(
        queries[None], both[:1], both[1:], attn_mask=_causal_mask(rows, group, start, q.dtype)
    )
    out = out[0].unflatten(1, (rows, group)).transpose(0, 1)
    return out.reshape(rows, num_heads, head_dim)


@lru_cache(maxsize=2)
def _causal_mask(rows: int, group: int, start: int, dtype: torch.dtype) -> Tensor:
    """[rows * group, start + rows]: 0 where a row sees a key, else -inf. Kept for more layers."""
    mask = torch.full((rows, start + rows), -torch.inf, dtype=dtype).triu(start + 1)
    return mask.repeat_interleave(group, 0)
