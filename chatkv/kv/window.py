"""Which pages of a path are still of use where every layer sees a window only.

Keys of rows that no id to come sees need not be here: a path goes on from wherever what its next id
sees is known. Plain numbers; no page, no tensor. Places are positions: such models move none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from chatkv.kv.layout import Stage


def first_seen(stage: Stage, pages: int, page_size: int, window: int) -> int:
    """The first entry of which the id behind so many whole pages from the base on sees a row."""
    stop = stage.base + pages * page_size
    ends = [span.first + span.hi for span in stage.spans]
    ends += range(stage.base + page_size, stop + 1, page_size)
    return bisect_right(ends, stop - window + 1)


def most_pages(stage: Stage, known: Sequence[bool], page_size: int, window: int) -> int:
    """The most whole pages from the base on of which all that the id behind them sees is known.

    Args:
        known: One flag a whole page. Those of the stage's spans are not asked about.
    """
    best, missing = 0, -1
    for count in range(1, len(known) + 1):
        if not known[count - 1]:
            missing = count - 1
        elif missing < first_seen_page(stage, count, page_size, window):
            best = count
    return best


def first_seen_page(stage: Stage, pages: int, page_size: int, window: int) -> int:
    """`first_seen` among whole pages from the base on."""
    oldest = pages * page_size - window + 1
    return min(pages, max(0, oldest // page_size))
