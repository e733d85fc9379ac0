"""Which pages of a path are still of use where every layer sees a window only.

Keys of rows that no id to come sees need not be here: a path goes on from wherever what its next id
sees is known. Looks; holds and reads nothing. Places are positions: such models move none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv.kv.chain import Chain
from chatkv.kv.keys import common_tokens
from chatkv.kv.layout import Span, Stage

if TYPE_CHECKING:
    from chatkv.kv.prefix import PrefixCache
    from chatkv.kv.tiers import Tiers


@dataclass(frozen=True, slots=True)
class InSight:
    """Pages that a path can go on from, and where."""

    num_tokens: int
    """Ids that need not be computed."""
    pool: list[int]
    """Of the pages that the id behind them sees: rows of each in the pool,"""
    host: list[int]
    """in host memory,"""
    disk: list[int]
    """and on disk."""


def in_sight(
    prefix: PrefixCache, tiers: Tiers, chain: Chain, stage: Stage, end: int, window: int
) -> InSight | None:
    """What `restore.find_prefix` would find of whole pages; None if a page the stage closed and the
    next id sees is nowhere. Rows inside a page not counted.

    Args:
        end: How many ids may be reused.
    """
    size, closed = chain.size, len(stage.spans)
    spans = stage.filled(stage.base + (end - stage.base) // size * size, size)
    keys = [_key(chain, span) for span in spans]
    stored = tiers.find([key for key in keys if key not in prefix])
    known = [key in prefix or key in stored for key in keys]
    pages = most_pages(stage, known[closed:], size, window)
    found = InSight(stage.base + pages * size, [], [], [])
    for span in spans[first_seen(stage, pages, size, window) : closed + pages]:
        where = _where(prefix, tiers, chain, span)
        if where is None:
            return None
        {"pool": found.pool, "host": found.host, "disk": found.disk}[where].append(span.size)
    return found


def _where(prefix: PrefixCache, tiers: Tiers, chain: Chain, span: Span) -> str | None:
    """Where the rows of a span are: in its page, or in a longer one behind the same parent."""
    key, parent = _key(chain, span), chain.parent(span.first)
    rows = slice(span.first, span.first + span.hi)
    ids, flags = chain.ids[rows], chain.sampled[rows]
    if key in prefix:
        return "pool"
    for child in prefix.children(parent):
        if common_tokens(ids, flags, child.ids, child.sampled) == len(ids):
            return "pool"
    heads = [*tiers.find([key]).values(), *tiers.children(parent)]
    for head in heads:
        if common_tokens(ids, flags, head.token_ids, head.sampled) == len(ids):
            return "host" if tiers.host.peek(head.key) is not None else "disk"
    return None


def _key(chain: Chain, span: Span) -> bytes:
    return chain.key(span.first, chain.stop(span.first) or span.first + chain.size)


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
