"""Attention by others on the benchmark's data, each in its best form. Knows no kernel of ours.

Keys and values are contiguous, but for FlashInfer, and queries lie as a peer likes them: both in
its favour. Host planning is done when runs are built.
"""

# Not strict: much of torch has no full types.
# pyright: standard

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sessions.bench.measure import cuda_ms, work_of
from sessions.bench.shapes import Data, Shape

Run = Callable[[], Tensor]
TRIALS = 5


@dataclass(frozen=True, slots=True)
class Built:
    """One run for each copy of the data."""

    runs: list[Run]
    unpack: Callable[[Tensor], Tensor]
    """From what a run returns to out [N * R, HQ, D]; outside the time."""
    kernel: Callable[[], str] = str
    """What served the last run, as far as it is known."""


def standard(copies: Sequence[Data]) -> Built:
    """The score matrix written out, masked, its softmax, and the product with the values."""
    shape = copies[0].shape
    scale = shape.head_dim**-0.5
    hidden = None if shape.rows == 1 else ~_packed_mask(copies[0])

    def of(data: Data) -> Run:
        q, (keys, values) = _packed(data), data.contiguous

        def run() -> Tensor:
            scores = (q * scale) @ keys.transpose(-1, -2)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            return scores.softmax(-1) @ values

        return run

    return Built([of(data) for data in copies], lambda out: _unpacked(out, shape))


def sdpa(copies: Sequence[Data]) -> Built:
    """torch's scaled_dot_product_attention; on CUDA by its fastest kernel for this shape."""
    shape = copies[0].shape
    prompt = shape.kind == "prefill"
    options: dict[str, Any] = {}
    if prompt and shape.rows == shape.kv_len:
        options["is_causal"] = True
    elif shape.rows > 1:
        options["attn_mask"] = copies[0].seen if prompt else _packed_mask(copies[0])
    if prompt:
        options["enable_gqa"] = True

    def of(data: Data, kernel: SDPBackend | None) -> Run:
        q, (keys, values) = _by_head(data) if prompt else _packed(data), data.contiguous

        def run() -> Tensor:
            if kernel is None:
                return F.scaled_dot_product_attention(q, keys, values, **options)
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, keys, values, **options)

        return run

    kernel = None
    if shape.is_cuda:
        kernel = _fastest(shape.device, lambda kernel: of(copies[0], kernel))
    return Built(
        [of(data, kernel) for data in copies],
        lambda out: _joined(out) if prompt else _unpacked(out, shape),
        lambda: "" if kernel is None else kernel.name.lower().removesuffix("_attention"),
    )


def _fastest(device: str, of: Callable[[SDPBackend], Run]) -> SDPBackend:
    """The kernel whose captured calls take least; a call alone shows its launch, not its work."""
    times: dict[SDPBackend, float] = {}
    for kernel in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        run = of(kernel)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a kernel does not serve this
                work = work_of([run] * TRIALS, device)
                times[kernel] = min(cuda_ms(work.run) for _ in range(3))
        except RuntimeError:
            continue
    return min(times, key=lambda kernel: times[kernel], default=SDPBackend.MATH)


def flash_attn(copies: Sequence[Data]) -> Built:
    """FlashAttention 3, else 2, with a cache."""
    attend, name = _flash_function()

    def of(data: Data) -> Run:
        q = data.by_seq()
        keys, values = (part.transpose(1, 2) for part in data.contiguous)
        lengths = data.call.kv_len

        def run() -> Tensor:
            out, *_ = attend(
                q,
                keys,
                values,
                cache_seqlens=lengths,
                causal=True,
                num_splits=0,
                return_softmax_lse=True,
            )
            return out

        return run

    return Built([of(data) for data in copies], lambda out: out.flatten(0, 1), lambda: name)


def flash_absent(shape: Shape) -> str:
    """Why FlashAttention cannot serve this, or nothing."""
    if not any(map(find_spec, ("flash_attn_interface", "fa3_fwd_interface", "flash_attn"))):
        return "it is not installed"
    if not shape.is_cuda:
        return "it runs on CUDA only"
    return "it has no mask for a tree" if shape.kind == "tree" else ""


def _flash_function() -> tuple[Callable[..., Any], str]:
    if find_spec("flash_attn_interface"):
        from flash_attn_interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,
        )
    elif find_spec("fa3_fwd_interface"):
        from fa3_fwd_interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,
        )
    else:
        from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        return flash_attn_with_kvcache, "fa2"
    return flash_attn_with_kvcache, "fa3"


def flashinfer(copies: Sequence[Data]) -> Built:
    """FlashInfer over pages; a tree as a custom mask, which only its fa2 kernel takes."""
    from flashinfer import (  # pyright: ignore[reportMissingImports]
        BatchPrefillWithPagedKVCacheWrapper,
    )

    shape = copies[0].shape
    is_tree = shape.kind == "tree"
    options: dict[str, Any] = {"causal": True}
    if is_tree:
        options = {"custom_mask": copies[0].seen.flatten().repeat(shape.num_seqs)}
    space = torch.empty(128 << 20, dtype=torch.uint8, device=shape.device)

    def of(data: Data) -> Run:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            space, "HND", backend="fa2" if is_tree else "auto"
        )
        entries = data.table.shape[1]
        steps = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=shape.device)
        last = (shape.kv_len - 1) % shape.page_size + 1
        wrapper.plan(
            steps * shape.rows,
            steps * entries,
            data.table.flatten(),
            torch.full_like(steps[1:], last),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            q_data_type=data.q.dtype,
            **options,
        )
        return lambda: wrapper.run(data.q, data.pages)

    return Built([of(data) for data in copies], lambda out: out)


def flashinfer_absent(shape: Shape) -> str:
    """Why FlashInfer cannot serve this, or nothing."""
    if not find_spec("flashinfer"):
        return "it is not installed"
    return "" if shape.is_cuda else "it runs on CUDA only"


def flashinfer_slow() -> str:
    """Why it is left out unless it is named, or nothing."""
    if find_spec("flashinfer_jit_cache"):
        return ""
    return "its kernels are not compiled yet, which takes minutes; name it to do so"


def flex(copies: Sequence[Data]) -> Built:
    """FlexAttention, compiled for this shape, with a block mask."""
    shape = copies[0].shape
    attend, mask = _flex_parts(shape)

    def of(data: Data) -> Run:
        q, (keys, values) = _by_head(data), data.contiguous
        return lambda: attend(q, keys, values, block_mask=mask, enable_gqa=True)

    return Built([of(data) for data in copies], _joined)


def flex_absent(shape: Shape) -> str:
    """Why FlexAttention is not measured here, or nothing."""
    return "" if shape.is_cuda else "it is compiled for CUDA only here"


@lru_cache(maxsize=1)
def _flex_parts(shape: Shape) -> tuple[Callable[..., Tensor], Any]:
    """The compiled function and its mask, the same for all copies of a shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # it gives up after some shapes
    stored, last = shape.kv_len - shape.rows, shape.rows - 1
    new: Tensor | None = None
    if shape.kind == "tree":
        new = Data(shape, 0).seen[:, stored:]

    def visible(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        if new is None:
            return slot <= row + stored
        return (slot < stored) | new[row, (slot - stored).clamp(0, last)]

    mask = None
    if shape.rows > 1:
        mask = create_block_mask(visible, None, None, shape.rows, shape.kv_len, shape.device)
    return torch.compile(flex_attention, dynamic=False), mask


def _by_head(data: Data) -> Tensor:
    """q as [N, HQ, R, D]."""
    return data.by_seq().transpose(1, 2)


def _joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def _packed(data: Data) -> Tensor:
    """q as [N, HK, R * G, D]: the rows of one kv head side by side."""
    shape = data.shape
    q = data.by_seq().unflatten(2, (shape.num_kv_heads, shape.group))
    return q.transpose(1, 2).flatten(2, 3)


def _packed_mask(data: Data) -> Tensor:
    """[R * G, L] bool."""
    return data.seen.repeat_interleave(data.shape.group, dim=0)


def _unpacked(out: Tensor, shape: Shape) -> Tensor:
    rows = out.unflatten(2, (shape.rows, shape.group)).transpose(1, 2)
    return rows.flatten(2, 3).flatten(0, 1)
