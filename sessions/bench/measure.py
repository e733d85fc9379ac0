"""Times and memory. Knows devices, clocks and counters; not what is measured."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

MIB = 1 << 20
LONG_MS = 100.0
"""Work that takes longer needs no unseen call before each timed one."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call over some turns."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """Of at least one time."""
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks above a start, in MiB; None where there is no such counter."""

    allocated_mib: float | None = None
    reserved_mib: float | None = None
    rss_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed as one: `calls` calls, one behind another."""

    run: Callable[[], object]
    calls: int
    captured: Tensor | None = None
    """What the first call of a captured graph writes; None if it is none."""
    kept: object = None
    """What a captured graph reads and writes. Freed, it would touch what comes in its place."""


def interleaved(works: Mapping[str, Work], turns: int, device: str) -> dict[str, Timing]:
    """Time each work `turns` times, in the order ABBA, each turn once unseen and once timed."""
    clock = cuda_ms if device.startswith("cuda") else wall_ms
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns):
        for name in list(works) if turn % 2 == 0 else reversed(list(works)):
            work = works[name]
            if not times[name] or times[name][-1] * work.calls < LONG_MS:
                work.run()
            times[name].append(clock(work.run) / work.calls)
    return {name: Timing.of(found) for name, found in times.items()}


def wall_ms(run: Callable[[], object]) -> float:
    """Milliseconds on the monotonic clock."""
    begun = perf_counter()
    run()
    return 1000 * (perf_counter() - begun)


def cuda_ms(run: Callable[[], object]) -> float:
    """Milliseconds on the device, by its own events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def work_of(runs: Sequence[Callable[[], Tensor]], device: str) -> Work:
    """All runs as one work: on CUDA a captured graph where capture works, else plain calls."""

    def each() -> Tensor:
        first = runs[0]()
        for run in runs[1:]:
            run()
        return first

    if not device.startswith("cuda"):
        return Work(each, len(runs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # plans and copies may still be in the making
    with torch.cuda.stream(side):
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            first = each()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return Work(each, len(runs))
    return Work(graph.replay, len(runs), first, runs)


class Peak:
    """Memory from here on: of the device's allocator, or of this process on the CPU."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._is_cuda = device.startswith("cuda")
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._start = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        else:
            give_back()
            self._rss = status_mib("VmRSS")

    def over(self, run: Callable[[], object]) -> Memory:
        """Peak of a run above the start, with what was kept since then."""
        if self._is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            run()
            torch.cuda.synchronize()
            allocated, reserved = self._start
            return Memory(
                allocated_mib=(torch.cuda.max_memory_allocated(self._device) - allocated) / MIB,
                reserved_mib=(torch.cuda.max_memory_reserved(self._device) - reserved) / MIB,
            )
        is_reset = reset_peak()
        run()
        highest = status_mib("VmHWM")
        if not is_reset or self._rss is None or highest is None:
            return Memory()
        return Memory(rss_mib=max(0.0, highest - self._rss))


def status_mib(name: str) -> float | None:
    """A line of /proc/self/status in MiB; None where there is none."""
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


def reset_peak() -> bool:
    """Let VmHWM start again from what is resident now; False where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Return freed memory to the system, so that it is counted when it is used again."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: str) -> int:
    """Memory that can still be had on the device, or on this machine."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        text = Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return 1 << 62
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 1 << 62
