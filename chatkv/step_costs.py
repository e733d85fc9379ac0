"""How long a step of so many rows takes here. Knows a model and a pool and leaves both alone."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from time import perf_counter
from typing import Any

from chatkv.batch import tree_batch
from chatkv.kv.pool import PagePool
from chatkv.kv.table import PageTable
from chatkv.models.model import Model
from chatkv.sampling import Sampler, SamplingParams
from chatkv.spec.tree import MAX_DEPTH, DraftTree

COST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Row counts whose step is timed at start."""
DEVICE_COST_ROWS = (*COST_ROWS, 32)
"""On a device, where rows are next to free."""
SAME_COST = 0.25
"""Share by which a step may take longer or shorter than in an earlier run and count as the same."""


def known_costs(model: Model, pool: PagePool, known: Mapping[str, Any]) -> dict[int, float]:
    """The cost table of an earlier run, if the smallest and the largest step still take that
    long; else a new one."""
    sizes = COST_ROWS if model.device == "cpu" else DEVICE_COST_ROWS
    with suppress(KeyError, ValueError, TypeError):
        base = {int(rows): float(ms) for rows, ms in known["costs"]["base"]}
        ends = measure(model, pool, rows=(sizes[0], sizes[-1]))
        near = [abs(ms / base[rows] - 1) < SAME_COST for rows, ms in ends.items()]
        if tuple(base) == sizes and all(near) and min(base.values()) > 0:
            return base
    return measure(model, pool, rows=sizes)


def measure(
    model: Model, pool: PagePool, repeats: int = 3, rows: Seq[int] = COST_ROWS
) -> dict[int, float]:
    """Milliseconds of a step by rows: the least of a few, since other programs only add."""
    costs: dict[int, float] = {}
    table, sampler = PageTable(pool), Sampler(SamplingParams())
    try:
        for count in rows:
            times: list[float] = []
            above = [min(max(0, row - 1), MAX_DEPTH - 1) for row in range(count)]
            for _ in range(repeats):
                tree = DraftTree.of(range(1, count + 1), above)
                with table.reserve(count) as reserved:
                    batch = tree_batch([table], [tree], [reserved.slots])
                    begun = perf_counter()
                    result = model.step(batch, pool)
                    result.sample([sampler])  # on a device all rows pick at once
                    result.wait()
                    times.append(1000 * (perf_counter() - begun))
            costs[count] = min(times)
    finally:
        table.release()
    return costs
