"""What exactness costs: the same kernel with its tile and splits free for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from triton.runtime.errors import OutOfResources

from benchmarks.attention_shapes import HEADS, TUNED, Shape
from benchmarks.attention_timing import make_copy, our_time
from chatkv.attention.triton_check import Case
from chatkv.attention.triton_launch import RESIDENT, Launch, Partition
from chatkv.attention.triton_tree import TritonBackend

SHAPES = [shape for shape in TUNED if shape.group_rows <= 64 and max(shape.lengths) < 60000]


def free_choices(shape: Shape) -> list[tuple[Partition, Launch | None]]:
    """The exact partition under its rule, then under each owner, and partitions of one leaf a group
    that fill the device about once."""
    _, kv_heads, dim = HEADS[shape.model]
    batch, longest = len(shape.lengths), max(shape.lengths)
    exact = Partition.of(kv_heads)
    rule = Launch.of(
        shape.group_rows,
        batch,
        kv_heads,
        2 * dim,
        longest,
        exact,
        quantised=False,
        is_mixed=False,
        can_be_wide=False,
        pdl=True,
    )
    choices: list[tuple[Partition, Launch | None]] = [(exact, None)]
    choices += [(exact, replace(rule, owner=owner)) for owner in ("leaf", "group")]
    for tile in (64, 128):
        for splits in (2, 4, 8, 16, 32, 64):
            programs = splits * kv_heads * batch
            if splits * tile <= longest and RESIDENT / 3 <= programs <= RESIDENT:
                choices.append((Partition(tile, splits, 1), None))
    return choices


def compile_choices(shape: Shape, part: int, parts: int) -> None:
    """Compile every parts-th choice."""
    case, _ = make_copy(shape)
    for partition, launch in free_choices(shape)[part::parts]:
        with suppress(OutOfResources):
            TritonBackend(partition, launch).attend(case.call, case.q, case.pages)


def tax(shape: Shape, cases: Sequence[Case]) -> dict[str, Any]:
    """Microseconds of the exact kernel and of the fastest free choice, each measured twice."""
    choices = {
        f"{partition} {launch.owner if launch else 'by rule'}": TritonBackend(partition, launch)
        for partition, launch in free_choices(shape)
    }
    tried: dict[str, float] = {}
    for name, backend in choices.items():
        # A tile may be too large for shared memory.
        with suppress(OutOfResources):
            tried[name] = our_time(backend, cases)
    exact, best = next(iter(choices)), min(tried, key=tried.__getitem__)
    exact_us, free_us = (
        (tried[name] + our_time(choices[name], cases)) / 2 for name in (exact, best)
    )
    free_us = min(exact_us, free_us)
    return {
        "exact_us": exact_us,
        "free_us": free_us,
        "free": best,
        "exact_over_free": exact_us / free_us,
        "tried": tried,
    }
