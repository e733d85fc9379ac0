"""One head on its way: optimiser, running average, and a step that is captured on a device."""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chatkv.spec.heads.modules import Head, new_head
from chatkv.spec.train.unroll import Lesson, judge

BETAS, CLIP = (0.9, 0.95), 0.5
AVERAGE = 0.999
FIRST_STEPS = 3
"""Steps before one is captured: libraries choose their kernels in them."""


class Pupil:
    """Learns from lessons. On a device the tensors of all lessons must be the same ones."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self.head = head.to(device).requires_grad_(True)
        self.average = new_head(head.shape).to(device).requires_grad_(False)
        self.average.load_state_dict(self.head.state_dict())
        self.steps = 0
        self.numbers = torch.zeros(head.shape.depth, 3, device=device)
        """Sums of what `judge` counts, since someone last cleared them."""
        self._parameters: list[Tensor] = [*self.head.parameters()]
        self._averages: list[Tensor] = [*self.average.parameters()]
        self._rate = torch.zeros((), device=device)
        self._blend = torch.zeros((), device=device)
        self._is_captured = device.type == "cuda"
        more: dict[str, Any] = {}
        if self._is_captured:
            more = {"lr": self._rate, "capturable": True, "fused": True}
        self._optimiser = torch.optim.AdamW(self._parameters, betas=BETAS, weight_decay=0.0, **more)
        self._graph: Any | None = None
        self._lesson: Lesson | None = None

    def learn(self, lesson: Lesson, rate: float) -> None:
        """One step down the gradient."""
        self._rate.fill_(rate)
        # The average forgets its beginning while it is young.
        self._blend.fill_(1 - min(AVERAGE, self.steps / (self.steps + 10)))
        if not self._is_captured:
            self._optimiser.param_groups[0]["lr"] = rate
            self._step(lesson)
        elif self.steps < FIRST_STEPS:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(lesson)
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self._graph is None:
                self._lesson, self._graph = lesson, torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._step(lesson)
            assert self._lesson is lesson, "a captured step reads one lesson's tensors"
            self._graph.replay()
        self.steps += 1

    def _step(self, lesson: Lesson) -> None:
        self._optimiser.zero_grad(set_to_none=True)
        with torch.autocast(lesson.states.device.type, torch.bfloat16):
            loss, numbers = judge(self.head, lesson)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimiser.step()
        with torch.no_grad():
            for average, now in zip(self._averages, self._parameters, strict=True):
                average.lerp_(now, self._blend)
            self.numbers += numbers
