"""What forgetting costs, and a conversation that goes on and on in a small context.

    python -m benchmarks.forgetting [--model NAME] [--device cpu] [--turns 200] [--json FILE]

First: the next turn after a forget against the same turn without one, both with everything else in
the pool; the difference is divided by the pages that left. Then a conversation of many turns under
each policy: the time of a turn, what is in sight, whether page 0 is there, and whether a pinned
number from the first turn is known in the last.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from benchmarks.about import about, write
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
    plan_user,
    tail_of,
)
from chatkv.kv.ops import Op
from chatkv.models import catalog, devices
from chatkv.models.model import Model
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams

CONTEXT = 2048
REPLY = 96
"""With it the context is full before turn 20, which the last turns are compared with."""
NEEDLE = "The number of my locker is 4817. Please remember it."
QUESTION = "What is the number of my locker? Answer with the number."
TALK = (
    "Name a river.", "And a mountain?", "Which of them would you see first from the north?",
    "Tell me one more thing about it.", "Why is that so?", "Say it in other words.",
)  # fmt: skip


@dataclass
class Talk:
    """A conversation over an engine. Every reply has the same length, whatever it says."""

    on: Engine
    policy: Policy
    pins: set[int] = field(default_factory=set[int])
    ids: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    starts: list[int] = field(default_factory=lambda: [0])
    ops: list[Op] = field(default_factory=list[Op])

    def __post_init__(self) -> None:
        self.ids += self.on.model.tokenizer.head_ids()
        self.sampled += [False] * len(self.ids)

    def say(self, text: str, *, forget: tuple[int, ...] = ()) -> tuple[str, float, float, int]:
        """One turn: the reply, seconds to its first token and to its last, tokens in sight."""
        on, tokenizer = self.on, self.on.model.tokenizer
        self.starts.append(len(self.ids))
        self.ids += tokenizer.user_ids(text, len(self.starts) == 2)
        self.sampled += [False] * (len(self.ids) - len(self.sampled))
        bias = tuple((token, -100.0) for token in sorted(on.model.spec.eos_ids))
        params = SamplingParams(temperature=0.0, max_tokens=REPLY, logit_bias=bias)
        begun = perf_counter()
        limits = on.limits(REPLY)
        if forget:
            self.ops.append(plan_user(self.layout(), forget, limits).op)
        self.ops += [made.op for made in plan(self.policy, self.layout(), limits)]
        slide = None
        if isinstance(self.policy, WindowPolicy):
            slide = Slide.of(self.policy, self.layout(), limits)
        ids, sampled, ops = flatten(self.ids, self.sampled, self.ops)
        seq = on.add(ids, sampled, params, ops=ops, slide=slide)
        for _ in on.prefill(seq, PrefillReport()):
            pass
        first = perf_counter() - begun
        while not seq.finished:
            on.step([seq])
        whole = perf_counter() - begun
        assert seq.table.spans()[0].first == seq.table.spans()[0].lo == 0, "page 0 is gone"
        self.ops += [made.op for made in seq.forgot]
        reply, live = seq.tokens[seq.prompt_tokens :], seq.num_live
        on.finish(seq)
        closing = tokenizer.closing_ids(False)
        self.ids += [*reply, *closing]
        self.sampled += [*[True] * len(reply), *[False] * len(closing)]
        return tokenizer.decode(reply), first, whole, live

    def layout(self) -> Layout:
        """The path as policies see it."""
        ends = [*self.starts[1:], len(self.ids)]
        turns = enumerate(zip(self.starts, ends, strict=True))
        spans = [
            TurnSpan(n, a, b, n in self.pins, tail=tail_of(self.sampled[a:b]))
            for n, (a, b) in turns
        ]
        return Layout(tuple(spans), tuple(self.ops))


def price(model: Model, rounds: int) -> list[dict[str, float]]:
    """Milliseconds a page: the turn behind a forget against the turn without it."""
    found: list[dict[str, float]] = []
    for turns in (6, 12, 24):
        with_, without = [], []
        pages = 0
        for round_ in range(rounds):
            for forgets in (True, False) if round_ % 2 else (False, True):
                on = Engine(model, EngineConfig(spec="none", drafters=()), costs={1: 8.0})
                talk = Talk(on, parse_policy("error"))
                for turn in range(turns):
                    talk.say(TALK[turn % len(TALK)])
                goes = tuple(range(2, turns - 1)) if forgets else ()
                _, first, _, _ = talk.say("Go on.", forget=goes)
                (with_ if forgets else without).append(first)
                if forgets:
                    pages = talk.ops[0].num_tokens // on.pool.page_size
        cost = 1000 * (median(with_) - median(without))
        row = {
            "dropped_pages": pages,
            "forget_ms": 1000 * median(with_),
            "plain_ms": 1000 * median(without),
            "ms_a_page": cost / max(1, pages),
        }
        found.append(row)
        print(
            f"{pages:5} pages  first token {row['plain_ms']:7.2f} -> {row['forget_ms']:7.2f} ms"
            f"  {row['ms_a_page']:6.3f} ms a page"
        )
    return found


def endless(model: Model, policy: str, turns: int) -> dict[str, object]:
    """Many turns in a small context."""
    config = EngineConfig(spec="none", drafters=(), context_limit=CONTEXT)
    talk = Talk(Engine(model, config, costs={1: 8.0}), parse_policy(policy), pins={1})
    times, lives = [], []
    talk.say(NEEDLE)
    for turn in range(2, turns + 1):
        _, _, whole, live = talk.say(TALK[turn % len(TALK)])
        times.append(whole)
        lives.append(live)
    reply = talk.say(QUESTION)[0]
    # Neighbours too: a turn has as many tokens in sight as came since the last forget.
    early = median(times[10:30])
    late = median(times[-20:])
    found = {
        "policy": policy,
        "turns": turns,
        "tokens": len(talk.ids),
        "forgets": len(talk.ops),
        "most_live": max(lives),
        "turn_20_ms": 1000 * early,
        "turn_last_ms": 1000 * late,
        "ratio": late / early,
        "pages_used": talk.on.pool.used,
        "pages": talk.on.pool.num_pages,
        "needle": "4817" in reply,
    }
    print(
        f"{policy:28} {turns} turns, {found['tokens']} tokens, {found['forgets']} forgets; "
        f"in sight at most {found['most_live']}; turn 20 {1000 * early:.1f} ms, "
        f"turn {turns} {1000 * late:.1f} ms, ratio {late / early:.3f}; "
        f"pinned number {'known' if found['needle'] else 'not known: ' + reply!r}"
    )
    return found


def main() -> None:
    """Measure and print; see the module."""
    parser = argparse.ArgumentParser(prog="benchmarks.forgetting")
    parser.add_argument("--model", default=None, help="name or path; the default model else")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    args = parser.parse_args()
    file = catalog.find(args.model or catalog.list_models()[0].name)
    model, _ = devices.load_model(file, args.device)
    facts = about(model if args.device == "cpu" else None, args.device)
    if args.device != "cpu":
        facts |= {"model": model.spec.name, "backend": model.backend_name}
        print(model.spec.name)
    prices = price(model, args.rounds)
    chats = [
        endless(model, policy, args.turns)
        for policy in ("turns", "oldest:limit_tokens=2048,drop_tokens=512", "window")
    ]
    write(args.json, "forgetting", facts, prices=prices, chats=chats)


if __name__ == "__main__":
    main()
