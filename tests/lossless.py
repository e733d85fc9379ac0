"""Checks that a mutant must fail: drafted = plain, and the law of the text."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from chatkv.sampling import Grammar, SamplingParams
from chatkv.spec.drafters.history import HistoryDrafter
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.drafters.random import RandomDrafter
from chatkv.spec.token_log import TokenIndex
from chatkv.spec.tree import DraftTree

EDITS: list[dict[str, object]] = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"frequency_penalty": 1.2, "logit_bias": ((2, 1.5), (5, -100.0))},
    {"grammar": Grammar("regex", "(ab?|c(d|e)*|[g-l]){2,30}")},
    {"grammar": Grammar("lark", 'start: "a" | "g" start "h" | start "b"')},
    {"grammar": Grammar("regex", "([abc]{3}d){1,9}"), "repetition_penalty": 1.5, "top_k": 3},
]


class Raising(NgramDrafter):
    name = "raising"

    def propose(self, contexts, max_rows):
        raise RuntimeError("a bug")


class Nonsense(NgramDrafter):
    """Something else each time: too few, too many, another root, no tree, ids out of range."""

    name = "nonsense"

    def propose(self, contexts, max_rows):
        root = contexts[0].tokens[-1]
        kind = len(contexts[0].tokens) % 6
        return [
            lambda: [],
            lambda: [None],
            lambda: [DraftTree.of([root, 2, 2], [0, 0, 0])],
            lambda: [DraftTree.of(list(range(10_000)), [0] * 10_000)],
            lambda: [DraftTree.of([root + 1, 2], [0, 0])],
            lambda: [DraftTree.of([root, 10**6, 3], [0, 0, 1])],
        ][kind]()


def history_of(toy, model, **settings) -> HistoryDrafter:
    """The drafter with a log of other texts, one of which may be the very one that comes."""
    log = TokenIndex()
    for seed in (1, 11):
        params = SamplingParams(seed=seed, max_tokens=150, **settings)
        log.add(toy.PROMPT, toy.plain(model, params, fast=True).ids[len(toy.PROMPT) :])
    return HistoryDrafter(log)


def check_identity(toy, runs: int = 6, tokens: int = 60) -> None:
    """Same ids, same cache, for random trees, at several settings, with and without an end."""
    model = toy.Model()
    for run in range(runs):
        params = SamplingParams(
            temperature=(0, 0.7, 1, 2)[run % 4],
            top_p=(1, 0.9)[run % 2],
            top_k=(0, 5, 0)[run % 3],
            seed=run,
            max_tokens=tokens - run,
        )
        for ends in ((), (toy.END,)):
            expected = toy.plain(model, params, ends)
            actual = toy.drafted(model, params, [toy.TreeDrafter(model, run)], ends)
            assert actual.ids == expected.ids
            assert actual.cache == expected.cache


def check_edits(toy, runs: int = 24) -> None:
    """The same with penalties, a bias and a grammar, which look at what came before."""
    model = toy.Model()
    for run in range(runs):
        params = SamplingParams(
            temperature=(0, 0.7, 1.5)[run % 3],
            seed=run,
            max_tokens=40,
            **EDITS[run % len(EDITS)],  # type: ignore[arg-type]
        )
        expected = toy.plain(model, params, (toy.END,))
        actual = toy.drafted(model, params, [toy.TreeDrafter(model, run, 0.9)], (toy.END,))
        assert actual.ids == expected.ids
        assert actual.cache == expected.cache


def law_of(toy, model, steps: int) -> np.ndarray:
    """Chance of each text of `steps` tokens, by enumeration."""
    size = model.vocab_size
    chance = np.zeros([size] * steps)
    for text in np.ndindex(chance.shape):
        ids, product = list(toy.PROMPT), 1.0
        for token in text:
            logits = model.logits(ids).astype(np.float64)
            product *= math.exp(logits[token]) / np.exp(logits).sum()
            ids.append(token)
        chance[text] = product
    return chance.ravel()


def chi_square(counts: np.ndarray, chance: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells expected below 5 are pooled."""
    expected = chance * counts.sum()
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def bound(freedom: int) -> float:
    """Chi-square at p = 1e-4 (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3


def law_counts(toy, run: Callable[..., object], runs: int, size: int = 8) -> np.ndarray:
    counts = np.zeros(size**3)
    for seed in range(runs):
        params = SamplingParams(temperature=1, top_p=1, seed=seed * 7919, max_tokens=3)
        a, b, c = run(params).ids[-3:]
        counts[(a * size + b) * size + c] += 1
    return counts


def check_law(toy, runs: int = 1500, mode: str = "drafted") -> None:
    """The texts of three tokens come up as often as they should."""
    model = toy.Model(vocab_size=8, seed=4, scale=1.0)
    if mode == "plain":
        counts = law_counts(toy, lambda params: toy.plain(model, params, fast=True), runs)
    else:
        drafter = RandomDrafter(8)
        counts = law_counts(
            toy, lambda params: toy.drafted(model, params, [drafter], max_rows=12), runs
        )
    chance = law_of(toy, model, 3)
    statistic, freedom = chi_square(counts, chance)
    assert statistic < bound(freedom), (statistic, freedom)
    distance = 0.5 * np.abs(counts / runs - chance).sum()
    expected = 0.5 * np.sqrt(2 * chance * (1 - chance) / (math.pi * runs)).sum()
    assert distance < 1.5 * expected


def check_ties(toy) -> None:
    """Equal logits: the lowest id, drafted or not."""
    model = toy.Model()
    model.table = np.round(model.table / 4)
    params = SamplingParams(temperature=0, max_tokens=40)
    ids = toy.drafted(model, params, [toy.TreeDrafter(model, 1)]).ids
    for at in range(len(toy.PROMPT), len(ids)):
        logits = model.logits(ids[:at])
        assert ids[at] == int(np.flatnonzero(logits == logits.max())[0])
