"""A long test over many processes: each does a share of it, in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from forked import CHILDREN, CONTEXT, importable

T = TypeVar("T")
JOBS = max(1, int(os.environ.get("CHATKV_JOBS") or len(os.sched_getaffinity(0))))


def shares(count: int, jobs: int = JOBS) -> list[int]:
    """`count` in as many parts as there are jobs, none empty, the largest one more than the
    smallest."""
    return [part for job in range(jobs) if (part := (count + jobs - 1 - job) // jobs)]


def in_shares(work: Callable[[int, int, Path], T], count: int, folder: Path) -> list[T]:
    """`work(share, number of the share, folder)` for all shares of `count` at once, and what each
    returned. The first that raises is raised here, once all have ended."""
    parts = shares(count)
    folders = [folder / f"share-{number}" for number in range(len(parts))]
    for own in folders:
        own.mkdir(mode=0o700)
    with importable(), ProcessPoolExecutor(len(parts), mp_context=CONTEXT) as pool:
        tasks = zip([work] * len(parts), parts, range(len(parts)), folders, strict=True)
        return list(pool.map(_share, tasks))


def _share(task: tuple[Callable[[int, int, Path], T], int, int, Path]) -> T:
    work, share, number, folder = task
    try:
        return work(share, number, folder)
    finally:
        for child in CHILDREN:
            child.kill()
        CHILDREN.clear()
