"""How a prompt comes to its pages: found, proved, or computed; and how a path forgets. Knows a
model, a pool and a store; no drafts.

Given ids go through the model in chunks whose edges lie at fixed places of their run, so that a
chunk has the same shape, and so the same bits, whenever it is computed again. Chosen ids go through
the step, many rows at once, with the bits they had when they were chosen. An op ends a run: what
comes behind it is computed without what it drops, the first time and every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from chatkv.batch import chain_batch
from chatkv.errors import OutOfPages, StoreError
from chatkv.keeper import Keeper
from chatkv.kv.keys import op_key, page_key
from chatkv.kv.layout import Span, Stage, stages
from chatkv.kv.pool import PagePool
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.rebase import turn_page
from chatkv.kv.restore import Found, find_prefix, publish
from chatkv.kv.saver import PageSaver
from chatkv.kv.table import PageTable
from chatkv.kv.tiers import Lookup, Tiers
from chatkv.models.logits import Features
from chatkv.models.model import Model
from chatkv.sequence import Sequence
from chatkv.witness import Witness

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class PrefillReport:
    """How one prompt came to its pages. Tokens that nothing needs any more are not counted."""

    known: int = 0
    """Tokens from the first on that were computed before, as far as the caller knows."""
    reused: int = 0
    """Tokens found in the pool, in host memory or on disk."""
    host_tokens: int = 0
    """Of these, the ones in pages that came from host memory."""
    disk_tokens: int = 0
    """Of these, the ones in pages that came from disk."""
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
        self.keeper = Keeper(pool, prefix, saver, tiers, model.backend_name)
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
        self.keeper.save_links(seq)
        self.forget(seq)
        yield None
        reused, spent = seq.table.num_tokens, 0.0
        while (before := seq.table.num_tokens) < len(seq.tokens):
            begun = perf_counter()
            logits = self._part(seq, seq.table, len(seq.tokens))
            spent += perf_counter() - begun  # the last part waits for its logits, and so for all
            report.computed += seq.table.num_tokens - before
            self.keeper.remember(seq, before)
            self.forget(seq)
            if logits is not None and self.tiers is not None:
                chosen = sum(seq.sampled[reused : seq.table.num_tokens])
                self.tiers.rates.computed(report.computed - chosen, chosen, spent)
            yield logits

    def take_up(self, seq: Sequence) -> None:
        """Hold what is known of `seq`. No id is computed but to prove what comes from disk.

        Raises:
            OutOfPages: No room for keys at other positions. Nothing is held.
        """
        self._reuse(seq, PrefillReport())

    def forget(self, seq: Sequence) -> None:
        """Let go of what the ops at the place of the next id drop. Nothing is computed.

        Raises:
            OutOfPages: No room for keys at other positions; nothing is in place any more.
        """
        while (op := seq.next_op) is not None and op.at == seq.table.num_tokens:
            first, rows = self.keeper.tail(seq)
            if rows:
                self.keeper.keep(seq, first, rows)
            seq.table.forget(op, lambda span, page: self._turned(seq, span, page))
            self.keeper.save_links(seq)
        seq.expect_whole()

    # Found.

    def _reuse(self, seq: Sequence, report: PrefillReport) -> None:
        """Hold the most rows that are known; the last id is always computed, for its logits.

        Raises:
            OutOfPages: No room for keys at other positions. Nothing is held.
        """
        begun = perf_counter()
        tiers = self.tiers
        if self.saver is not None and self.saver.any_waits(lambda k: k not in self.prefix):
            self.saver.flush(1.0)  # what the pool has not is looked for on disk
        if tiers is not None:
            # To compute again what stands behind an op takes all ids, also those it dropped.
            # So it does to compute again what a window has left behind.
            window = seq.table.window
            hides = window is not None and len(seq.tokens) > window
            tiers.begin(compares=not seq.ops and not hides)
        known = len(seq.tokens) - 1
        steps = stages(seq.ops, self.pool.page_size)
        found = self._find(seq, tiers, steps, known)
        look = tiers.end() if tiers is not None else Lookup()
        self._adopt(seq, found)
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
                found = self._find(seq, None, steps, known)
                self._adopt(seq, found)
                report.reason, report.detail = "damaged", "witness"
            else:
                publish(self.prefix, found, self.pool.page_size)
        if found.restored:
            report.restore_ms = 1000 * (perf_counter() - begun)
        report.restored_pages, report.host_pages = look.disk_pages, len(look.host_keys)
        report.reused = found.num_reused
        report.host_tokens, report.disk_tokens = found.by_tier(look.host_keys, self.pool.page_size)
        if report.reason == "new" and found.num_tokens < report.known:
            report.reason, report.detail = self._why(seq, report, look)

    def _find(self, seq: Sequence, tiers: Tiers | None, steps: Seq[Stage], known: int) -> Found:
        window = seq.table.window
        return find_prefix(self.pool, self.prefix, tiers, seq.chain, steps, known, window)

    def _adopt(self, seq: Sequence, found: Found) -> None:
        """Fill the table with what was found, keys turned where positions have changed."""
        pages, turned = list(found.pages), dict[int, int]()
        try:
            for index, span in enumerate(found.stage.spans):
                if span.shift != span.own:
                    turned[index] = self._turned(seq, span, pages[index])
        except BaseException:
            for page in [*pages, *turned.values()]:
                self.pool.release(page)
            raise
        originals = {index: pages[index] for index in turned}
        for index, page in turned.items():
            pages[index] = page
        seq.table.adopt(pages, found.num_tokens, found.stage, originals, found.gone)

    def _turned(self, seq: Sequence, span: Span, page: int) -> int:
        """The page of a span with its keys at the positions they have now; held for the caller.

        Raises:
            OutOfPages: No room for it.
        """
        if span.shift == span.own:
            return self.pool.share(page)
        # Under a key of its own, behind nothing: an entry that is found or is made anew.
        stop = self.keeper.stop(seq, span)
        parent = op_key(seq.chain.key(span.first, stop), {"turn": span.shift - span.own})
        ids, sampled = seq.tokens[span.first : stop], seq.sampled[span.first : stop]
        key = page_key(parent, ids, sampled)
        if held := self.prefix.match([key]):
            return held[0]
        (turned,) = self.pool.take()
        frequencies = self.model.spec.rope_frequencies
        turn_page(self.pool, page, turned, span.shift - span.own, frequencies)
        self.prefix.insert(key, parent, turned, ids, sampled)
        return turned

    def _why(self, seq: Sequence, report: PrefillReport, look: Lookup) -> tuple[str, str]:
        """Why tokens that were computed before are computed again, and what goes with it."""
        tiers = self.tiers
        if look.plan is not None and not look.plan.restore:
            return "faster", look.plan.detail
        if tiers is None or tiers.disk is None:
            return "off", "pages are not stored"
        if not tiers.reads_disk:
            return "off", "nothing is read from disk (kv.restore never)"
        if self.saver is not None:
            self.saver.flush(1.0)
        gone = False
        with suppress(StoreError):  # a reason is worth no reply
            check = tiers.disk.quarantined(seq.chain.at(self.keeper.tail(seq)[0]))
            if check:
                return "damaged", check
            if seq.table.num_tokens < self.pool.page_size:
                fields = tiers.disk.other_models(seq.tokens, seq.sampled)
                if fields:
                    return "fingerprint", ", ".join(fields)
            gone = tiers.disk.snapshot(seq.chain.at(report.known)) is not None
        return "evicted" if gone else "not_stored", ""

    def _proved(self, seq: Sequence) -> bool | None:
        """Compute the last row with a witness again, over the restored pages; None without one."""
        assert self.saver is not None
        self.saver.flush(1.0)  # the witness may wait there
        table = seq.table
        for stop in _sampled_ends(seq.sampled, table.num_tokens + 1):
            length = stop - 1  # the last chosen id of a reply has no row
            if length <= max(1, table.first_cut):
                return None  # what that row saw is not all here
            snapshot = self.saver.store.snapshot(seq.chain.at(length))
            if snapshot is None:
                continue
            probe = table.fork()
            try:
                probe.truncate(length - 1)
                with probe.reserve(1) as reserved:
                    batch = chain_batch(
                        probe, seq.tokens[length - 1 : length], reserved.slots, want_logits=True
                    )
                    logits = self.model.step(batch, self.pool).row(0)
                    slot = table.slot(length - 1)
                    stored = self.pool.row(int(table.slots(slot, slot + 1)[0]))
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

        They are computed beside the sequence's own pages; without room for that nothing happens,
        nor for rows from before the last op: what they saw is not here any more.
        """
        probe = seq.table.fork()
        try:
            probe.truncate(max(start, probe.first_cut))
            while probe.num_tokens < stop:
                self._part(seq, probe, stop)
        except OutOfPages:
            pass
        finally:
            probe.release()

    def _part(self, seq: Sequence, table: PageTable, stop: int) -> Logits | None:
        """Compute ids behind what `table` holds: chosen ones in one step, or given ones to the end
        of their chunk, and none past an op; logits if they end the prompt. Rows from
        `stop - tap_rows` on are read.
        """
        known = table.num_tokens
        part = self._chain if seq.sampled[known] else self._chunk
        return part(seq, table, known, stop)

    def _chain(self, seq: Sequence, table: PageTable, known: int, stop: int) -> Logits | None:
        """Chosen ids, as one chain through the step."""
        end = min(self._end(seq, stop), known + self.model.max_step_rows)
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
        run = max(_given_start(seq.sampled, known), table.stage.base)
        first, size = self.model.chunk(known - run)
        start = run + first
        end = min(start + size, self._end(seq, stop))
        if True in seq.sampled[known:end]:
            end = known + seq.sampled[known:end].index(True)
        tapped = self._tapped(known, end, stop)
        with table.reserve(end - known) as reserved:
            logits = self.model.prefill(
                seq.tokens[known:end],
                table.slot(start),
                table.slot(known),
                reserved.slots,
                table.entries(),
                self.pool,
                chunk_rows=size,
                want_logits=end == len(seq.tokens),
                tapped=tapped,
                holes=table.holes(),
            )
            reserved.keep(range(end - known))
        if tapped and self.read is not None:
            self.read(seq.id, end - tapped, self.model.prompt_features(tapped))
        return logits

    def _tapped(self, known: int, end: int, stop: int) -> int:
        """How many of the rows up to `end` are read."""
        return max(0, min(end - known, end - (stop - self.tap_rows)))

    def _end(self, seq: Sequence, stop: int) -> int:
        """Up to which id the next ones may be computed: an op comes there, or that is all."""
        op = seq.next_op
        return stop if op is None else min(stop, op.at)


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
