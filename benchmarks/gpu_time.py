"""Milliseconds of work on a GPU, and which kernels took them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import torch


def device_ms(work: Callable[[], None], repeats: int = 30) -> float:
    """Median milliseconds on the device."""
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[3:])


def wall_ms(work: Callable[[], None], repeats: int = 30) -> float:
    """Median milliseconds until the device is done."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    return median(times[min(3, repeats - 1) :])


def show_kernels(work: Callable[[], None]) -> None:
    """Kernels of one run by time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        work()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in found.events() or ():
        times[event.name[:60]] += int(event.time_range.elapsed_us())
        counts[event.name[:60]] += 1
    for name, us in times.most_common(9):
        print(f"      {us:6d} us {counts[name]:4d} x {us / counts[name]:7.2f}  {name}")
