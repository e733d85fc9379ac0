"""Pages go to disk behind the decode loop. The loop never waits for the disk.

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


class PageSaver:
    """A writer thread with a bounded queue.

    Args:
        store: Where pages go. Only this thread writes to it.
        queue_bytes: Bytes that may wait. When they are reached the *newest* page is skipped, so
            that what is stored stays a prefix; the sweep at the end of the turn offers it again.
    """

    def __init__(self, store: PageStore, *, queue_bytes: int) -> None:
        self.store = store
        self.queue_bytes = queue_bytes
        self.notice = ""
        """Why saving is off, in one sentence; empty while it is on."""
        self.skipped = 0
        self._queue: deque[_Waiting | Snapshot | Callable[[], None]] = deque()
        self._queued_bytes = 0
        self._busy = False
        self._closed = False
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
            self._wake.notify()
        return True

    def after_pages(self, work: Snapshot | Callable[[], None]) -> None:
        """Queue a snapshot, or a small job on the store, behind the pages put so far."""
        with self._wake:
            if self.on:
                self._queue.append(work)
                self._wake.notify()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is empty; False if it was not in time."""
        deadline = monotonic() + timeout_s
        with self._wake:
            while self._queue or self._busy:
                left = deadline - monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._wake.wait(left)
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
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                work = self._next()
                self._busy = True
            try:
                self._do(work)
            except StoreBusy:
                if not isinstance(work, Snapshot) and not callable(work):
                    self.skipped += len(work)
            except ChatKVError as error:
                self._turn_off(error.message)
            except BaseException as error:  # noqa: BLE001 - a dead writer must be seen, not silent
                self._turn_off(f"{type(error).__name__}: {error}")
            finally:
                with self._wake:
                    self._busy = False
                    self._wake.notify_all()

    def _next(self) -> list[_Waiting] | Snapshot | Callable[[], None]:
        """The next batch of pages, or the one other job at the head of the queue."""
        pages: list[_Waiting] = []
        while self._queue and len(pages) < BATCH:
            head = self._queue[0]
            if not isinstance(head, _Waiting):
                break
            pages.append(head)
            self._queue.popleft()
            self._queued_bytes -= head.num_bytes
        if pages:
            return pages
        work = self._queue.popleft()
        assert not isinstance(work, _Waiting)
        return work

    def _do(self, work: list[_Waiting] | Snapshot | Callable[[], None]) -> None:
        if isinstance(work, Snapshot):
            self.store.save_snapshot(work)
        elif callable(work):
            work()
        else:
            self.store.write([PageImage.of(page.head, page.payload()) for page in work])

    def _turn_off(self, reason: str) -> None:
        with self._wake:
            self.notice = reason if reason.startswith(OFF) else f"{OFF}: {reason}"
            self._queue.clear()
            self._queued_bytes = 0
