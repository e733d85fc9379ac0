"""How much disk the page cache may use: arithmetic only. `pages.py` carries it out."""

from __future__ import annotations

GIB = 1 << 30


def default_limit_bytes(free_bytes: int, context_bytes: int) -> int:
    """The budget when nobody sets one.

    Args:
        free_bytes: Free disk, what the cache holds already counted as free.
        context_bytes: K/V of one full context of the model.
    """
    return min(free_bytes // 10, max(4 * GIB, 2 * context_bytes))


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
