"""The CPU backend: one plan a step, one compiled call a layer. Knows tensors and plans, no model.

Exact: a row has the same bits in a tree and in plain decoding, whatever rows, sequences or threads
are beside it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatkv.attention import cpu_kernels as kernels
from chatkv.attention.call import AttentionCall
from chatkv.attention.cpu_plan import CpuPlan, Planner
from chatkv.errors import BackendUnavailable

FLOATS = (torch.bfloat16, torch.float32)
CODES = (torch.int8, torch.uint8)
NO_LSE = np.zeros((0, 0), np.float32)


class CpuBackend:
    """Attention on the CPU for bfloat16, float32, int8 and int4 pages. Serves one call at a time.

    Args:
        threads: To use; None is as many as torch uses.
    """

    name = "cpu"
    mode: Literal["exact", "guarded"] = "exact"
    numerics = "cpu-numba-1"
    max_depth = 16

    def __init__(self, threads: int | None = None) -> None:
        self.threads = max(1, torch.get_num_threads() if threads is None else threads)
        self.calls = 0
        """How many layers this backend has served."""
        self._planner = Planner()

    def attend(
        self, call: AttentionCall, q: Tensor, pages: Tensor, *, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Serve one call. Shapes as in `reference.paged_attention`.

        Raises:
            ValueError: q or pages do not fit the call.
            BackendUnavailable: fp8 or float16 pages, or a head size that is not 16 n.
        """
        call.check(q, pages, scales)
        head_dim, quantised = q.shape[2], pages.dtype in CODES
        if q.dtype not in FLOATS or pages.dtype not in (*FLOATS, *CODES) or head_dim % 16:
            raise BackendUnavailable(
                f"Backend cpu: {pages.dtype} pages of head size {head_dim} are not served, "
                "only bfloat16, float32, int8 and int4 ones with a head size of 16 n.",
                hint="Use the reference backend, or bfloat16 pages.",
            )
        size = pages.shape[3]
        columns = pages.shape[4] if quantised else None
        plan = self.plan(call, q.shape[1], pages.shape[2], head_dim, size, columns)
        q = q.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        stored = None
        if scales is not None:
            stored = scales.half().contiguous().view(torch.uint16).numpy()
        self.attend_rows(plan, _bits(q), _bits(pages.contiguous()), _bits(out), lse.numpy(), stored)
        return out, lse

    def plan(
        self,
        call: AttentionCall,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        columns: int | None = None,
    ) -> CpuPlan:
        """Work out once a step what every layer needs. Plans of one backend share scratch.

        Args:
            columns: Of a row of codes, if the pages are quantised.
        """
        return self._planner.plan(
            call, num_query_heads, num_kv_heads, head_dim, page_size, self.threads, columns
        )

    def attend_rows(
        self,
        plan: CpuPlan,
        q: NDArray[Any],
        pages: NDArray[Any],
        out: NDArray[Any],
        lse: NDArray[np.float32] | None = None,
        scales: NDArray[np.uint16] | None = None,
    ) -> None:
        """One layer of a step.

        Args:
            plan: Made for this step's call and these pages by this backend.
            q: [>= T, HQ, D] uint16 (bfloat16 bits) or float32, C order.
            pages: [P, 2, HK, S, D] of one layer, same dtype; or int8 codes, or uint8 [..., D / 2].
            out: Like q; rows from T on are left alone.
            lse: [>= T, HQ] float32 to fill, or None.
            scales: [P, 2, HK, S, C] float16 bits beside codes.
        """
        self.calls += 1
        lse = NO_LSE if lse is None else lse
        if scales is not None:
            # Imported here: compiled for those who have such pages.
            from chatkv.attention import cpu_quantised as quantised

            kernel = quantised.attend_alone
            if plan.num_workers > 1:
                kernel = quantised.attend_together
            kernel(q, pages, scales, out, lse, *plan.arguments, plan.values)
            return
        if q.dtype == np.float32:
            kernel = kernels.attend_float32
        else:
            kernel = kernels.attend_alone if plan.num_workers == 1 else kernels.attend_together
        kernel(q, pages, out, lse, *plan.arguments)


def _bits(tensor: Tensor) -> NDArray[Any]:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
