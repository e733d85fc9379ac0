"""Where pages of a prompt may come from besides the pool: host memory, then the disk if that is
faster than computing.

Has the reading half of the store's protocol, so whoever looks for pages sees one store. Knows keys,
rates and stores; no model. One lookup at a time, by the thread that owns the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import Literal

from chatkv.errors import StoreError
from chatkv.kv.planner import Plan, Rates, plan
from chatkv.kv.pool import PagePool
from chatkv.kv.prefix import CachedPage
from chatkv.kv.store import PageHead, PageImage, PageStore
from chatkv.kv.swap import HostPages

Restore = Literal["auto", "always", "never"]


@dataclass(slots=True)
class Lookup:
    """What one prompt found below the pool."""

    host_keys: set[bytes] = field(default_factory=set[bytes], repr=False)
    """Of pages that came from host memory."""
    disk_pages: int = 0
    disk_bytes: int = 0
    disk_s: float = 0.0
    plan: Plan | None = None
    """Made when something could have come from disk."""
    last: bytes = field(default=b"", repr=False)


class Tiers:
    """Host memory over a disk.

    Args:
        host: Pages that left the pool.
        disk: The store, or None.
        token_bytes: Rows of one token.
        restore: `auto` compares, where `exact` says that computing gives the same bits; `always`
            reads whatever is stored; `never` reads nothing from disk.
        exact: Whether computed rows have the bits of stored ones.
    """

    def __init__(
        self,
        host: HostPages,
        disk: PageStore | None,
        token_bytes: int,
        *,
        restore: Restore = "auto",
        exact: bool = True,
    ) -> None:
        self.host, self.disk, self.restore = host, disk, restore
        self.rates = Rates()
        if disk is not None:
            with suppress(StoreError):  # they are measured anew
                self.rates = Rates.of(disk.kept_rates())
        self.token_bytes = token_bytes
        self._may_compare = self._compares = restore == "auto" and exact
        self.look = Lookup()

    @property
    def reads_disk(self) -> bool:
        """Whether anything may come from disk at all."""
        return self.disk is not None and self.restore != "never"

    def spill(self, pool: PagePool, entry: CachedPage) -> None:
        """Copy a page that leaves the pool to host memory. Its place in the chain is not kept: only
        what is written to disk needs it."""
        rows = len(entry.ids)
        head = PageHead(entry.key, entry.parent, 0, 0, entry.ids, entry.sampled, "mixed")
        self.host.put(head, pool.payload_bytes(rows), lambda: pool.read(entry.page, rows))

    def begin(self, *, compares: bool = True) -> None:
        """Another prompt is looked for.

        Args:
            compares: Whether computing may be the faster way; else what is stored is read.
        """
        self.look = Lookup()
        self._compares = self._may_compare and compares

    def end(self) -> Lookup:
        """What was found since `begin`; reading is measured by it."""
        self.host.use(self.look.last)
        self.rates.read(self.look.disk_bytes, self.look.disk_s)
        return self.look

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, PageHead]:
        """Those of `keys` that can be read."""
        held = self._on_disk(keys)
        return {
            key: head for key in keys if (head := self.host.peek(key) or held.get(key)) is not None
        }

    def children(self, parent: bytes) -> Sequence[PageHead]:
        """Pages behind `parent` that can be read, those in host memory first."""
        found = list(self.host.children(parent))
        if self.reads_disk and (self.look.plan is None or self.look.plan.restore):
            assert self.disk is not None
            known = {head.key for head in found}
            found += [head for head in self.disk.children(parent) if head.key not in known]
        return found

    def read(self, keys: Sequence[bytes]) -> Iterator[PageImage]:
        """Pages in the order of `keys`, up to the first that is nowhere, fails a check, or is
        faster computed."""
        for place, key in enumerate(keys):
            image = self.host.get(key)
            if image is not None:
                self.look.host_keys.add(key)
                self.look.last = key
                yield image
                continue
            if not self._may_read(keys[place:]):
                return
            assert self.disk is not None
            began = perf_counter()
            image = next(iter(self.disk.read([key])), None)
            if image is None:
                return
            self.look.disk_pages += 1
            self.look.disk_bytes += len(image.payload)
            yield image
            # The caller has put it in place by now, which is part of the price.
            self.look.disk_s += perf_counter() - began

    def preview(self, keys: Sequence[bytes]) -> tuple[int, Plan | None]:
        """How many of `keys` are in host memory, and what would be done about those on disk."""
        host = len(_while_held(keys, self.host))
        heads = self._run(keys[host:])
        return host, self._plan(heads) if heads else None

    def _may_read(self, keys: Sequence[bytes]) -> bool:
        """Decided once a lookup, on all that could be read."""
        if not self.reads_disk:
            return False
        if self.look.plan is None:
            if not self._compares:
                return True
            heads = self._run(keys)
            if not heads:
                return False
            self.look.plan = self._plan(heads)
        return self.look.plan.restore

    def _plan(self, heads: Sequence[PageHead]) -> Plan:
        chosen = sum(sum(head.sampled) for head in heads)
        given = sum(head.num_tokens for head in heads) - chosen
        return plan(self.rates, given, chosen, self.token_bytes, compares=self._compares)

    def _run(self, keys: Sequence[bytes]) -> list[PageHead]:
        """What the disk has of `keys` up to the first that it lacks."""
        held = self._on_disk(keys)
        return [held[key] for key in _while_held(keys, held)]

    def _on_disk(self, keys: Sequence[bytes]) -> Mapping[bytes, PageHead]:
        if not self.reads_disk or not keys:
            return {}
        assert self.disk is not None
        return self.disk.find(keys)


def _while_held(keys: Sequence[bytes], held: Mapping[bytes, PageHead] | HostPages) -> list[bytes]:
    """The first of `keys` up to one that is not held."""
    return list(takewhile(lambda key: key in held, keys))
