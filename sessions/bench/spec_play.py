"""Conversations on a plain and on a drafted engine: ids and clocks. Adds nothing up."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np

from chatkv.engine import Engine
from chatkv.errors import ContextFull
from chatkv.prefill import PrefillReport
from chatkv.sampling import SamplingParams
from chatkv.spec.control import Controller
from chatkv.spec.plan import Plan
from chatkv.spec.proposal import settled
from chatkv.spec.repeats import has_repeats
from chatkv.spec.stats import DraftStats, StepRecord
from chatkv.spec.token_log import TokenIndex
from chatkv.spec.verify import Accepted
from sessions.verify import Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of one run."""

    ids: tuple[int, ...]
    repeats: bool
    """Whether a token of it continues a long repeat."""
    computed: int
    """Prompt tokens that were computed, not found in the pool."""
    first_token_ms: float
    decode_ms: float
    """From the first token to the last."""
    stats: DraftStats


@dataclass(frozen=True, slots=True)
class Pair:
    """One reply, plain and drafted: the same ids, medians over the runs."""

    prompt: str
    tokens: int
    """Those that steps chose: all but the first."""
    repeats: bool
    computed: int
    plain_ms: float
    drafted_ms: float
    plain_first_ms: float
    drafted_first_ms: float
    stats: DraftStats
    """Of all drafted runs."""

    @classmethod
    def of(cls, prompt: str, plain: Seq[Reply], drafted: Seq[Reply]) -> Pair:
        """The runs of one reply."""
        stats = DraftStats()
        for reply in drafted:
            stats.merge(reply.stats)
        return cls(
            prompt=prompt,
            tokens=len(plain[0].ids) - 1,
            repeats=plain[0].repeats,
            computed=plain[0].computed,
            plain_ms=median(reply.decode_ms for reply in plain),
            drafted_ms=median(reply.decode_ms for reply in drafted),
            plain_first_ms=median(reply.first_token_ms for reply in plain),
            drafted_first_ms=median(reply.first_token_ms for reply in drafted),
            stats=stats,
        )


class WatchedController(Controller):
    """A controller whose expectations can be held against what came. Decides as any other."""

    def __init__(self, costs: Mapping[int, float], mode: str) -> None:
        super().__init__(costs, mode)
        self._ran: list[tuple[Plan, int]] = []
        self.forget()

    def forget(self) -> None:
        """Count from here on; what was learnt stays."""
        self._ran.clear()
        self.probes = 0
        self.reasons: dict[str, int] = {}
        """Why steps were plain, and how many were for it."""
        self._tokens = self._ms = 0.0

    def observe(self, step: StepRecord, accepted: Seq[Accepted], plan: Plan | None = None) -> None:
        plan = plan or self._plan
        super().observe(step, accepted, plan)
        if plan is not None:
            self._ran.append((plan, step.rows))  # read when no clock runs

    def settle(self) -> None:
        """Add what was expected of the steps since the last call, as known by now."""
        for plan, rows in self._ran:
            tree = settled(plan.kept[0])
            if rows == 1:
                reason = "the reply has no room for a guess" if len(tree) > 1 else plan.reason
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
            elif plan.kind == "probe":
                self.probes += 1
            ms = self.costs.ms(rows)
            if ms is not None and rows == len(tree):
                self._tokens += sum(self.calibration.chances(tree, plan.greedy[0]))
                self._ms += ms + (self.draft_cost(plan) if plan.asks else 0.0)
        self._ran.clear()

    @property
    def expected_rate(self) -> float | None:
        """Tokens a second of all steps whose cost is known and whose tree was run whole; None if
        there was none."""
        return 1000 * self._tokens / self._ms if self._ms else None


@dataclass(slots=True)
class Identity:
    """What was compared. Anything but zero differences makes every speed worthless."""

    prompts: int = 0
    tokens: int = 0
    different: int = 0
    """Replies of which some run differs from the first plain one."""
    differences: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """The first ten: prompt, turn, token, and the temperature and mode they came up in."""


class Duel:
    """A plain and a drafted engine, each of which plays every prompt. One sequence at a time.

    Args:
        plain: Without drafters.
        drafted: Its controller is watched.
        log: What its drafter `history` copies from: replies to the prompts played before.
    """

    def __init__(self, plain: Engine, drafted: Engine, log: TokenIndex) -> None:
        self.plain, self.drafted, self.log = plain, drafted, log
        self.controller = WatchedController(drafted.costs, drafted.config.spec)
        drafted.drafting.controller = self.controller

    def warm_up(self, prompt: Prompt, params: SamplingParams) -> None:
        """Play a prompt both ways, so that nothing is met for the first time by the clock."""
        for engine in (self.plain, self.drafted):
            play(engine, prompt, params)
        self.controller.forget()

    def play(
        self, prompt: Prompt, params: SamplingParams, rounds: int, identity: Identity
    ) -> list[Pair]:
        """Plain, drafted, drafted, plain, as often as `rounds` says; the replies that are equal."""
        plain: list[list[Reply]] = []
        drafted: list[list[Reply]] = []
        for _ in range(rounds):
            plain.append(play(self.plain, prompt, params))
            for _ in range(2):
                drafted.append(play(self.drafted, prompt, params))
                self.controller.settle()
            plain.append(play(self.plain, prompt, params))
        expected = [reply.ids for reply in plain[0]]
        for ids in expected:
            self.log.add((), ids)
        identity.prompts += 1
        identity.tokens += sum(map(len, expected))
        found = self._differences(prompt, params, expected, [*plain, *drafted])
        identity.different += len(found)
        room = 10 - len(identity.differences)
        identity.differences += list(found.values())[:room]
        return [
            Pair.of(prompt.id, [run[turn] for run in plain], [run[turn] for run in drafted])
            for turn in range(len(expected))
            if not found
        ]

    def _differences(
        self,
        prompt: Prompt,
        params: SamplingParams,
        expected: Seq[tuple[int, ...]],
        runs: Seq[Seq[Reply]],
    ) -> dict[int, dict[str, object]]:
        found: dict[int, dict[str, object]] = {}
        for run in runs:
            got = [reply.ids for reply in run]
            for turn in range(max(len(expected), len(got))):
                left = expected[turn] if turn < len(expected) else ()
                right = got[turn] if turn < len(got) else ()
                if left != right:
                    pairs = enumerate(zip(left, right, strict=False))
                    shorter = min(len(left), len(right))
                    found[turn] = {
                        "prompt": prompt.id,
                        "temperature": params.temperature,
                        "mode": self.drafted.config.spec,
                        "turn": turn + 1,
                        "token": next((i for i, (a, b) in pairs if a != b), shorter),
                    }
                    break  # what comes behind it has another prompt
        return found


def play(engine: Engine, prompt: Prompt, params: SamplingParams) -> list[Reply]:
    """All turns of a conversation, with no page of an earlier one in the pool."""
    engine.prefix.clear()
    tokenizer = engine.model.tokenizer
    tokens = tokenizer.head_ids()
    sampled = [False] * len(tokens)
    replies: list[Reply] = []
    for number, turn in enumerate(prompt.turns):
        given = tokenizer.user_ids(turn, number == 0)
        tokens, sampled = [*tokens, *given], [*sampled, *[False] * len(given)]
        try:
            seq = engine.add(tokens, sampled, params)
        except ContextFull:
            break
        report = PrefillReport()
        begun = perf_counter()
        for _ in engine.prefill(seq, report):
            pass
        first = perf_counter()
        while not seq.finished:
            engine.step([seq])
        ended = perf_counter()
        stats = engine.finish(seq)
        ids = tuple(seq.tokens[seq.prompt_tokens :])
        replies.append(
            Reply(
                ids=ids,
                repeats=has_repeats(
                    np.array(seq.tokens, np.int32), seq.prompt_tokens, len(seq.tokens)
                ),
                computed=report.computed,
                first_token_ms=1000 * (first - begun),
                decode_ms=1000 * (ended - first),
                stats=stats,
            )
        )
        closing = tokenizer.closing_ids(ids[-1] in tokenizer.eos_ids)
        tokens = [*seq.tokens, *closing]
        sampled = [*seq.sampled, *[False] * len(closing)]
    return replies
