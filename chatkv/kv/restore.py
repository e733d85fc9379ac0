"""What is already known of a prompt: pages in the pool, then pages on disk, then rows inside a
page.

Knows keys, pages and the store's protocol; no model. Whether what was read is right in the model's
own eyes is checked by the engine before `publish` lets others see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatkv.errors import OutOfPages, StoreError
from chatkv.kv.keys import common_tokens, page_keys
from chatkv.kv.pool import PagePool
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.store import PageHead, Readable


@dataclass(slots=True)
class Found:
    """A run of pages from the first token on. The caller owns one reference on each page."""

    pages: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    """Tokens whose rows are in them; the last page may hold more rows than that."""
    restored: list[tuple[int, PageHead]] = field(default_factory=list[tuple[int, PageHead]])
    """Pages that came from disk, and what they are. Nobody else sees them before `publish`."""
    reason: str = "new"
    """Why the run ends where it does: `new`, `damaged` or `evicted` (no room in the pool)."""


def find_prefix(
    pool: PagePool,
    prefix: PrefixCache,
    store: Readable | None,
    root: bytes,
    ids: Sequence[int],
    sampled: Sequence[bool],
) -> Found:
    """The longest run of known rows for `ids`, its pages held for the caller.

    Args:
        root: Key of the empty prefix.
        ids: Token ids that may be reused, from the first on.
        sampled: One flag an id.

    Raises:
        OutOfPages: Never; what does not fit is left out.
    """
    size = pool.page_size
    keys = page_keys(root, ids[: len(ids) // size * size], sampled[: len(ids) // size * size], size)
    found = Found(pages=prefix.match(keys))
    found.num_tokens = len(found.pages) * size
    try:
        if store is not None:
            _read_whole(pool, store, keys, found)
        _read_edge(pool, prefix, store, keys, root, ids, sampled, found)
    except OutOfPages:
        found.reason = "evicted"
    except StoreError:
        found.reason = "damaged"
    except BaseException:  # nobody will own what was found
        for page in found.pages:
            pool.release(page)
        raise
    return found


def publish(prefix: PrefixCache, found: Found, page_size: int) -> None:
    """Let other sequences find the whole pages that came from disk."""
    for page, head in found.restored:
        if head.num_tokens == page_size:
            prefix.insert(head.key, head.parent_key, page, head.token_ids, head.sampled)


def _read_whole(pool: PagePool, store: Readable, keys: list[bytes], found: Found) -> None:
    """Whole pages behind the ones found, in order, until one is missing or fails its checks."""
    missing = keys[len(found.pages) :]
    if not missing:
        return
    for image in store.read(missing):
        (page,) = pool.take()
        found.pages.append(page)
        found.restored.append((page, image.head))
        pool.load(page, image.payload, image.num_tokens)
        found.num_tokens += image.num_tokens


def _read_edge(
    pool: PagePool,
    prefix: PrefixCache,
    store: Readable | None,
    keys: list[bytes],
    root: bytes,
    ids: Sequence[int],
    sampled: Sequence[bool],
    found: Found,
) -> None:
    """Rows of a page that shares its first ids with ours: a tail, a fork, an edit."""
    start = found.num_tokens
    rest, flags = ids[start : start + pool.page_size], sampled[start : start + pool.page_size]
    if not rest:
        return
    parent = keys[len(found.pages) - 1] if found.pages else root
    edge = prefix.edge(parent, rest, flags)
    rows = 0
    if edge is not None:
        page, rows = edge
        found.pages.append(page)
        found.num_tokens += rows
    best, common = None, rows
    for child in store.children(parent) if store is not None else ():
        shared = common_tokens(rest, flags, child.token_ids, child.sampled)
        if shared > common:
            best, common = child, shared
    if store is None or best is None:
        return
    for image in store.read([best.key]):
        (page,) = pool.take()
        if rows:
            pool.release(found.pages.pop())
        found.pages.append(page)
        found.num_tokens += common - rows
        found.restored.append((page, image.head))
        pool.load(page, image.payload, image.num_tokens)
