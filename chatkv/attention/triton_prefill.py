"""Attention of one prompt chunk on a CUDA device, by a library. Knows one sequence and its history.

The chunk against its own keys is a causal square, against the stored history it is full; both
return their LSE and are joined row by row. So a library needs no mask but that of a square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.attention.reference import dequantise

Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""(q, k, v [1, heads, rows, D], is_causal, scale) to out of q's shape and LSE [1, HQ, rows]."""


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    entries: Tensor,
    start: int,
    num_rows: int,
    *,
    scales: Tensor | None = None,
    library: str | None = None,
) -> Tensor:
    """Attend a chunk of C rows, of which the first `num_rows` are real, to its history and itself.

    Args:
        q: [C, HQ, D] float16 or bfloat16 (float32 by `math` only), rotated.
        k, v: [C, HK, D], the chunk's own keys and values. Rows from num_rows on may hold anything.
        pages: [P, 2, HK, S, D] of one layer. Slots from `start` on are not used.
        entries: [>= ceil(start / S)] int32 page ids.
        start: Slot of the first row.
        num_rows: Real rows, 1 to C.
        scales: Of quantised pages.
        library: One of `LIBRARIES`; the first that works here by default.

    Returns:
        out: [C, HQ, D]; rows from num_rows on are undefined, and finite if q is.

    A row's bits are a function of (C, start, its own history): what follows it in the chunk changes
    nothing.
    """
    run = LIBRARIES[library or library_for(q.device, q.dtype, q.shape[-1])]
    scale = q.shape[-1] ** -0.5
    queries = q.transpose(0, 1)[None]
    real = torch.arange(len(q), device=q.device) < num_rows
    own = torch.where(real[:, None, None, None], torch.stack([k, v], dim=1), 0)
    keys, values = own.permute(1, 2, 0, 3)[:, None]
    out, lse = run(queries, keys, values, True, scale)
    if start:
        table = entries[: -(-start // pages.shape[3])].long()
        stored = dequantise(pages[table], None if scales is None else scales[table], q.dtype)
        keys, values = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :start]
        past, past_lse = run(queries, keys, values, False, scale)
        joint = torch.logaddexp(lse, past_lse)
        out = out.float() * (lse - joint).exp()[..., None]
        out = out.addcmul_(past.float(), (past_lse - joint).exp()[..., None]).to(q.dtype)
    return out[0].transpose(0, 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _flashinfer(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    from flashinfer import single_prefill_with_kv_cache  # pyright: ignore[reportMissingImports]

    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v)]
    out, lse = single_prefill_with_kv_cache(
        *rows, causal=is_causal, sm_scale=scale, return_lse=True
    )
    # Base 2, [rows, HQ].
    return out.transpose(0, 1)[None], (lse * torch.log(torch.tensor(2.0))).T[None]


def _math(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if is_causal:
        rows = q.shape[2]
        above = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return F.softmax(scores, -1).to(q.dtype) @ v, scores.logsumexp(-1)


LIBRARIES: dict[str, Attend] = {
    "flashinfer": _flashinfer,
    "cudnn": _cudnn,
    "flash": _flash,
    "math": _math,
}
"""In order of preference."""


@cache
def library_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The first library that serves a small chunk here.

    FlashInfer only with its compiled kernels: without them it would compile for minutes in a chat.
    """
    q = torch.zeros(1, 2, 16, head_dim, dtype=dtype, device=device)
    for name, run in LIBRARIES.items():
        if name == "flashinfer" and not find_spec("flashinfer_jit_cache"):
            continue
        try:
            run(q, q[:, :1], q[:, :1], True, 1.0)
            run(q, q[:, :1, :8], q[:, :1, :8], False, 1.0)
        except (RuntimeError, NotImplementedError, ImportError):
            continue
        return name
    raise AssertionError(f"not even torch's own product works on {device} in {dtype}")
