"""Paths that grow, forget, recall, fork and are cut, in any order, over a small pool and a disk
that loses pages: every row in sight holds what ids and ops alone say it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hash_model import SIZE, HashModel, expected
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from chatkv.errors import OutOfPages
from chatkv.forget import Limits
from chatkv.kv.chain import Chain, Link
from chatkv.kv.ops import Op, live_ranges, num_live, without
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.store import PageHead, PageImage
from chatkv.kv.swap import HostPages
from chatkv.kv.table import PageTable
from chatkv.kv.tiers import Tiers
from chatkv.prefill import PrefillReport, Prompts
from chatkv.sequence import Sequence as Seq

ROOT = bytes(32)
LIMITS = Limits(10**6, 1, 10**6, SIZE)


class Disk:
    """A page store in memory, with nothing between it and the engine."""

    def __init__(self) -> None:
        self.images: dict[bytes, PageImage] = {}
        self.links: dict[bytes, Link] = {}
        self.on = True
        self.store = self

    def put(self, head: PageHead, num_bytes: int, read: Any) -> bool:
        self.images.setdefault(head.key, PageImage.of(head, read()()))
        assert head.key_fits
        return True

    def after_pages(self, work: Any) -> None:
        if callable(work):
            work()

    def any_waits(self, missing: Any) -> bool:
        return False

    def flush(self, timeout_s: float) -> bool:
        return True

    def save_link(self, link: Link) -> None:
        self.links[link.key] = link

    def find(self, keys: Sequence[bytes]) -> dict[bytes, PageHead]:
        return {key: self.images[key].head for key in keys if key in self.images}

    def children(self, parent: bytes) -> list[PageHead]:
        return [image.head for image in self.images.values() if image.parent_key == parent]

    def read(self, keys: Iterable[bytes]) -> Iterator[PageImage]:
        for key in keys:
            if key not in self.images:
                return
            yield self.images[key]

    def snapshot(self, key: bytes) -> None:
        return None

    def kept_rates(self) -> dict[str, object]:
        return {}

    def keep_rates(self, rates: object) -> None:
        pass


@dataclass(frozen=True)
class Path:
    ids: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    ops: tuple[Op, ...] = ()


Token = tuple[int, bool]
runs = st.lists(
    st.tuples(st.tuples(st.integers(0, 1), st.booleans()), st.integers(1, 17)),
    min_size=1,
    max_size=4,
)
cuts = st.lists(st.integers(0, 200), min_size=1, max_size=5)


def grown(path: Path, runs: list[tuple[Token, int]]) -> Path:
    new = [one for one, count in runs for _ in range(count)]
    ids = (*path.ids, *(token for token, _ in new))
    return replace(path, ids=ids, sampled=(*path.sampled, *(chosen for _, chosen in new)))


class Machine(RuleBasedStateMachine):
    paths = Bundle("paths")
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.model = HashModel(self.window)
        self.pool = self.model.new_pool(24)
        self.prefix = PrefixCache(self.pool)
        self.pool.reclaim = self.prefix.reclaim
        self.disk = Disk()
        self.links: list[Link] = []
        disk: Any = self.disk
        tiers = Tiers(HostPages(0), disk, self.pool.token_bytes, restore="always")
        self.prompts = Prompts(self.model, self.pool, self.prefix, disk, tiers)  # type: ignore[arg-type]

    @initialize(target=paths)
    def begin(self) -> Path:
        return Path((7,) * 20, (False,) * 20)

    @rule(target=paths, path=paths, runs=runs, restart=st.booleans())
    def extend(self, path: Path, runs: list[tuple[Token, int]], restart: bool) -> Path:
        path = grown(path, runs)
        self.check(path, restart)
        return path

    @rule(target=paths, path=paths, cuts=cuts, rebase=st.booleans(), runs=runs)
    def forget(
        self, path: Path, cuts: list[int], rebase: bool, runs: list[tuple[Token, int]]
    ) -> Path:
        """Drop some ranges of what is in sight, then go on."""
        at = len(path.ids)
        edges = sorted({at * cut // 200 for cut in cuts} | {min(cuts[0], at)})
        ranges = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        live = live_ranges(path.ops, at)
        gone = without(live, without(live, ranges))
        op = Op(at, tuple(gone), rebase and self.window is None)
        self.check(path)
        path = grown(replace(path, ops=(*path.ops, op)), runs)
        self.check(path)
        return path

    @rule(target=paths, path=paths, place=st.integers(0, 9), part=st.booleans())
    def recall(self, path: Path, place: int, part: bool) -> Path:
        """As if an op, or half of it, had never been."""
        if path.ops:
            index = place % len(path.ops)
            op = path.ops[index]
            kept = [replace(op, drop=op.drop[1:])] if part and op.drop else []
            path = replace(path, ops=(*path.ops[:index], *kept, *path.ops[index + 1 :]))
            self.check(path)
        return path

    @rule(target=paths, path=paths, share=st.integers(1, 10))
    def cut(self, path: Path, share: int) -> Path:
        """An edit or a fork: the path ends earlier, and what was forgotten later was not."""
        count = max(2, share * len(path.ids) // 10)
        ops = tuple(op for op in path.ops if op.at < count)
        path = Path(path.ids[:count], path.sampled[:count], ops)
        self.check(path)
        return path

    @rule(path=consumes(paths))
    @precondition(lambda self: len(self.bundles["paths"]) > 4)
    def drop(self, path: Path) -> None:
        pass

    @rule(every=st.integers(1, 3), path=paths)
    def lose(self, every: int, path: Path) -> None:
        """The disk loses pages, and so does the pool."""
        for key in sorted(self.disk.images)[::every]:
            del self.disk.images[key]
        self.check(path, restart=True)

    def check(self, path: Path, restart: bool = False) -> None:
        """Run the path through the engine; look at every row it leaves in sight."""
        if restart:
            self.prefix.clear()
        ids, sampled = list(path.ids), list(path.sampled)
        chain = Chain(ROOT, SIZE, ids, sampled)
        for op in path.ops:
            chain.add(op)
        rest: Any = {"sampler": None, "eos_ids": (), "max_tokens": 1, "limits": LIMITS}
        table = PageTable(self.pool, self.window)
        seq = Seq(1, ids, sampled, table, chain=chain, ops=list(path.ops), **rest)
        self.links += chain.links
        report = PrefillReport()
        try:
            for _ in self.prompts.fill(seq, report):
                pass
        except OutOfPages:
            table.release()
            return
        numbers = expected(ids, sampled, path.ops, self.window)
        ranges = live_ranges(path.ops, len(ids))
        assert table.num_tokens == len(ids)
        assert table.num_live == num_live(path.ops, len(ids))
        kept = [(slot, place) for slot, place in self.slots(table) if slot >= table.gone * SIZE]
        seen = [(int(self.row(table, slot)), place) for slot, place in kept]
        places = [i for a, b in ranges for i in range(a, b)]
        assert seen == [(numbers[i], i) for i in places[len(places) - len(kept) :]]
        if self.window is not None:
            hidden = places[: len(places) - len(kept)]
            assert all(i <= len(ids) - self.window for i in hidden)
            assert not kept or kept[0][1] > len(ids) - self.window - SIZE
        spans = sum(span.lo > 0 or span.hi < SIZE for span in table.spans())
        assert len(table.pages) <= table.num_live // SIZE + spans + 1
        self.prompts.keeper.finish(seq)
        table.release()

    def slots(self, table: PageTable) -> Iterator[tuple[int, int]]:
        for entry, span in enumerate(table.spans()):
            for offset in range(span.lo, span.hi):
                yield entry * SIZE + offset, span.first + offset

    def row(self, table: PageTable, slot: int) -> float:
        (physical,) = table.slots(slot, slot + 1).tolist()
        return self.pool.data[0, physical // SIZE, 1, 0, physical % SIZE, 0].item()

    @invariant()
    def only_the_cache_holds_pages(self) -> None:
        entries = list(self.prefix._entries.values())
        assert self.pool.used == len({entry.page for entry in entries})

    @invariant()
    def ops_stand_between_stored_pages(self) -> None:
        """A page behind an op would be litter to a disk that does not know the op."""
        for link in self.links:
            behind = [image for image in self.disk.images.values() if image.parent_key == link.key]
            assert not behind or link.key in self.disk.links


class WindowMachine(Machine):
    """Every layer sees a window: what it hides is let go of, and need not be found again."""

    window = 21


class NarrowMachine(Machine):
    """A window within a page."""

    window = 5


@pytest.mark.parametrize("examples", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", [Machine, WindowMachine, NarrowMachine])
def test_any_order_of_operations(machine: type[Machine], examples: int) -> None:
    case = machine.TestCase
    case.settings = settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=25,
        suppress_health_check=[HealthCheck.too_slow],
    )
    case().runTest()
