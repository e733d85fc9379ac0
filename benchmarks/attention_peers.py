"""Other people's attention on the benchmark's data, each in its best form. Knows no kernel of ours.

Contiguous peers read keys and values without pages, which is in their favour. A missing library is
left out. Host planning is done when a run is made, outside the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Run = Callable[[], Tensor]
"""One call; returns out [T, HQ, D]."""


@dataclass(frozen=True, slots=True)
class Data:
    """One rotated copy of a shape's tensors, paged and contiguous."""

    q: Tensor
    """[B * R, HQ, D]."""
    pages: Tensor
    """[P, 2, HK, S, D]."""
    table: Tensor
    """[B, M] int32."""
    lengths: Tensor
    """[B] int32 on the device, new rows counted."""
    host_lengths: tuple[int, ...]
    rows: int
    """R."""
    seen: Tensor
    """[R, R] bool: the tree."""

    @property
    def batch(self) -> int:
        return len(self.host_lengths)

    def contiguous(self) -> Tensor:
        """Keys and values [2, B, L, HK, D]."""
        found = self.pages[self.table.long()]
        return found.permute(2, 0, 1, 4, 3, 5).flatten(2, 3)[:, :, : max(self.host_lengths)]

    def mask(self) -> Tensor:
        """[B, R, L] bool."""
        longest = max(self.host_lengths)
        slot = torch.arange(longest, device=self.q.device)
        mask = torch.zeros(self.batch, self.rows, longest, dtype=torch.bool, device=self.q.device)
        for n, length in enumerate(self.host_lengths):
            mask[n] = slot < length - self.rows
            mask[n, :, length - self.rows : length] = self.seen
        return mask


def sdpa_tree(data: Data) -> Run:
    """torch's SDPA with a mask, on keys and values gathered beforehand."""
    keys, values = data.contiguous().transpose(2, 3)
    mask = data.mask()[:, None]
    q = data.q.unflatten(0, (data.batch, data.rows)).transpose(1, 2)

    def run() -> Tensor:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def flex_tree(data: Data) -> Run:
    """FlexAttention with a block mask, compiled, on keys and values gathered beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keys, values = data.contiguous().transpose(2, 3).contiguous()
    seen, rows, lengths = data.seen, data.rows, data.lengths
    q = data.q.unflatten(0, (data.batch, rows)).transpose(1, 2)

    def visible(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        new = slot - (lengths[b] - rows)
        return (new < 0) | ((new < rows) & seen[row, new.clamp(0, rows - 1)])

    mask = create_block_mask(
        visible, data.batch, None, rows, keys.shape[2], device=str(q.device), _compile=True
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        out: Any = compiled(q, keys, values, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def flashinfer_tree(data: Data) -> Run:
    """FlashInfer's FA2 kernel over pages with a custom mask."""
    masks = data.mask()
    flat = [masks[n, :, :length].reshape(-1) for n, length in enumerate(data.host_lengths)]
    return _flashinfer(data, custom_mask=torch.cat(flat))


def flashinfer_chain(data: Data) -> Run:
    """The same without a tree."""
    return _flashinfer(data, causal=True)


def _flashinfer(data: Data, **options: Any) -> Run:
    from flashinfer import (  # pyright: ignore[reportMissingImports]
        BatchPrefillWithPagedKVCacheWrapper,
    )

    device = data.q.device
    size = data.pages.shape[3]
    used = [-(-length // size) for length in data.host_lengths]
    indptr = torch.tensor([0, *used], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.cat([data.table[n, :count] for n, count in enumerate(used)])
    last = torch.tensor([(length - 1) % size + 1 for length in data.host_lengths])
    space = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend="fa2")
    starts = torch.arange(0, (data.batch + 1) * data.rows, data.rows, dtype=torch.int32)
    wrapper.plan(
        starts.to(device),
        indptr.to(device),
        indices,
        last.int().to(device),
        data.q.shape[1],
        data.pages.shape[2],
        data.q.shape[2],
        size,
        q_data_type=data.q.dtype,
        **options,
    )
    return lambda: wrapper.run(data.q, data.pages)


def fa3_chain(data: Data) -> Run:
    """FlashAttention-3 over contiguous keys and values; it has no tree."""
    return _fa3(data, causal=True, shorter=0)


def fa3_history(data: Data) -> Run:
    """FlashAttention-3 over the stored part alone, with LSE: the first of two calls for a tree."""
    return _fa3(data, causal=False, shorter=data.rows)


def _fa3(data: Data, *, causal: bool, shorter: int) -> Run:
    attend = _fa3_function()
    keys, values = data.contiguous().contiguous()
    q = data.q.unflatten(0, (data.batch, data.rows))
    lengths = data.lengths - shorter

    def run() -> Tensor:
        out, *_ = attend(
            q,
            keys,
            values,
            cache_seqlens=lengths,
            causal=causal,
            num_splits=0,
            return_softmax_lse=True,
        )
        return out.flatten(0, 1)

    return run


def fa3_two_call(data: Data) -> Run:
    """FlashAttention-3 over the stored part, FlashInfer over the new rows, and its merge.

    The stored part's LSE would have to be transposed and brought to base 2: left out, in the
    peer's favour, so the result is not a right one.
    """
    from flashinfer import (  # pyright: ignore[reportMissingImports]
        BatchPrefillWithRaggedKVCacheWrapper,
        merge_state,
    )

    attend = _fa3_function()
    both = data.contiguous().contiguous()
    q, rows, device = data.q.unflatten(0, (data.batch, data.rows)), data.rows, data.q.device
    new = torch.stack(
        [both[:, n, length - rows : length] for n, length in enumerate(data.host_lengths)], dim=1
    )
    own_keys, own_values = new.flatten(1, 2).contiguous()
    keys, values = both
    lengths = data.lengths - rows
    space = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend="fa2")
    starts = torch.arange(0, (data.batch + 1) * rows, rows, dtype=torch.int32, device=device)
    wrapper.plan(
        starts,
        starts,
        q.shape[2],
        own_keys.shape[1],
        q.shape[3],
        custom_mask=data.seen.reshape(-1).repeat(data.batch),
        q_data_type=q.dtype,
    )

    past_lse = torch.zeros(data.q.shape[:2], dtype=torch.float32, device=device)

    def run() -> Tensor:
        past, *_ = attend(
            q,
            keys,
            values,
            cache_seqlens=lengths,
            causal=False,
            num_splits=0,
            return_softmax_lse=True,
        )
        own, own_lse = wrapper.run(data.q, own_keys, own_values, return_lse=True)
        out, _ = merge_state(past.flatten(0, 1), past_lse, own, own_lse)
        return out

    return run


def _fa3_function() -> Callable[..., Any]:
    if find_spec("flash_attn_interface"):
        from flash_attn_interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,
        )
    else:
        from fa3_fwd_interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,
        )
    return flash_attn_with_kvcache


READY: dict[str, Callable[[Data], Run]] = {
    "SDPA": sdpa_tree,
    "FA3 chain": fa3_chain,
    "FA3 history": fa3_history,
}
COMPILED: dict[str, Callable[[Data], Run]] = {
    "FlashInfer tree": flashinfer_tree,
    "FA3 two-call": fa3_two_call,
    "FlashInfer chain": flashinfer_chain,
    "FlexAttention": flex_tree,
}
"""Compiled for minutes on their first use: see `compile_all`."""
ALL = {**COMPILED, **READY}
TREE = ("FlashInfer tree", "FA3 two-call", "SDPA", "FlexAttention")
"""Those that take a tree."""
FLEX_SHAPES = ("llama-3-8b B1 16384 T16",)
"""It is compiled for each shape."""


def compile_all() -> None:
    """Run each peer of COMPILED once where it has not been compiled, into the library's cache."""
    from benchmarks.attention_shapes import HEADS, TUNED, Shape
    from benchmarks.attention_timing import make_copy

    for model in HEADS:
        data = make_copy(Shape(model, (300, 300), 16))[1]
        for build in (flashinfer_tree, flashinfer_chain, fa3_two_call):
            _try(build, data)
    for shape in TUNED:
        if shape.name in FLEX_SHAPES:
            _try(flex_tree, make_copy(shape)[1])


def _try(build: Callable[[Data], Run], data: Data) -> None:
    try:
        build(data)()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 (the benchmark says what is missing)
        print(f"{build.__name__}: {type(error).__name__}: {error}"[:2000], flush=True)
