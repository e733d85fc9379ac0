"""Does a row keep its bits whatever stands beside it? Asked of every product of a model, at load.

Knows the products of `cuda_layers.Layers` and the row counts a step may have. A library picks its
kernel by shape, so the answer holds for this device, driver and version only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from chatkv.errors import BackendUnavailable
from chatkv.models import skinny_tiles
from chatkv.models import skinny_triton as skinny
from chatkv.models.cuda_layers import PAGE_SIZE, Layers, library_product
from chatkv.models.fused_triton import Scaled
from chatkv.models.skinny_triton import ROWS

Product = Callable[[Tensor], Tensor]
"""Rows [T, K] to results [T, N]."""
SAMPLE = 64
"""Random rows that are looked at."""
BASES = (ROWS, 8, 4, 2, 1)
"""Rows of a library call that may serve as the base of all others."""
POSITION = 7


def keeps_bits(product: Product, rows: Tensor, base: Tensor, count: int) -> bool:
    """Whether `count` rows at once, in other places, give the bits of `base`.

    Args:
        rows: [64, K].
        base: [64, N], what they gave in pieces of the base size.
    """
    generator = torch.Generator().manual_seed(count)
    for _ in range(2):
        picked = torch.randint(len(rows), (count,), generator=generator).to(rows.device)
        if not torch.equal(product(rows[picked]), base[picked]):
            return False
    return True


def in_pieces(product: Product, rows: Tensor, size: int) -> Tensor:
    """The rows in calls of exactly `size` rows."""
    return torch.cat([product(piece) for piece in rows.split(size)])


def check_rows(layers: Layers, counts: Sequence[int]) -> dict[tuple[int, int, int], int]:
    """Look at every product of the model for every row count.

    Returns:
        For the library's products: (rows, outputs, inputs) -> rows that may go at once. Plain
        steps and others then share the very same calls. Empty for our own kernels.

    Raises:
        BackendUnavailable: Our own kernels do not keep bits here: nothing to fall back on.
    """
    pieces: dict[tuple[int, int, int], int] = {}
    generator = torch.Generator(layers.device).manual_seed(1)
    for name, weight, product in _products(layers):
        width = weight.shape[1]
        rows = torch.randn(SAMPLE, width, generator=generator, device=layers.device)
        rows = rows.to(layers.weights.dtype)
        if layers.linear == "triton":
            _expect_own(name, product, rows, counts, layers.spec.name)
            continue
        size, base = _base(product, rows, BASES)
        if not size:
            raise BackendUnavailable(
                f"The library's {name} gives the same row different bits from call to call.",
                hint="Report the device and driver; --device cpu runs.",
            )
        for count in counts:
            whole = keeps_bits(product, rows, base, count)
            pieces[count, len(weight), width] = count if whole else min(size, count)
    return pieces


def expect_exact_heads(layers: Layers, counts: Sequence[int]) -> None:
    """Look at the product of queries, keys and values that a step over quantised pages has.

    Raises:
        BackendUnavailable: It does not keep bits here.
    """
    if layers.linear != "triton":
        return  # that of the other steps
    weight = layers.weights.layers[0].qkv
    product = _own("head", layers, weight)
    generator = torch.Generator(layers.device).manual_seed(1)
    rows = torch.randn(SAMPLE, weight.shape[1], generator=generator, device=layers.device)
    _expect_own("qkv", product, rows.to(layers.weights.dtype), counts, layers.spec.name)


def _expect_own(
    name: str, product: Product, rows: Tensor, counts: Sequence[int], model: str
) -> None:
    size, base = _base(product, rows, (ROWS,))
    bad = [c for c in counts if not size or not keeps_bits(product, rows, base, c)]
    if bad:
        raise BackendUnavailable(
            f"The {name} of {model} gives a row other bits among {bad[0]} rows.",
            hint="Report the device and driver; --device cpu runs.",
        )


def _base(product: Product, rows: Tensor, sizes: Sequence[int]) -> tuple[int, Tensor]:
    """The first of these sizes at which a row's place in a call does not matter; 0 if none."""
    for size in sizes:
        base = in_pieces(product, rows, size)
        if keeps_bits(product, rows, base, size):
            return size, base
    return 0, rows


def _products(layers: Layers) -> Iterator[tuple[str, Tensor, Product]]:
    """(name, weight, product) of every shape."""
    weights, layer = layers.weights, layers.weights.layers[0]
    matrices = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
    for name, weight in {**matrices, "head": weights.head}.items():
        if layers.linear == "library":
            out = torch.float32 if name == "head" else weights.dtype
            yield name, weight, _library(weight, out)
        else:
            yield name, weight, _own(name, layers, weight)


def _library(weight: Tensor, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
        library_product(x, weight, out)
        return out

    return product


def _own(name: str, layers: Layers, weight: Tensor) -> Product:
    """One of our own kernels, with a result per row wherever it really goes."""
    spec, dtype = layers.spec, layers.weights.dtype
    blocks = skinny_tiles.residual_blocks(spec.hidden_size)

    def scaled(x: Tensor) -> Tensor | Scaled:
        """Rows as the kernel reads them: a norm's numbers depend on the row alone too."""
        if not layers.is_narrow:
            return x
        return Scaled(x, x[:, :blocks].float().square(), 1e-5)

    def product(x: Tensor) -> Tensor:
        count = len(x)
        like: dict[str, Any] = {"device": x.device}
        floats: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
        if name in ("o", "down") and layers.is_narrow:
            hidden = torch.zeros(count, len(weight), **floats)
            out = Scaled(hidden.to(dtype), torch.zeros(count, blocks, **floats), 1e-5)
            skinny.add_project(x, weight, hidden, layers.weights.norm, out)
            return torch.cat([hidden, out.x.float(), out.squares], 1)
        if name in ("o", "down"):
            split = skinny_tiles.split_tile(*weight.shape).split
            parts = torch.zeros(split, count, len(weight), **floats)
            skinny.project_parts(x, weight, parts)
            return parts.transpose(0, 1).flatten(1)
        if name == "gate_up":
            gated = torch.empty(count, len(weight) // 2, dtype=dtype, **like)
            skinny.gate_project(scaled(x), weight, gated)
            return gated
        if name == "head" or not layers.rotates:
            whole = torch.empty(count, len(weight), **floats)
            skinny.project(scaled(x), weight, whole)
            return whole
        q = torch.empty(count, spec.num_heads, spec.head_dim, dtype=dtype, **like)
        shape = (-(-count // PAGE_SIZE), 2, spec.num_kv_heads, PAGE_SIZE, spec.head_dim)
        pages = torch.zeros(shape, dtype=dtype, **like)
        where = torch.full((count,), POSITION, dtype=torch.int32, **like)
        slots = torch.arange(count, **like)
        bias = layers.weights.layers[0].bias
        skinny.rotate_project(scaled(x), weight, bias, layers.rotary, where, slots, q, pages)
        stored = pages.permute(0, 3, 1, 2, 4).flatten(0, 1)[:count].flatten(1)
        return torch.cat([q.flatten(1), stored], 1)

    return product
