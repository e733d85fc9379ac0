"""Launches that become a CUDA graph once they have run. Knows no kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class Work:
    """Launches that run one by one the first time, and as one graph from then on.

    Args:
        launch: Launches them.
        capture: Make the graph.
        memory: Pool of memory that graphs share, or None.
    """

    def __init__(self, launch: Callable[[], None], capture: bool, memory: Any = None) -> None:
        self._launch, self._capture, self._memory = launch, capture, memory
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Have it done; returns before the device is."""
        if self.graph is not None:
            self.graph.replay()
            return
        self._launch()
        if self._capture:
            self.graph = captured(self._launch, self._memory)


def captured(work: Callable[[], None], memory: Any) -> torch.cuda.CUDAGraph:
    """A graph of work that has run once: everything is compiled, and its results stand."""
    graph = torch.cuda.CUDAGraph()
    # A graph that is collected while another is captured takes the process with it.
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            work()
    finally:
        if was_on:
            gc.enable()
    return graph
