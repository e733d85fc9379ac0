"""A conversation with a forget policy over an engine, as the layers above it play one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.forget import (
    Layout,
    Policy,
    Slide,
    TurnSpan,
    WindowPolicy,
    flatten,
    parse_policy,
    plan,
    tail_of,
)
from chatkv.kv.ops import Op
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence as Seq

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
SYSTEM = [259, *b"be kind"]
WORDS = b"the cat sat on the mat and the dog sat on the cat again"


def engine(
    model: Any, spec: str = "none", context: int = 112, kv: str = "bf16", **options: Any
) -> Engine:
    config = EngineConfig(
        spec=spec, drafters=("ngram", "random"), context_limit=context, pool_tokens=4 * context,
        kv_dtype=kv,
    )  # fmt: skip
    return Engine(model, config, costs=COSTS, guard=False, **options)


class Talk:
    """A conversation that outlives its engines: ids, turns, pins and what was forgotten."""

    def __init__(self, policy: str, *, temperature: float = 1.0, tokens: int = 14) -> None:
        self.policy: Policy = parse_policy(policy)
        self.temperature, self.tokens = temperature, tokens
        self.ids, self.sampled = list(SYSTEM), [False] * len(SYSTEM)
        self.starts, self.pins = [0], set[int]()
        self.ops: list[Op] = []
        self.reports: list[PrefillReport] = []

    def say(self, on: Engine, prompt: Sequence[int]) -> list[int]:
        """One turn."""
        self.starts.append(len(self.ids))
        self.ids += [257, *prompt, 258]
        self.sampled += [False] * (len(prompt) + 2)
        params = SamplingParams(
            temperature=self.temperature, seed=len(self.starts), max_tokens=self.tokens
        )
        limits, layout = on.limits(self.tokens), self.layout()
        self.ops += [made.op for made in plan(self.policy, layout, limits)]
        slide = None
        if isinstance(self.policy, WindowPolicy):
            slide = Slide.of(self.policy, self.layout(), limits)
        ids, sampled, ops = flatten(self.ids, self.sampled, self.ops)
        report = PrefillReport()
        seq = on.add(ids, sampled, params, ops=ops, slide=slide)
        for _ in on.prefill(seq, report):
            pass
        while not seq.finished:
            on.step([seq])
            assert seq.num_live <= limits.context
        self.ops += [made.op for made in seq.forgot]
        reply = seq.tokens[seq.prompt_tokens :]
        self.ids += [*reply, 10]
        self.sampled += [*[True] * len(reply), False]
        self.reports.append(report)
        assert report.reused + report.computed <= len(ids)
        self.images = images(on, seq)
        on.finish(seq)
        return reply

    def layout(self) -> Layout:
        ends = [*self.starts[1:], len(self.ids)]
        turns = [
            TurnSpan(
                number, start, stop, number in self.pins, tail=tail_of(self.sampled[start:stop])
            )
            for number, (start, stop) in enumerate(zip(self.starts, ends, strict=True))
        ]
        return Layout(tuple(turns), tuple(self.ops))


def images(on: Engine, seq: Seq) -> list[tuple[int, int, bytes]]:
    """The K/V bytes in sight, but for those that every window hides."""
    spans = seq.table.spans()[seq.table.gone :]
    return [
        (span.first, span.lo, on.pool.image(page, span.hi))
        for page, span in zip(seq.table.pages, spans, strict=True)
    ]


def prompts(count: int) -> list[bytes]:
    return [WORDS[i % 7 : i % 7 + 3 + 5 * i % 13] for i in range(count)]
