"""What is already known of a prompt: pages in the pool, then pages on disk, then rows inside a
page.

Knows keys, pages and the store's protocol; no model. Whether what was read is right in the model's
own eyes is checked by the engine before `publish` lets others see it.

Of a path that forgot, only what it still sees is looked for: behind its last op if all of that is
known, else behind the one before. Where every layer has a window, only what the next id sees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from chatkv.errors import OutOfPages, StoreError
from chatkv.kv.chain import Chain
from chatkv.kv.keys import common_tokens
from chatkv.kv.layout import Span, Stage
from chatkv.kv.pool import PagePool
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.store import PageHead, PageImage, Readable
from chatkv.kv.window import first_seen, most_pages


@dataclass(slots=True)
class Found:
    """Pages that hold the first `num_tokens` ids, as far as these are in sight. The caller owns one
    reference on each."""

    stage: Stage = field(default_factory=Stage)
    pages: list[int] = field(default_factory=list[int])
    """Of the stage's spans, keys as first computed; then those filled behind its base. The last
    page may hold more rows than are ours."""
    gone: int = 0
    """First entries that no id to come sees: `pages` holds those behind."""
    num_tokens: int = 0
    restored: list[tuple[int, PageHead]] = field(default_factory=list[tuple[int, PageHead]])
    """Pages that came from disk, and what they are. Nobody else sees them before `publish`."""
    reason: str = "new"
    """Why the run ends where it does: `new`, `damaged` or `evicted` (no room in the pool)."""

    @property
    def num_reused(self) -> int:
        """Ids in sight that need not be computed."""
        return self.stage.live + self.num_tokens - self.stage.base

    def sizes(self, page_size: int) -> list[int]:
        """How many of these ids each of `pages` holds."""
        starts = range(self.stage.base, self.num_tokens, page_size)
        behind = [min(page_size, self.num_tokens - start) for start in starts]
        return [*(span.size for span in self.stage.spans), *behind][self.gone :]

    def by_tier(self, host_keys: Collection[bytes], page_size: int) -> tuple[int, int]:
        """Reused ids in pages that came from host memory, which has those keys, and from disk."""
        keys = {page: head.key for page, head in self.restored}
        host = disk = 0
        for page, size in zip(self.pages, self.sizes(page_size), strict=True):
            key = keys.get(page)
            if key is not None and key in host_keys:
                host += size
            elif key is not None:
                disk += size
        return host, disk


def find_prefix(
    pool: PagePool,
    prefix: PrefixCache,
    store: Readable | None,
    chain: Chain,
    stages: Sequence[Stage],
    known: int,
    window: int | None = None,
) -> Found:
    """The most ids of a path whose rows are known, as far as they are in sight.

    Args:
        chain: Of the path.
        stages: Before and behind each of its ops.
        known: How many of its ids may be reused.
        window: Positions behind which no layer sees anything; None if one sees all.

    Raises:
        OutOfPages: Never; what does not fit is left out.
    """
    search = _Search(pool, prefix, store, chain, window)
    ends = [*(stage.base for stage in stages[1:]), known]
    tries = [(stage, min(end, known)) for stage, end in zip(stages, ends, strict=True)]
    tries = [one for one in tries if one[0].base <= known]
    while True:
        stage, end = tries.pop()
        found = search.run(stage, end)
        if found is not None:
            break
    if not tries or not found.restored or found.num_tokens > stage.base:
        return found
    # Nothing stands behind the op yet, so nothing there can prove what came from disk: look before.
    before, end = max(
        (one for one in tries if one[0].base < stage.base), key=lambda one: one[0].base,
        default=(None, 0),
    )  # fmt: skip
    earlier = None if before is None else search.run(before, end)
    if earlier is None or earlier.num_tokens < stage.base:
        search.release(earlier)
        return found
    search.release(found)
    return earlier


def publish(prefix: PrefixCache, found: Found, page_size: int) -> None:
    """Let other sequences find the pages that came from disk, but for one that is written on."""
    last = found.pages[-1] if found.pages and found.num_tokens > found.stage.base else None
    for page, head in found.restored:
        if head.num_tokens == page_size or page != last:
            prefix.insert(head.key, head.parent_key, page, head.token_ids, head.sampled)


class _Search:
    """Looks for one path's pages in the pool, then on disk."""

    def __init__(
        self, pool: PagePool, prefix: PrefixCache, store: Readable | None, chain: Chain,
        window: int | None,
    ) -> None:  # fmt: skip
        self.pool, self.prefix, self.store, self.chain = pool, prefix, store, chain
        self.window = window
        self._unread: set[bytes] = set()
        """Keys of pages that are stored and could not be read."""

    def run(self, stage: Stage, end: int) -> Found | None:
        """All that a stage closed, then as much as is known up to `end`.

        None if anything of the former is missing, and nothing is held then.
        """
        if self.window is not None and end > self.window:
            return self._run_in_window(stage, end, self.window)
        found = Found(stage)
        whole = False
        try:
            whole = self._closed(stage.spans, found)
            if whole:
                found.num_tokens = stage.base
                self._follow(stage.base, end, found)
        except OutOfPages:
            found.reason = "evicted"
        except StoreError:
            found.reason = "damaged"
        except BaseException:  # nobody will own what was found
            self.release(found)
            raise
        if whole or not stage.spans:
            keys = [self._key(span) for span in stage.spans]
            self.prefix.touch(keys)
            return found
        self.release(found)
        return None

    def _run_in_window(self, stage: Stage, end: int, window: int) -> Found | None:
        """As `run`, where what the next id does not see need not be known."""
        size, closed = self.pool.page_size, len(stage.spans)
        spans = stage.filled(stage.base + (end - stage.base) // size * size, size)
        reason = "new"
        while True:
            pages = most_pages(stage, self._known(spans[closed:]), size, window)
            found = Found(stage, gone=first_seen(stage, pages, size, window))
            seen, failed = spans[found.gone : closed + pages], len(self._unread)
            try:
                if self._closed(seen, found):
                    found.num_tokens = stage.base + pages * size
                    self._edge(end, found)
                    self.prefix.touch([self._key(span) for span in seen])
                    return found
            except OutOfPages:
                reason = "evicted"
            except StoreError:
                reason = "damaged"
            except BaseException:  # nobody will own what was found
                self.release(found)
                raise
            self.release(found)
            if reason != "new" or failed == len(self._unread):
                return None if stage.spans else Found(stage, reason=reason)

    def _known(self, spans: Sequence[Span]) -> list[bool]:
        """Which of these pages are in the pool, or can be read as far as anybody knows."""
        keys = [self._key(span) for span in spans]
        rest = [key for key in keys if key not in self.prefix]
        stored = set(self.store.find(rest) if self.store is not None and rest else ())
        return [key in self.prefix or key in stored - self._unread for key in keys]

    def release(self, found: Found | None) -> None:
        """Let go of what was found."""
        for page in found.pages if found is not None else ():
            self.pool.release(page)

    def _closed(self, spans: Sequence[Span], found: Found) -> bool:
        """The page of each span; False if one is nowhere."""
        pages: dict[int, int] = {}
        for index, span in enumerate(spans):
            ids, sampled = self._ids(span.first, span.first + span.hi)
            parent = self.chain.parent(span.first)
            page = self.prefix.hold(self._key(span), parent, ids, sampled)
            if page is not None:
                pages[index] = page
        found.pages = list(pages.values())
        missing = [index for index in range(len(spans)) if index not in pages]
        stored = self._stored([spans[index] for index in missing])
        if stored is None:
            return False
        read: dict[int, int] = {}
        for index in missing:
            first = spans[index].first
            if first in read:  # a gap inside a page leaves two spans of it
                found.pages.append(self.pool.share(read[first]))
            else:
                image = self._read(stored[first])
                if image is None:
                    self._unread.add(stored[first])
                    return False
                read[first] = self._load(image, found)
            pages[index] = read[first]
        found.pages = [pages[index] for index in range(len(spans))]
        return True

    def _stored(self, spans: Sequence[Span]) -> dict[int, bytes] | None:
        """Keys of stored pages that hold the rows of these spans, by first place; None if one of
        them is not stored."""
        if self.store is None:
            return None if spans else {}
        keys = {span.first: self._key(span) for span in spans}
        held = set(self.store.find(list(keys.values())))
        for span in spans:
            if keys[span.first] in held:
                continue
            ids, sampled = self._ids(span.first, span.first + span.hi)
            for child in self.store.children(self.chain.parent(span.first)):
                if common_tokens(ids, sampled, child.token_ids, child.sampled) == len(ids):
                    keys[span.first] = child.key
                    break
            else:
                return None
        return keys

    def _follow(self, base: int, end: int, found: Found) -> None:
        """Whole pages from `base` on, then rows inside one."""
        size = self.pool.page_size
        starts = range(base, base + (end - base) // size * size, size)
        keys = [self.chain.key(start, start + size) for start in starts]
        pages = self.prefix.match(keys)
        found.pages += pages
        found.num_tokens += len(pages) * size
        missing = keys[len(pages) :]
        if self.store is not None and missing:
            for image in self.store.read(missing):
                self._load(image, found)
                found.num_tokens += image.num_tokens
        self._edge(end, found)

    def _edge(self, end: int, found: Found) -> None:
        """Rows of a page that shares its first ids with ours: a tail, a fork, an edit."""
        start = found.num_tokens
        rest, flags = self._ids(start, min(end, start + self.pool.page_size))
        if not rest:
            return
        parent = self.chain.parent(start)
        edge = self.prefix.edge(parent, rest, flags)
        rows = 0
        if edge is not None:
            page, rows = edge
            found.pages.append(page)
            found.num_tokens += rows
        best, common = None, rows
        for child in self.store.children(parent) if self.store is not None else ():
            shared = common_tokens(rest, flags, child.token_ids, child.sampled)
            if shared > common:
                best, common = child, shared
        image = None if best is None else self._read(best.key)
        if image is None:
            return
        (page,) = self.pool.take()
        if rows:
            self.pool.release(found.pages.pop())
        self._fill(page, image, found)
        found.num_tokens += common - rows

    def _read(self, key: bytes) -> PageImage | None:
        assert self.store is not None
        return next(iter(self.store.read([key])), None)

    def _load(self, image: PageImage, found: Found) -> int:
        (page,) = self.pool.take()
        self._fill(page, image, found)
        return page

    def _fill(self, page: int, image: PageImage, found: Found) -> None:
        found.pages.append(page)
        found.restored.append((page, image.head))
        self.pool.load(page, image.payload, image.num_tokens)

    def _key(self, span: Span) -> bytes:
        stop = self.chain.stop(span.first) or span.first + self.pool.page_size
        return self.chain.key(span.first, stop)

    def _ids(self, start: int, stop: int) -> tuple[Sequence[int], Sequence[bool]]:
        return self.chain.ids[start:stop], self.chain.sampled[start:stop]
