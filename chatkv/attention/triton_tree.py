"""The Triton backend: any tree over pages, exact. Knows launches and scratch, no arithmetic.

Exact: a row has the same bits in a tree and in plain decoding. What decides bits is a `Partition`,
    fixed for a model; what does not is a `Launch`, chosen for each call from its shape.
"""

# Launches take options that the decorated function does not name.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.attention.triton_hopper import attend_wide, can_be_wide, is_hopper, supports_pdl
from chatkv.attention.triton_kernels import attend_past
from chatkv.attention.triton_launch import Launch, Owner, Partition, balance, pays_wide
from chatkv.attention.triton_merge import merge_rows
from chatkv.attention.triton_plan import plan_rows
from chatkv.attention.triton_store import CODES
from chatkv.errors import BackendUnavailable

LARGEST_HEAD = 256
MOST_MIXED = 32
"""Sequences; more of them fill a device anyway."""
OWNERS: dict[Owner, int] = {"leaf": 0, "group": 1, "either": 2}
PAIRED = (torch.int8, torch.float8_e4m3fn)
SHORT = (torch.bfloat16, torch.float16)
GAINS = {torch.int8: 64, torch.float8_e4m3fn: 256}
"""Powers of two that keep probability times value scale out of float16's subnormals."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What all layers of one step share, on the device. See `triton_plan.plan_rows`."""

    sequences: Tensor
    """[N, 8] int32: rows, bounds and owner of each sequence, the longest first."""
    limits: Tensor
    """[T] int32: where a row's own keys begin, as logical index."""
    own_slots: Tensor
    """[T, depth + unit] int32: physical slots of a row's own keys."""
    by_leaf: Tensor
    """[T] int32: whether the row's sequence is owned by leaves, if the launch leaves it open."""
    max_rows: int
    """Most rows of a sequence, now and in every replay."""
    length: int
    """Slots of the longest sequence, for the launch rule."""
    is_mixed: bool
    """Some sequences are longer than others, as the host knows them: owners were chosen."""


class TritonBackend:
    """Attention on CUDA devices, and in Triton's interpreter for tests."""

    name = "triton"
    mode: Literal["exact", "guarded"] = "exact"
    max_depth = 16

    def __init__(self, partition: Partition | None = None, launch: Launch | None = None) -> None:
        """Take a partition or a launch for all calls; without one, its rule is asked."""
        self.calls = 0
        """How many layers this backend has served."""
        self.kernel = ""
        """What served the last call: page dtype, head size, rows a program, partition, owner."""
        self.partition = partition
        self.launch = launch
        self._scratch: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def numerics(self) -> str:
        """Names the bits. A partition by rule follows from the model: its version is enough."""
        return "triton-1" if self.partition is None else f"triton-1-{self.partition}"

    def plan(
        self,
        call: AttentionCall,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> TritonPlan:
        """Work out once a step, on the device, what every layer needs. Reads nothing back.

        The host lengths of the call serve the launch rule only: a captured step may replay with
        other lengths and rows on the device, as long as it has no more rows, in all or in one
        sequence. Capture it with the longest lengths it will see.
        """
        partition = self.partition or Partition.of(num_kv_heads)
        ancestors, starts = call.ancestors, call.q_start_host
        capacity = call.num_rows if ancestors is None else ancestors.shape[0]
        ints = {"dtype": torch.int32, "device": call.page_table.device}
        plan = TritonPlan(
            sequences=torch.empty(call.num_sequences, 8, **ints),
            limits=torch.empty(capacity, **ints),
            own_slots=torch.empty(capacity, partition.depth + partition.unit, **ints),
            by_leaf=torch.empty(capacity, **ints),
            max_rows=max((b - a for a, b in pairwise(starts)), default=0),
            length=max(call.kv_len_host, default=0),
            is_mixed=len(set(call.kv_len_host)) > 1 and call.num_sequences <= MOST_MIXED,
        )
        if plan.max_rows == 0:
            return plan
        rows = plan.max_rows * num_query_heads // num_kv_heads
        plan_rows[(call.num_sequences, plan.max_rows)](
            call.page_table.contiguous(),
            call.q_start,
            call.kv_len,
            _or(ancestors, call),
            _or(call.valid, call),
            _or(call.q_pos, call),
            _or(call.page_pos, call),
            plan.sequences,
            plan.limits,
            plan.own_slots,
            plan.by_leaf,
            call.window or 0,
            call.page_table.shape[1],
            0 if ancestors is None else ancestors.shape[1],
            call.num_sequences,
            *balance(
                rows,
                num_kv_heads,
                head_dim,
                partition,
                wide=pays_wide(rows, 2 * head_dim) and is_hopper(call.page_table.device),
            ),
            SEQUENCES=triton.next_power_of_2(call.num_sequences) if plan.is_mixed else 0,
            IS_TREE=ancestors is not None,
            HAS_VALID=call.valid is not None,
            HAS_WINDOW=call.window is not None,
            PAGE=page_size,
            DEPTH=partition.depth,
            UNIT=partition.unit,
            TILE=partition.tile,
            GROUPS=partition.groups,
            num_warps=1,
        )
        return plan

    def attend(
        self,
        call: AttentionCall,
        q: Tensor,
        pages: Tensor,
        *,
        scales: Tensor | None = None,
        plan: TritonPlan | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Serve one call. Shapes as in `reference.paged_attention`; a tree is at most `max_depth`
        deep.

        Args:
            plan: `plan(...)` of the same call, made once for all layers of a step; else made here.

        Raises:
            ValueError: A tensor does not fit the call.
            BackendUnavailable: The call is valid, but cannot be served here.
        """
        call.check(q, pages, scales)
        _expect_served(q, pages)
        num_heads, head_dim = q.shape[1:]
        num_kv_heads, page_size = pages.shape[2:4]
        if plan is None:
            plan = self.plan(call, num_heads, num_kv_heads, head_dim, page_size)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.calls += 1
        if plan.max_rows == 0:
            return out, lse
        group = num_heads // num_kv_heads
        interpreted = bool(triton.knobs.runtime.interpret)
        partition = self.partition or Partition.of(num_kv_heads)
        launch = self.launch or Launch.of(
            plan.max_rows * group,
            call.num_sequences,
            num_kv_heads,
            head_dim * q.element_size(),
            plan.length,
            partition,
            quantised=scales is not None,
            in_pairs=pages.dtype in PAIRED,
            is_mixed=plan.is_mixed,
            can_be_wide=can_be_wide(call, q, pages, partition.tile),
            pdl=supports_pdl(q.device),
        )
        divided = {
            "HEADS": num_kv_heads,
            "GROUP": group,
            "DIM": head_dim,
            "PAGE": page_size,
            "BLOCK_N": partition.tile,
            "GROUPS": partition.groups,
            "LEAVES": partition.leaves,
            "OWNER": OWNERS[launch.owner],
            "PDL": launch.pdl,
            **({"launch_pdl": True} if launch.pdl else {}),
        }
        stored = {
            "DIM_PAD": triton.next_power_of_2(head_dim),
            "CODE": CODES.get(pages.dtype, 0),
            "GAIN": GAINS.get(pages.dtype, 1),
            # Codes and their scales fit float16, which is finer than bfloat16.
            "HALF": pages.dtype in CODES and q.dtype in SHORT and not interpreted,
        }
        gathered = {
            "NODES": launch.nodes,
            "BLOCK_M": max(16, triton.next_power_of_2(launch.nodes * group)),
            "SPAN": partition.depth + partition.unit,
        }
        parts = partition.groups * (1 if launch.owner == "group" else partition.leaves)
        # The last part holds a row's own keys.
        partials = self._partials(parts + 1, q.shape[0] * num_heads, head_dim, q.device)
        factor = call.score_scale(head_dim) * math.log2(math.e)
        if q.stride(1) != head_dim:
            q = q.contiguous()
        if scales is None:
            scales = pages
        # Pairs of neighbouring codes: see `triton_tiles.codes_of`.
        tiles = pages.view(torch.int16) if pages.dtype in PAIRED else pages
        shape = (partials[0].shape[1], q.stride(0))
        strides = (*shape, *tiles.stride()[:4], *scales.stride()[:4])
        page_table, rows = call.page_table.contiguous(), plan.max_rows * group
        if launch.wide:
            assert can_be_wide(call, q, pages, partition.tile)
            attend_wide(
                q,
                pages,
                page_table,
                plan.sequences,
                plan.limits,
                partials,
                factor,
                rows,
                parts,
                **divided,
            )
        else:
            blocks = triton.cdiv(rows, launch.block_m)
            pairs = call.num_sequences * num_kv_heads
            attend_past[(blocks, pairs, parts)](
                q,
                tiles,
                scales,
                page_table,
                plan.sequences,
                plan.limits,
                _or(call.valid, call),
                _or(call.q_pos, call),
                _or(call.page_pos, call),
                *partials,
                factor,
                call.window or 0,
                call.page_table.shape[1],
                *strides,
                BLOCK_M=launch.block_m,
                HAS_VALID=call.valid is not None,
                HAS_WINDOW=call.window is not None,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                **divided,
                **stored,
            )
        merge_rows[(triton.cdiv(q.shape[0], launch.nodes), num_kv_heads)](
            q,
            pages,
            scales,
            call.q_start,
            plan.limits,
            plan.own_slots,
            plan.by_leaf,
            *partials,
            out,
            lse,
            factor,
            call.num_sequences,
            *shape,
            *pages.stride()[:4],
            *scales.stride()[:4],
            ROWS=triton.next_power_of_2(launch.nodes * group),
            num_warps=4,
            num_stages=1,
            **gathered,
            **divided,
            **stored,
        )
        kind = str(pages.dtype).removeprefix("torch.")
        name = "wide" if launch.wide else f"m{launch.block_m}"
        self.kernel = f"attend_past-{kind}-d{head_dim}-{name}-{partition}-{launch.owner}"
        return out, lse

    def _partials(
        self, parts: int, rows: int, head_dim: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scratch of a call, kept for each bucket of rows; calls on one stream share it."""
        rows = triton.next_power_of_2(rows)
        key = (parts, rows, head_dim, device)
        if key not in self._scratch:
            floats = {"dtype": torch.float32, "device": device}
            self._scratch[key] = (
                torch.empty(parts, rows, head_dim, **floats),
                torch.empty(parts, rows, **floats),
                torch.empty(parts, rows, **floats),
            )
        return self._scratch[key]


def _or(tensor: Tensor | None, call: AttentionCall) -> Tensor:
    """The tensor, or one that stands for an argument which is not read."""
    return call.kv_len if tensor is None else tensor.contiguous()


def _expect_served(q: Tensor, pages: Tensor) -> None:
    head_dim = q.shape[-1]
    if head_dim % 16 or head_dim > LARGEST_HEAD:
        raise BackendUnavailable(
            f"Backend triton: head size {head_dim} is not a multiple of 16 up to {LARGEST_HEAD}.",
            hint="Use the reference backend.",
        )
    if pages.dtype == torch.uint8 and head_dim & (head_dim - 1):
        raise BackendUnavailable(
            f"Backend triton: int4 pages of head size {head_dim}, which is not a power of two.",
            hint="Use int8 pages.",
        )
    interpreted = triton.knobs.runtime.interpret
    if interpreted and torch.bfloat16 in (q.dtype, pages.dtype):
        raise BackendUnavailable(
            "Backend triton: Triton's interpreter multiplies bfloat16 wrongly.",
            hint="Use float32 or float16 with TRITON_INTERPRET=1.",
        )
    if not interpreted and q.device.type != "cuda":
        raise BackendUnavailable(
            f"Backend triton: the tensors are on {q.device}, not on a CUDA device.",
            hint="Use --device cuda.",
        )
