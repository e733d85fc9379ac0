"""What a forget policy loses: the same chat with and without what it put out of sight.

Knows policies, tables and logits. At the first turn at which a policy acts, the chat goes on twice
in the same steps: once with all in sight, once as the policy left it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chatkv.errors import ContextFull
from chatkv.forget import ForgetPlan, Layout, Limits, TurnSpan, parse_policy, plan
from chatkv.kv.table import PageTable

SCORED = 256
"""Tokens behind the forgetting that are compared."""
STEP = 32
Read = Callable[[Sequence[PageTable], Sequence[Sequence[int]]], np.ndarray]
"""Ids behind each table in one step; [rows, V] logits."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy, over all chats."""

    policy: str
    context: int
    forgotten: int
    """Tokens that left the model's sight, of all chats."""
    in_sight: int
    """What was left, of all chats."""
    perplexity_full: float
    perplexity: float
    kl: float
    """Mean over the tokens behind it, of the distribution with all in sight to this one."""
    top1: float


def policies(context: int) -> tuple[str, ...]:
    """Those that forget at the edge of a turn, for chats of twice that many tokens."""
    return ("turns", f"oldest:limit_tokens={context},drop_tokens={context // 4}", "window")


def first_plan(
    policy: str, starts: Sequence[int], count: int, limits: Limits
) -> tuple[int, list[ForgetPlan]]:
    """The place of the first turn at which the policy acts, and what it does; count if never."""
    edges = [0, *starts, count]
    for turn in range(1, len(starts) + 1):
        spans = [TurnSpan(n, edges[n], edges[n + 1]) for n in range(turn)]
        typed = TurnSpan(turn, edges[turn], min(edges[turn] + 32, count))
        try:
            made = plan(parse_policy(policy), Layout((*spans, typed)), limits)
        except ContextFull:
            break  # turns too long for this context
        if made:
            return edges[turn], made
    return count, []


def measure_policy(
    policy: str,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    limits: Limits,
    read: Read,
    store: Callable[[PageTable, Sequence[int]], None],
    table: Callable[[], PageTable],
) -> PolicyRow | None:
    """One row; None if the policy acts in none of the chats.

    Args:
        texts: Ids of each chat, and where its turns begin.
    """
    loss = {False: 0.0, True: 0.0}
    kl = same = 0.0
    rows = forgotten = in_sight = 0
    for ids, starts in texts:
        at, made = first_plan(policy, starts, len(ids), limits)
        if not made:
            continue
        whole = table()
        store(whole, ids[:at])
        cut = whole.fork()
        for one in made:
            cut.forget(one.op)
        forgotten += sum(one.num_tokens for one in made)
        in_sight += cut.num_live
        stop = min(at + SCORED, len(ids) - 1)
        for first in range(at, stop, STEP):
            part = ids[first : min(first + STEP, stop)]
            logits = torch.as_tensor(read([whole, cut], [part, part])).log_softmax(-1)
            full, left = logits[: len(part)], logits[len(part) :]
            behind = torch.tensor(ids[first + 1 : first + 1 + len(part)])[:, None]
            for key, found in ((False, full), (True, left)):
                loss[key] -= float(found.gather(1, behind).double().sum())
            kl += float((full.exp() * (full - left)).sum(-1).double().sum())
            same += float((full.argmax(-1) == left.argmax(-1)).sum())
            rows += len(part)
        whole.release()
        cut.release()
    if not rows:
        return None
    perplexity = {key: math.exp(value / rows) for key, value in loss.items()}
    return PolicyRow(
        policy, limits.context, forgotten, in_sight, perplexity[False], perplexity[True],
        kl / rows, same / rows,
    )  # fmt: skip
