"""Options of our kernels' launches. Knows no kernel."""

from __future__ import annotations

EXACT = {"enable_fp_fusion": False}
"""Whether products are fused into sums does not depend on the compiler's mood."""


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Of a kernel that may start before the one before it has ended."""
    return {"launch_pdl": True} if pdl else {}
