"""Where pages that are in place go: to others with the same prefix, and to the disk. Computes
nothing.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from chatkv.kv.layout import Span
from chatkv.kv.pool import PagePool
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.saver import PageSaver
from chatkv.kv.store import Origin, PageHead
from chatkv.kv.tiers import Tiers
from chatkv.sequence import Sequence
from chatkv.witness import Witness


class Keeper:
    """Shares and saves the pages of sequences. One a engine.

    Args:
        pool: Where pages live.
        prefix: Pages of the pool by key.
        saver: The way to disk, or None.
        tiers: What can be read besides the pool, or None.
        backend_name: Who computed them, for the witness.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache,
        saver: PageSaver | None,
        tiers: Tiers | None,
        backend_name: str,
    ) -> None:
        self.pool, self.prefix, self.saver = pool, prefix, saver
        self.tiers, self.backend_name = tiers, backend_name

    def remember(self, seq: Sequence, before: int) -> None:
        """Offer the pages that became complete since `before` ids to others, and to the disk; then
        let go of those that no layer will look at again."""
        size, base = self.pool.page_size, seq.table.stage.base
        done = (before - base) // size
        for first in range(base + done * size, seq.table.num_tokens - size + 1, size):
            self.keep(seq, first, size)
        seq.table.let_go()

    def finish(self, seq: Sequence) -> None:
        """Keep the tail page and the witness too; offer again what the queue had no room for."""
        table = seq.table
        if not table.num_tokens:
            return
        first, rows = self.tail(seq)
        if rows:
            self.keep(seq, first, rows)
        # What it sees is what it will look for: behind its last op, and what is left from before.
        spans = table.spans()
        stops = [min(self.stop(seq, span), table.num_tokens) for span in spans]
        keys = [seq.chain.key(span.first, stop) for span, stop in zip(spans, stops, strict=True)]
        self.prefix.touch(keys[table.gone :])
        if self.saver is None:
            return
        for entry, (span, stop, key) in enumerate(zip(spans, stops, keys, strict=True)):
            if span.first not in seq.unsaved:
                continue
            if entry >= table.gone:
                page = table.originals.get(entry, table.page(entry))
                self._save(seq, span.first, stop - span.first, page)
            for page in self.prefix.match([key]) if entry < table.gone else ():
                self._save(seq, span.first, stop - span.first, page)
                self.pool.release(page)
        if self.tiers is not None and self.saver.on:
            store, rates = self.saver.store, self.tiers.rates.to_json()
            self.saver.after_pages(lambda: store.keep_rates(rates))
        if seq.last_logits is not None:
            witness = Witness.of(np.asarray(seq.last_logits))
            length = table.num_tokens
            self.saver.after_pages(
                witness.snapshot(seq.chain.at(length), length, self.backend_name)
            )

    def tail(self, seq: Sequence) -> tuple[int, int]:
        """(place of its first id, rows) of the open page; no rows where there is none."""
        base = seq.table.stage.base
        rows = (seq.table.num_tokens - base) % self.pool.page_size
        return seq.table.num_tokens - rows, rows

    def stop(self, seq: Sequence, span: Span) -> int:
        """Where the page behind a span ends, however little of it is seen."""
        return seq.chain.stop(span.first) or span.first + self.pool.page_size

    def keep(self, seq: Sequence, first: int, rows: int) -> None:
        """Share a page that will not be written again with whoever has the same prefix."""
        ids, flags = seq.tokens[first : first + rows], seq.sampled[first : first + rows]
        key, parent = seq.chain.key(first, first + rows), seq.chain.parent(first)
        page = seq.table.page(seq.table.slot(first) // self.pool.page_size)
        self.prefix.insert(key, parent, page, ids, flags)
        self._save(seq, first, rows, page)

    def _save(self, seq: Sequence, first: int, rows: int, page: int) -> None:
        if self.saver is None or not self.saver.on:
            return
        stop = first + rows
        flags = tuple(seq.sampled[first:stop])
        origin: Origin = "step" if all(flags) else "mixed" if any(flags) else "chunk"
        head = PageHead(
            key=seq.chain.key(first, stop),
            parent_key=seq.chain.parent(first),
            chain_index=seq.chain.index(first),
            first_position=first,
            token_ids=tuple(seq.tokens[first:stop]),
            sampled=flags,
            origin=origin,
        )
        num_bytes = self.pool.payload_bytes(rows)
        if self.saver.put(head, num_bytes, lambda: self.pool.read(page, rows)):
            seq.unsaved.discard(first)
        else:
            seq.unsaved.add(first)

    def save_links(self, seq: Sequence) -> None:
        """Say which ops the pages to come stand behind, or the disk takes them for litter."""
        if self.saver is None:
            return
        for link in seq.chain.links[: seq.ops_done]:
            if link.op.at == seq.table.stage.base:
                self.saver.after_pages(partial(self.saver.store.save_link, link))
