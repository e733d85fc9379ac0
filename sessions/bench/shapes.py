"""The attention calls that are measured, and their tensors. Knows no backend."""

# Not strict: much of torch has no full types.
# pyright: standard

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.attention.reference import ancestor_words, attend
from chatkv.attention.triton_check import random_tree

Kind = Literal["decode", "prefill", "tree"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TREE_DEPTH = 8
MAX_TREE_ROWS = 512
MAX_COPIES = 40
CHECKED_ROWS = 32
"""Rows of a sequence that are compared with the reference, of a chain."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of the same length, each with the same new rows."""

    kind: Kind
    num_seqs: int
    rows: int
    """New rows of a sequence. They are causal, but for `tree`."""
    kv_len: int
    """Slots of a sequence, its new rows counted."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def page_size(self) -> int:
        return 64 if self.is_cuda else 16

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def title(self) -> str:
        """As above a table."""
        return (
            f"{self.kind}, {self.num_seqs:,} seq{'s' * (self.num_seqs > 1)}, "
            f"{self.rows:,} row{'s' * (self.rows > 1)}, "
            f"{self.num_heads}/{self.num_kv_heads} heads, D {self.head_dim}, {self.dtype}"
        )

    @property
    def parents(self) -> tuple[int, ...]:
        """Of the tree in each sequence."""
        depth = TREE_DEPTH if self.rows > 1 else 1
        return random_tree(self.rows, depth, random.Random(self.rows))

    @property
    def visible_keys(self) -> int:
        """Keys that the rows see, summed over all rows."""
        stored = self.kv_len - self.rows
        if self.kind == "tree":
            depths: list[int] = []
            for parent in self.parents:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            seen = sum(stored + depth for depth in depths)
        else:
            seen = self.rows * stored + self.rows * (self.rows + 1) // 2
        return self.num_seqs * seen

    @property
    def flops(self) -> int:
        """A multiply-add of both products for each visible key; masked pairs are not work."""
        return 4 * self.num_heads * self.head_dim * self.visible_keys

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all sequences."""
        size = DTYPES[self.dtype].itemsize
        return 2 * self.num_seqs * self.kv_len * self.num_kv_heads * self.head_dim * size

    @property
    def needed_bytes(self) -> int:
        """Each needed byte once: q, out, keys and values, page table."""
        size = DTYPES[self.dtype].itemsize
        rows = 2 * self.num_seqs * self.rows * self.num_heads * self.head_dim * size
        return rows + self.kv_bytes + 4 * self.num_seqs * -(-self.kv_len // self.page_size)

    @property
    def score_bytes(self) -> int:
        """The score matrix written out."""
        size = DTYPES[self.dtype].itemsize
        return self.num_seqs * self.num_heads * self.rows * self.kv_len * size

    @property
    def copies(self) -> int:
        """Copies that are rotated, so that no call finds its keys in the L2 cache of a GPU."""
        if not self.is_cuda:
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, min(MAX_COPIES, -(-4 * cache // self.kv_bytes)))

    @property
    def data_bytes(self) -> int:
        """Copies, paged and contiguous, and what the reference needs for a row."""
        return 2 * self.copies * self.needed_bytes + 16 * self.kv_len * (
            self.num_heads * self.head_dim
        )


class Data:
    """One rotated copy of a shape's tensors, on scattered pages."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        place = torch.device(shape.device)
        draw = torch.Generator(place).manual_seed(seed)
        dtype, size = DTYPES[shape.dtype], shape.page_size
        entries = -(-shape.kv_len // size)
        count = shape.num_seqs * entries
        of_page = (2, shape.num_kv_heads, size, shape.head_dim)
        self.pages = torch.randn(count, *of_page, generator=draw, dtype=dtype, device=place)
        self.table = (
            torch.randperm(count, generator=draw, device=place).int().view(shape.num_seqs, entries)
        )
        rows = shape.num_seqs * shape.rows
        q = torch.randn(
            rows, shape.num_heads, shape.head_dim, generator=draw, dtype=dtype, device=place
        )
        self.q = q / 2
        """[N * R, HQ, D]. Halved: of wider scores a matrix in bfloat16 misses the tolerance."""
        self.call = self.chain_call(shape.rows, shape.kv_len)
        if shape.kind == "tree":
            words = ancestor_words(shape.parents).repeat(shape.num_seqs, 1)
            self.call = replace(self.call, ancestors=words.to(place))

    def chain_call(self, rows: int, kv_len: int) -> AttentionCall:
        """A call of `rows` causal rows in each sequence, the last in slot kv_len - 1."""
        call = AttentionCall.of(
            self.table, [rows] * self.shape.num_seqs, [kv_len] * self.shape.num_seqs
        )
        place = self.table.device
        return replace(call, q_start=call.q_start.to(place), kv_len=call.kv_len.to(place))

    @cached_property
    def contiguous(self) -> tuple[Tensor, Tensor]:
        """Keys and values without pages, each [N, HK, L, D]."""
        found = self.pages[self.table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        keys, values = found[:, :, :, : self.shape.kv_len]
        return keys.contiguous(), values.contiguous()

    @cached_property
    def seen(self) -> Tensor:
        """[R, L] bool: the keys that each row of a sequence sees."""
        rows, length = self.shape.rows, self.shape.kv_len
        seen = torch.ones(rows, length, dtype=torch.bool)
        own = seen[:, length - rows :]
        if self.call.ancestors is None:
            own.tril_()
        else:
            bit = torch.arange(rows)
            words = self.call.ancestors[:rows].cpu()
            own.copy_((words[:, bit // 64] >> (bit % 64)) & 1 == 1)
        return seen.to(self.q.device)

    def by_seq(self) -> Tensor:
        """q as [N, R, HQ, D]."""
        return self.q.unflatten(0, (self.shape.num_seqs, self.shape.rows))


class Expected:
    """What the reference says about some rows of the first and the last sequence."""

    def __init__(self, data: Data) -> None:
        shape = data.shape
        rows, outs = list[int](), list[Tensor]()
        for n in sorted({0, shape.num_seqs - 1}):
            call, own = self._call(data, n)
            chosen = [n * shape.rows + row for row in own]
            pages = data.pages[data.table[n].long()].float()
            out, _ = attend(call, data.q[chosen].float(), pages, None)
            rows += chosen
            outs.append(out)
        self._rows = torch.tensor(rows, device=data.q.device)
        self._out = torch.cat(outs)

    def error(self, out: Tensor) -> float:
        """Largest relative error of a row; NaN if there is one in it."""
        found = out[self._rows].float()
        return float(((found - self._out).flatten(1).norm(dim=1) / self._size()).max())

    def _size(self) -> Tensor:
        return self._out.flatten(1).norm(dim=1)

    @staticmethod
    def _call(data: Data, n: int) -> tuple[AttentionCall, list[int]]:
        """The rows of a tree as one call; rows of a chain each as a sequence of its own."""
        shape = data.shape
        entries = torch.arange(data.table.shape[1], dtype=torch.int32, device=data.q.device)
        if data.call.ancestors is not None:
            call = AttentionCall.of(entries[None], [shape.rows], [shape.kv_len])
            words = data.call.ancestors[: shape.rows]
            own = list(range(shape.rows))
        else:
            last, parts = shape.rows - 1, min(shape.rows, CHECKED_ROWS)
            own = sorted({round(part * last / max(1, parts - 1)) for part in range(parts)})
            lengths = [shape.kv_len - last + row for row in own]
            call = AttentionCall.of(entries.repeat(len(own), 1), [1] * len(own), lengths)
            words = None
        place = data.q.device
        return (
            replace(
                call,
                q_start=call.q_start.to(place),
                kv_len=call.kv_len.to(place),
                ancestors=words,
            ),
            own,
        )
