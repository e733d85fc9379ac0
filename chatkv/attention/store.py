"""Rows into pages, rows between slots, pages onto pages. Knows layouts and codes, no owners.

A physical slot is page id * S + offset, int64. Fast versions stand beside plain torch ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chatkv.attention.call import FLOATS, INT4_GROUP
from chatkv.attention.jit import njit

CODE_LIMIT = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.uint8: 7}
LARGEST_SCALE = 65504.0


def write_rows(k: Tensor, v: Tensor, pages: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    """Store new rows of one layer.

    Args:
        k, v: [T, HK, D] in q's dtype.
        pages: [P, 2, HK, S, D] ([..., D / 2] uint8 for int4), modified.
        scales: [P, 2, HK, S, C] for quantised pages, modified; else None.
        slots: [T] int64 physical, distinct; -1 writes nothing.
    """
    if not (pages.dtype == k.dtype == v.dtype and _is_plain_memory(pages, slots)):
        write_rows_plain(k, v, pages, scales, slots)
        return
    _write_bytes(_bytes(k.contiguous()), _bytes(v.contiguous()), _bytes(pages), slots.numpy())


def write_rows_plain(
    k: Tensor, v: Tensor, pages: Tensor, scales: Tensor | None, slots: Tensor
) -> None:
    """`write_rows` in plain torch, for every dtype and device."""
    rows = torch.stack([k, v], dim=1)[slots >= 0]
    slots = slots[slots >= 0]
    page, offset = slots // pages.shape[3], slots % pages.shape[3]
    if pages.dtype in FLOATS:
        pages[page, :, :, offset] = rows.to(pages.dtype)
        return
    codes, row_scales = quantise(rows, pages.dtype)
    pages[page, :, :, offset] = codes
    assert scales is not None, f"{pages.dtype} pages have no scales"
    scales[page, :, :, offset] = row_scales.to(scales.dtype)


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows: value = code * scale, each slot and head for itself.

    Args:
        rows: [..., D] float.
        dtype: int8 or float8_e4m3fn (one scale a row), or uint8 for int4 (one per 32 channels).

    Returns:
        codes: [..., D] in `dtype`; for int4 [..., D / 2] uint8, low nibble channel d, high nibble
            channel d + D / 2.
        scales: [..., C] float16, largest magnitude over largest code. Zeros get scale 0.
    """
    limit = CODE_LIMIT[dtype]
    group = INT4_GROUP if dtype == torch.uint8 else rows.shape[-1]
    grouped = rows.float().unflatten(-1, (-1, group))
    scales = (grouped.abs().amax(-1) / limit).clamp(max=LARGEST_SCALE).half()
    # The stored scale decides the code, so that reading gives back what was meant.
    divisor = torch.where(scales > 0, scales, torch.inf).float()[..., None]
    codes = (grouped / divisor).flatten(-2).clamp(-limit, limit)
    if dtype == torch.float8_e4m3fn:
        return codes.to(dtype), scales
    codes = codes.round()
    if dtype == torch.int8:
        return codes.to(dtype), scales
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scales


def compact(pages: Tensor, scales: Tensor | None, src: Tensor, dst: Tensor) -> None:
    """Move rows of all layers to other slots, bit for bit. Sources are read before any is written.

    Args:
        pages: [L, P, 2, HK, S, D], modified.
        scales: [L, P, 2, HK, S, C] or None, modified.
        src, dst: [R] int64 physical slots; dst distinct.
    """
    if src.numel() == 0:
        return
    if pages.device.type == "cuda":
        # Imported here: not every machine has Triton.
        from chatkv.attention import triton_store

        slots = torch.stack([src, dst])
        if slots.device.type == "cpu":
            slots = slots.pin_memory().to(pages.device, non_blocking=True)
        triton_store.compact(pages, scales, slots[0], slots[1])
        return
    for tensor in (pages, scales):
        if tensor is None:
            continue
        if _is_plain_memory(tensor, src):
            _move_bytes(_bytes(tensor), src.numpy(), dst.numpy())
        else:
            _compact_plain(tensor, src, dst)


def compact_plain(pages: Tensor, scales: Tensor | None, src: Tensor, dst: Tensor) -> None:
    """`compact` in plain torch, for every dtype and device."""
    _compact_plain(pages, src, dst)
    if scales is not None:
        _compact_plain(scales, src, dst)


def _compact_plain(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    size = pages.shape[4]
    rows = pages[:, src // size, :, :, src % size].clone()
    pages[:, dst // size, :, :, dst % size] = rows


def copy_page(pages: Tensor, scales: Tensor | None, src: int, dst: int) -> None:
    """Copy page `src` onto page `dst` in all layers, bit for bit.

    Args:
        pages: [L, P, 2, HK, S, D], modified.
        scales: [L, P, 2, HK, S, C] or None, modified.
        src, dst: Page ids.
    """
    pages[:, dst].copy_(pages[:, src])
    if scales is not None:
        scales[:, dst].copy_(scales[:, src])


def _is_plain_memory(pages: Tensor, slots: Tensor) -> bool:
    return pages.device.type == "cpu" and pages.is_contiguous() and slots.is_contiguous()


def _bytes(tensor: Tensor):
    return tensor.view(torch.uint8).numpy()


@njit("void(uint8[:,:,::1], uint8[:,:,::1], uint8[:,:,:,:,::1], int64[::1])")
def _write_bytes(k, v, pages, slots):
    num_heads, size, width = pages.shape[2], pages.shape[3], pages.shape[4]
    for row in range(slots.shape[0]):
        if slots[row] < 0:
            continue
        page, offset = slots[row] // size, slots[row] % size
        for head in range(num_heads):
            for i in range(width):
                pages[page, 0, head, offset, i] = k[row, head, i]
                pages[page, 1, head, offset, i] = v[row, head, i]


@njit("void(uint8[:,:,:,:,:,::1], int64[::1], int64[::1])")
def _move_bytes(pages, src, dst):
    num_layers, num_heads, size, width = (
        pages.shape[0],
        pages.shape[3],
        pages.shape[4],
        pages.shape[5],
    )
    rows = np.empty((src.shape[0], width), np.uint8)
    for layer in range(num_layers):
        for kind in range(2):
            for head in range(num_heads):
                for row in range(src.shape[0]):
                    page, offset = src[row] // size, src[row] % size
                    for i in range(width):
                        rows[row, i] = pages[layer, page, kind, head, offset, i]
                for row in range(dst.shape[0]):
                    page, offset = dst[row] // size, dst[row] % size
                    for i in range(width):
                        pages[layer, page, kind, head, offset, i] = rows[row, i]
