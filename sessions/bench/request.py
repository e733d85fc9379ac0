"""What `bench attention` is asked to measure, checked. Knows numbers and memory, no backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chatkv.errors import UsageError
from chatkv.models.devices import expect_cuda
from sessions.bench.measure import free_bytes
from sessions.bench.shapes import MAX_TREE_ROWS, Kind, Shape

LARGEST_HEAD = 256
FREE_SHARE = 0.9
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure."""

    kind: Kind = "decode"
    kv_lens: tuple[int, ...] = (512, 2048, 8192)
    rows: tuple[int, ...] = ()
    """New rows of a sequence; without any 1, 16 in a tree, all of kv_len in a prefill."""
    num_seqs: int = 1
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "bf16"
    device: str = "auto"
    backends: tuple[str, ...] = ()
    """Rows of the table; none are all that can run here."""
    turns: int = 20


def device_of(name: str) -> str:
    """`cpu` or `cuda`. Raises BackendUnavailable where a named one cannot be used."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        expect_cuda()
    return name


def shapes_of(request: Request, device: str) -> list[Shape]:
    """Every shape, checked before the first is measured.

    Raises:
        UsageError: A number makes no sense, or the tensors of a shape do not fit the memory.
    """
    _check(request, device)
    shapes: list[Shape] = []
    for rows in request.rows or (0,):
        for kv_len in request.kv_lens:
            default = {"decode": 1, "tree": 16, "prefill": kv_len}[request.kind]
            shape = Shape(
                request.kind,
                request.num_seqs,
                rows or default,
                kv_len,
                request.num_heads,
                request.num_kv_heads,
                request.head_dim,
                request.dtype,
                device,
            )
            if shape.kv_len < shape.rows:
                raise UsageError(
                    f"--kv-len {kv_len:,} is less than the {shape.rows:,} new rows that it counts.",
                    hint="Use a longer --kv-len or fewer --rows.",
                )
            free = free_bytes(device)
            if shape.data_bytes > FREE_SHARE * free:
                raise UsageError(
                    f"{shape.title}, kv_len {kv_len:,} needs {shape.data_bytes / GIB:,.1f} GiB, "
                    f"and {free / GIB:,.1f} GiB are free on {device}.",
                    hint="Use fewer --seqs or a shorter --kv-len.",
                )
            shapes.append(shape)
    return shapes


def _check(request: Request, device: str) -> None:
    heads, kv_heads, dim = request.num_heads, request.num_kv_heads, request.head_dim
    if heads % kv_heads:
        raise UsageError(
            f"{kv_heads} kv heads do not divide {heads} query heads.",
            hint="Use --heads 32/8, for example.",
        )
    if dim % 16 or dim > LARGEST_HEAD:
        raise UsageError(
            f"--head-dim {dim} is not a multiple of 16 up to {LARGEST_HEAD}.",
            hint="Use 64 or 128, for example.",
        )
    served = ("bf16", "fp16") if device == "cuda" else ("bf16", "fp32")
    if request.dtype not in served:
        raise UsageError(
            f"--dtype {request.dtype} is not served on {device}.",
            hint=f"Use {' or '.join(served)}.",
        )
    if request.kind == "tree" and max(request.rows, default=0) > MAX_TREE_ROWS:
        raise UsageError(
            f"A tree of {max(request.rows):,} rows: {MAX_TREE_ROWS} are the most.",
            hint="Use fewer --rows, or --shape prefill.",
        )
