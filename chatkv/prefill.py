"""How a prompt comes to its pages: found, proved, or computed. Knows a model, a pool and a store;
no drafts.

Given ids go through the model in chunks whose edges lie at fixed places of their run, so that a
chunk has the same shape, and so the same bits, whenever it is computed again. Chosen ids go through
the step, many rows at once, with the bits they had when they were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from chatkv.batch import chain_batch
from chatkv.errors import OutOfPages
from chatkv.kv.keys import page_keys
from chatkv.kv.planner import Rates
from chatkv.kv.pool import PagePool
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.restore import Found, find_prefix, publish
from chatkv.kv.saver import PageSaver
from chatkv.kv.store import Origin, PageHead
from chatkv.kv.table import PageTable
from chatkv.kv.tiers import Lookup, Tiers
from chatkv.models.logits import Features
from chatkv.models.model import Model
from chatkv.sequence import Sequence
from chatkv.witness import Witness

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class PrefillReport:
    """How one prompt came to its pages."""

    known: int = 0
    """Tokens from the first on that were computed before, as far as the caller knows."""
    reused: int = 0
    """Tokens found in the pool, in host memory or on disk."""
    computed: int = 0
    restored_pages: int = 0
    """From disk."""
    host_pages: int = 0
    """From host memory."""
    restore_ms: float = 0.0
    reason: str = "new"
    """Why the run of reused tokens ends where it does: `new`, or why known tokens were missed."""
    detail: str = ""
    """What goes with the reason: both estimates, the check that failed, the fields that differ."""
    verified: bool | None = None
    """Whether the model agreed with what came from disk; None if nothing did, or no witness was
    stored."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a prompt would cost, before anything is read or computed."""

    tokens: int
    pool_pages: int
    """Whole pages in place already."""
    host_pages: int
    disk_pages: int
    """That would be read; 0 where computing them is faster."""
    disk_bytes: int
    computed_tokens: int
    computed_pages: int
    """Pages that are made for them."""
    ms: float | None
    """Of reading and computing, about; None where nothing was measured yet."""


class Prompts:
    """Fills page tables. One a engine.

    Args:
        model: Computes what is not known.
        pool: Where pages live.
        prefix: Pages of the pool by key.
        saver: The way to disk, or None.
        tiers: What can be read besides the pool, or None.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        prefix: PrefixCache,
        saver: PageSaver | None,
        tiers: Tiers | None = None,
    ) -> None:
        self.model, self.pool, self.prefix, self.saver = model, pool, prefix, saver
        self.tiers = tiers
        self.tap_rows = 0
        """Last rows of a prompt whose tapped residuals somebody reads."""
        self.read: Callable[[int, int, Features], None] | None = None
        """Who: called with the sequence's id, the place of the first row, and the residuals."""

    def fill(self, seq: Sequence, report: PrefillReport) -> Iterator[Logits | None]:
        """Put every id of `seq` in place. Yields after each part; the last part's logits with it.

        Raises:
            OutOfPages: The pool cannot hold the prompt. What is in place stays in place.
        """
        self._reuse(seq, report)
        yield None
        spent = 0.0
        while (before := seq.table.length) < len(seq.tokens):
            begun = perf_counter()
            logits = self._part(seq, seq.table, len(seq.tokens))
            spent += perf_counter() - begun  # the last part waits for its logits, and so for all
            report.computed += seq.table.length - before
            self.remember(seq, before)
            if logits is not None and self.tiers is not None:
                chosen = sum(seq.sampled[report.reused : seq.table.length])
                self.tiers.rates.computed(report.computed - chosen, chosen, spent)
            yield logits

    def preview(self, root: bytes, tokens: list[int], sampled: list[bool]) -> Preview:
        """What `fill` would do for these tokens, by the same plan; rows inside a page not counted.

        Args:
            root: Key of the empty prefix.
            tokens: Ids of the path.
            sampled: One flag an id.
        """
        size = self.pool.page_size
        whole = len(tokens) // size * size
        keys = page_keys(root, tokens[:whole], sampled[:whole], size)
        pool = len(list(takewhile(self.prefix.__contains__, keys)))
        host, plan, rates = 0, None, Rates()
        if self.tiers is not None:
            host, plan = self.tiers.preview(keys[pool:])
            rates = self.tiers.rates
        read = plan.tokens if plan is not None and plan.restore else 0
        known = (pool + host) * size + read
        chosen = sum(sampled[known:])
        compute_s = rates.compute_s(len(tokens) - known - chosen, chosen)
        restore_s = plan.restore_s if plan is not None and read else 0.0
        ms = None
        if compute_s is not None and restore_s is not None:
            ms = 1000 * (compute_s + restore_s)
        return Preview(
            tokens=len(tokens),
            pool_pages=pool,
            host_pages=host,
            disk_pages=read // size,
            disk_bytes=plan.num_bytes if plan is not None and read else 0,
            computed_tokens=len(tokens) - known,
            computed_pages=self.pool.pages_for(len(tokens) - known),
            ms=ms,
        )

    def remember(self, seq: Sequence, before: int) -> None:
        """Offer the pages that became complete since `before` tokens to others, and to the disk."""
        size = self.pool.page_size
        for index in range(before // size, seq.table.length // size):
            self._keep(seq, index, size)

    def finish(self, seq: Sequence) -> None:
        """Keep the tail page and the witness too; offer again what the queue had no room for."""
        length, size = seq.table.length, self.pool.page_size
        if not length:
            return
        if length % size:
            self._keep(seq, length // size, length % size)
        if self.saver is None:
            return
        for index in sorted(seq.unsaved):
            self._save(seq, index, min(size, length - index * size))
        if self.tiers is not None and self.saver.on:
            store, rates = self.saver.store, self.tiers.rates.to_json()
            self.saver.after_pages(lambda: store.keep_rates(rates))
        if seq.last_logits is not None:
            witness = Witness.of(np.asarray(seq.last_logits))
            self.saver.after_pages(
                witness.snapshot(seq.key_at(length), length, self.model.backend_name)
            )

    # Found.

    def _reuse(self, seq: Sequence, report: PrefillReport) -> None:
        """Hold the longest run of known rows; the last id is always computed, for its logits."""
        begun = perf_counter()
        tiers = self.tiers
        if self.saver is not None:
            self.saver.flush(1.0)
        if tiers is not None:
            tiers.begin()
        known = len(seq.tokens) - 1
        ids, sampled = seq.tokens[:known], seq.sampled[:known]
        found = find_prefix(self.pool, self.prefix, tiers, seq.root_key, ids, sampled)
        look = tiers.end() if tiers is not None else Lookup()
        seq.table.adopt(found.pages, found.num_tokens)
        report.reason = found.reason
        if found.restored and not look.disk_pages:
            publish(self.prefix, found, self.pool.page_size)  # our own, from memory
        elif found.restored:
            try:
                report.verified = self._proved(seq)
            except OutOfPages:
                report.verified = None  # no room for the one row of the check
            if report.verified is None and not self._are_numbers(found):
                report.verified = False
            if report.verified is False:
                self._distrust(seq, found)
                look = Lookup()
                found = find_prefix(self.pool, self.prefix, None, seq.root_key, ids, sampled)
                seq.table.adopt(found.pages, found.num_tokens)
                report.reason, report.detail = "damaged", "witness"
            else:
                publish(self.prefix, found, self.pool.page_size)
        if found.restored:
            report.restore_ms = 1000 * (perf_counter() - begun)
        report.restored_pages, report.host_pages = look.disk_pages, look.host_pages
        report.reused = seq.table.length
        if report.reason == "new" and report.reused < report.known:
            report.reason, report.detail = self._why(seq, report, look)

    def _why(self, seq: Sequence, report: PrefillReport, look: Lookup) -> tuple[str, str]:
        """Why tokens that were computed before are computed again, and what goes with it."""
        tiers = self.tiers
        if look.plan is not None and not look.plan.restore:
            return "faster", look.plan.detail
        if tiers is None or tiers.disk is None:
            return "off", "pages are not stored"
        if not tiers.reads_disk:
            return "off", "nothing is read from disk (kv.restore never)"
        size = self.pool.page_size
        check = tiers.disk.quarantined(seq.key_at(report.reused // size * size))
        if check:
            return "damaged", check
        if report.reused < size:
            fields = tiers.disk.other_models(seq.tokens, seq.sampled)
            if fields:
                return "fingerprint", ", ".join(fields)
        gone = tiers.disk.snapshot(seq.key_at(report.known)) is not None
        return "evicted" if gone else "not_stored", ""

    def _proved(self, seq: Sequence) -> bool | None:
        """Compute the last row with a witness again, over the restored pages; None without one."""
        assert self.saver is not None
        for stop in _sampled_ends(seq.sampled, seq.table.length + 1):
            length = stop - 1  # the last chosen id of a reply has no row
            snapshot = self.saver.store.snapshot(seq.key_at(length)) if length > 1 else None
            if snapshot is None:
                continue
            probe = seq.table.fork()
            try:
                probe.truncate(length - 1)
                with probe.reserve(1) as reserved:
                    batch = chain_batch(
                        probe, seq.tokens[length - 1 : length], reserved.slots, want_logits=True
                    )
                    logits = self.model.step(batch, self.pool).row(0)
                    stored = self.pool.row(int(seq.table.slots(length - 1, length)[0]))
                    same = torch.equal(stored, self.pool.row(int(reserved.slots[0])))
            finally:
                probe.release()
            return same and Witness.of(logits).agrees(snapshot)
        return None

    def _are_numbers(self, found: Found) -> bool:
        """What can be said of restored pages that no witness speaks for."""
        return all(self.pool.are_numbers(page, head.num_tokens) for page, head in found.restored)

    def _distrust(self, seq: Sequence, found: Found) -> None:
        """The model disagrees: what was read, and what was built on it, is not read again."""
        saver = self.saver
        assert saver is not None
        assert self.tiers is not None
        self.tiers.host.clear()
        key = found.restored[0][1].key
        saver.after_pages(lambda: _quarantine(saver, key))
        saver.flush(1.0)
        seq.table.truncate(0)

    # Computed.

    def look_again(self, seq: Sequence, start: int, stop: int) -> None:
        """Let the reader have rows [start, stop), which are in place, as if they were new.

        They are computed beside the sequence's own pages; without room for that nothing happens.
        """
        probe = seq.table.fork()
        try:
            probe.truncate(start)
            while probe.length < stop:
                self._part(seq, probe, stop)
        except OutOfPages:
            pass
        finally:
            probe.release()

    def _part(self, seq: Sequence, table: PageTable, stop: int) -> Logits | None:
        """Compute ids behind what `table` holds: chosen ones in one step, or given ones to the end
        of their chunk; logits if they end the prompt. Rows from `stop - tap_rows` on are read.
        """
        known = table.length
        part = self._chain if seq.sampled[known] else self._chunk
        return part(seq, table, known, stop)

    def _chain(self, seq: Sequence, table: PageTable, known: int, stop: int) -> Logits | None:
        """Chosen ids, as one chain through the step."""
        end = min(stop, known + self.model.max_step_rows)
        while not all(seq.sampled[known:end]):
            end = known + seq.sampled[known:end].index(False)
        tapped = self._tapped(known, end, stop)
        wanted = end == len(seq.tokens)
        with table.reserve(end - known) as reserved:
            ids = seq.tokens[known:end]
            batch = chain_batch(table, ids, reserved.slots, want_logits=wanted, tapped=tapped)
            result = self.model.step(batch, self.pool)
            logits = result.row(0) if wanted else None
            reserved.keep(range(end - known))
        if tapped and self.read is not None:
            rows = range(end - known - tapped, end - known)
            self.read(seq.id, end - tapped, result.features(rows))
        return logits

    def _chunk(self, seq: Sequence, table: PageTable, known: int, stop: int) -> Logits | None:
        """Given ids, to the end of their chunk."""
        run = _given_start(seq.sampled, known)
        first, size = self.model.chunk(known - run)
        start = run + first
        end = min(start + size, stop)
        if True in seq.sampled[known:end]:
            end = known + seq.sampled[known:end].index(True)
        tapped = self._tapped(known, end, stop)
        with table.reserve(end - known) as reserved:
            logits = self.model.prefill(
                seq.tokens[known:end],
                start,
                known,
                reserved.slots,
                table.entries(),
                self.pool,
                chunk_rows=size,
                want_logits=end == len(seq.tokens),
                tapped=tapped,
            )
            reserved.keep(range(end - known))
        if tapped and self.read is not None:
            self.read(seq.id, end - tapped, self.model.prompt_features(tapped))
        return logits

    def _tapped(self, known: int, end: int, stop: int) -> int:
        """How many of the rows up to `end` are read."""
        return max(0, min(end - known, end - (stop - self.tap_rows)))

    # Kept.

    def _keep(self, seq: Sequence, index: int, rows: int) -> None:
        """Share a page that will not be written again with whoever has the same prefix."""
        start = index * self.pool.page_size
        ids, flags = seq.tokens[start : start + rows], seq.sampled[start : start + rows]
        key = seq.key_at(start + rows)
        self.prefix.insert(key, seq.parent_key(index), seq.table.pages[index], ids, flags)
        self._save(seq, index, rows)

    def _save(self, seq: Sequence, index: int, rows: int) -> None:
        if self.saver is None or not self.saver.on:
            return
        start = index * self.pool.page_size
        flags = tuple(seq.sampled[start : start + rows])
        origin: Origin = "step" if all(flags) else "mixed" if any(flags) else "chunk"
        head = PageHead(
            key=seq.key_at(start + rows),
            parent_key=seq.parent_key(index),
            chain_index=index,
            first_position=start,
            token_ids=tuple(seq.tokens[start : start + rows]),
            sampled=flags,
            origin=origin,
        )
        page = seq.table.pages[index]
        num_bytes = self.pool.payload_bytes(rows)
        if self.saver.put(head, num_bytes, lambda: self.pool.read(page, rows)):
            seq.unsaved.discard(index)
        else:
            seq.unsaved.add(index)


def _quarantine(saver: PageSaver, key: bytes) -> None:
    saver.store.quarantine(key, "witness", descendants=True)


def _given_start(sampled: list[bool], index: int) -> int:
    """Where the run of given ids that holds `index` begins."""
    while index and not sampled[index - 1]:
        index -= 1
    return index


def _sampled_ends(sampled: list[bool], limit: int) -> Iterator[int]:
    """Ends of the runs of chosen ids up to `limit`, the last first."""
    for stop in range(min(limit, len(sampled)), 0, -1):
        if sampled[stop - 1] and (stop == len(sampled) or not sampled[stop]):
            yield stop
