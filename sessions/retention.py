"""How much disk and memory stored pages may use: arithmetic only. Others carry it out."""

from __future__ import annotations

import os

GIB = 1 << 30


def default_limit_bytes(free_bytes: int, context_bytes: int) -> int:
    """The budget when nobody sets one.

    Args:
        free_bytes: Free disk, what the cache holds already counted as free.
        context_bytes: K/V of one full context of the model.
    """
    return min(free_bytes // 10, max(4 * GIB, 2 * context_bytes))


def default_host_bytes() -> int:
    """Host memory for pages that leave the pool when nobody sets it: a tenth, 4 GiB at most."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such system
        return GIB
    return min(4 * GIB, total // 10)


def limit_warning(limit_bytes: int, context_bytes: int) -> str:
    """One sentence if not even one full context fits, else nothing."""
    if context_bytes <= limit_bytes:
        return ""
    return (
        f"One full context of this model takes {_mib(context_bytes)} on disk, and the page cache "
        f"may use {_mib(limit_bytes)}: long conversations will be computed again in part."
    )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
