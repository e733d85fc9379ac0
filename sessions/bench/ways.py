"""The rows of the attention table by name: our backends and the peers, and why one is not here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from chatkv.attention import backends
from chatkv.attention.call import AttentionCall
from chatkv.errors import BackendUnavailable
from sessions.bench import peers
from sessions.bench.peers import Built, Run
from sessions.bench.shapes import Data, Shape

CPU_CHUNK = 128
"""Rows of a prompt that the CPU runs at once, as its decoder does."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a call."""

    name: str
    build: Callable[[Sequence[Data]], Built]
    absent: Callable[[Shape], str]
    """Why it cannot serve a shape here, as the end of a sentence; empty if it can."""
    is_peer: bool = True
    only_named: Callable[[], str] = str
    """Why it is left out unless it is named; empty if it is not."""
    scratch_bytes: Callable[[Shape], int] = lambda shape: 0
    """Memory of a run beyond q and out, if it is worth asking for first."""


def _always(_shape: Shape) -> str:
    return ""


def _backend_absent(name: str) -> Callable[[Shape], str]:
    def absent(shape: Shape) -> str:
        try:
            backends.backend(name, shape.device)
        except BackendUnavailable as error:
            return error.message.partition(f"{name}: ")[2].removesuffix(".") or error.message
        return ""

    return absent


def _cpu(copies: Sequence[Data]) -> Built:
    from chatkv.attention.cpu import CpuBackend

    shape, backend = copies[0].shape, CpuBackend()

    def of(data: Data) -> Run:
        pages = _bits(data.pages)
        calls = [
            (rows, backend.plan(call, *_heads(shape), shape.page_size))
            for rows, call in _cpu_calls(data)
        ]

        def run() -> Tensor:
            out = torch.empty_like(data.q)
            for rows, plan in calls:
                backend.attend_rows(plan, _bits(data.q[rows]), pages, _bits(out[rows]))
            return out

        return run

    return Built([of(data) for data in copies], _same, lambda: backend.numerics)


def _cpu_calls(data: Data) -> list[tuple[slice, AttentionCall]]:
    """The calls that run all rows, each with its rows of q."""
    shape = data.shape
    if shape.kind != "prefill":
        return [(slice(None), data.call)]
    edges = [*range(0, shape.rows, CPU_CHUNK), shape.rows]
    stored = shape.kv_len - shape.rows
    return [
        (
            slice(n * shape.rows + first, n * shape.rows + stop),
            AttentionCall.of(data.table[n : n + 1], [stop - first], [stored + stop]),
        )
        for n in range(shape.num_seqs)
        for first, stop in pairwise(edges)
    ]


def _bits(tensor: Tensor):
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _triton(copies: Sequence[Data]) -> Built:
    if copies[0].shape.kind == "prefill":
        return _triton_prefill(copies)
    from chatkv.attention.triton_tree import TritonBackend

    shape, backend = copies[0].shape, TritonBackend()

    def of(data: Data) -> Run:
        plan = backend.plan(data.call, *_heads(shape), shape.page_size)
        return lambda: backend.attend(data.call, data.q, data.pages, plan=plan)[0]

    return Built([of(data) for data in copies], _same, lambda: backend.kernel)


def _triton_prefill(copies: Sequence[Data]) -> Built:
    """The kernel of the decoder's prompt chunks, all rows of a sequence as one chunk."""
    from chatkv.attention.triton_tree import supports_pdl
    from chatkv.models import chunks

    shape = copies[0].shape
    stored = shape.kv_len - shape.rows
    span = torch.tensor([stored, stored, shape.kv_len], dtype=torch.int32, device=shape.device)
    pdl = supports_pdl(span.device)

    def of(data: Data) -> Run:
        def run() -> Tensor:
            out = torch.empty_like(data.q)
            for n in range(shape.num_seqs):
                rows = slice(n * shape.rows, (n + 1) * shape.rows)
                chunks.attend_chunk(
                    data.q[rows], data.pages, data.table[n], span, out[rows], pdl=pdl
                )
            return out

        return run

    return Built([of(data) for data in copies], _same, lambda: chunks.NUMERICS)


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim


def _same(out: Tensor) -> Tensor:
    return out


WAYS = {
    way.name: way
    for way in (
        Way("standard", peers.standard, _always, scratch_bytes=lambda shape: 2 * shape.score_bytes),
        Way("sdpa", peers.sdpa, _always),
        Way("flash_attn", peers.flash_attn, peers.flash_absent),
        Way(
            "flashinfer",
            peers.flashinfer,
            peers.flashinfer_absent,
            only_named=peers.flashinfer_slow,
        ),
        Way("flex", peers.flex, peers.flex_absent),
        Way("triton", _triton, _backend_absent("triton"), is_peer=False),
        Way("cpu", _cpu, _backend_absent("cpu"), is_peer=False),
    )
}
"""In the order of the table, ours last."""
