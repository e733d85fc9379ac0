"""Pages go to disk behind the decode loop. The loop never waits for the disk.

What writes takes time from what computes: SQLite, its journal and the kernel need the cores that a
step is spread over, and a step waits for its slowest core. So pages wait while a reply runs, and
are written between replies; of a long one only those that half of the queue has no room for.

Knows the store's protocol and a queue; no tensor, no sequence. A failure turns saving off for this
run, a store that is busy costs the pages of one commit: they are a cache, so nothing is lost but
the time to compute them again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from chatkv.errors import ChatKVError, StoreBusy
from chatkv.kv.staging import Pending
from chatkv.kv.store import PageHead, PageImage, PageStore, Snapshot

BATCH = 8
"""Pages in one commit."""
OFF = "Pages are not saved any more"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A page in the queue, its rows perhaps still on their way from the device."""

    head: PageHead
    num_bytes: int
    payload: Pending


_Work = _Waiting | Snapshot | Callable[[], None]


class PageSaver:
    """A writer thread with a bounded queue.

    Args:
        store: Where pages go. Only this thread writes to it.
        queue_bytes: Bytes that may wait. When they are reached the *newest* page is skipped, so
            that what is stored stays a prefix; the sweep at the end of the turn offers it again.
            Half of them may wait for the end of a reply: what a crash can cost.
    """

    def __init__(self, store: PageStore, *, queue_bytes: int) -> None:
        self.store = store
        self.queue_bytes = queue_bytes
        self.notice = ""
        """Why saving is off, in one sentence; empty while it is on."""
        self.skipped = 0
        self._queue: deque[_Work] = deque()
        self._doing: list[_Work] = []
        self._queued_bytes = 0
        self._closed = False
        self._held = False
        self._flushes = 0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="page-saver", daemon=True)
        self._thread.start()

    @property
    def on(self) -> bool:
        """Whether what is offered is still stored."""
        return not self.notice and not self._closed

    def put(self, head: PageHead, num_bytes: int, read: Callable[[], Pending]) -> bool:
        """Queue a page; False if it was skipped. Never blocks.

        Args:
            head: What it is.
            num_bytes: Of its rows.
            read: Begins to bring its rows; called only if there is room.
        """
        with self._wake:
            if not self.on:
                return False
            if self._queued_bytes + num_bytes > self.queue_bytes:
                self.skipped += 1
                return False
            self._queue.append(_Waiting(head, num_bytes, read()))
            self._queued_bytes += num_bytes
            self._wake_writer()
        return True

    def after_pages(self, work: Snapshot | Callable[[], None]) -> None:
        """Queue a snapshot, or a small job on the store, behind the pages put so far."""
        with self._wake:
            if self.on:
                self._queue.append(work)
                self._wake_writer()

    def hold(self) -> None:
        """A reply begins: pages wait for its end, or for half of the queue to be full."""
        with self._wake:
            self._held = True

    def release(self) -> None:
        """No reply runs any more: write what waits."""
        with self._wake:
            self._held = False
            self._wake_writer()

    def any_waits(self, missing: Callable[[bytes], bool]) -> bool:
        """Whether a page is not written yet whose key `missing` says yes to."""
        with self._wake:
            waiting = [*self._doing, *self._queue]
        return any(isinstance(one, _Waiting) and missing(one.head.key) for one in waiting)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is empty, also while a reply runs; False if it was not in time."""
        deadline = monotonic() + timeout_s
        with self._wake:
            self._flushes += 1
            self._wake_writer()
            try:
                while self._queue or self._doing:
                    left = deadline - monotonic()
                    if left <= 0 or not self._thread.is_alive():
                        return False
                    self._wake.wait(left)
            finally:
                self._flushes -= 1
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Store what waits and end the thread: `timeout_s` in all. A write that takes longer is
        left behind; what it leaves of its transaction is undone by whoever opens the store next."""
        deadline = monotonic() + timeout_s
        self.flush(timeout_s)
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._wake.notify_all()
        self._thread.join(max(0.0, deadline - monotonic()))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._has_work() and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                work = self._doing = self._next()
            try:
                self._do(work)
            except StoreBusy:
                self.skipped += sum(isinstance(one, _Waiting) for one in work)
            except ChatKVError as error:
                self._turn_off(error.message)
            except BaseException as error:  # noqa: BLE001 - a dead writer must be seen, not silent
                self._turn_off(f"{type(error).__name__}: {error}")
            finally:
                with self._wake:
                    self._doing = []
                    self._wake.notify_all()

    def _has_work(self) -> bool:
        """Whether to write now."""
        waits = self._held and not self._flushes and 2 * self._queued_bytes <= self.queue_bytes
        return bool(self._queue) and not waits

    def _wake_writer(self) -> None:
        # Those who flush wait for the same: waking one could wake the wrong one.
        if self._has_work():
            self._wake.notify_all()

    def _next(self) -> list[_Work]:
        """The next batch of pages, or the one other job at the head of the queue."""
        pages: list[_Work] = []
        while self._queue and len(pages) < BATCH:
            head = self._queue[0]
            if not isinstance(head, _Waiting):
                break
            pages.append(self._queue.popleft())
            self._queued_bytes -= head.num_bytes
        return pages or [self._queue.popleft()]

    def _do(self, work: list[_Work]) -> None:
        pages: list[PageImage] = []
        for one in work:
            if isinstance(one, Snapshot):
                self.store.save_snapshot(one)
            elif isinstance(one, _Waiting):
                pages.append(PageImage.of(one.head, one.payload()))
            else:
                one()
        if pages:
            self.store.write(pages)

    def _turn_off(self, reason: str) -> None:
        with self._wake:
            self.notice = reason if reason.startswith(OFF) else f"{OFF}: {reason}"
            self._queue.clear()
            self._queued_bytes = 0
