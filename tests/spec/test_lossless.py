"""Drafted = plain, for every drafter; the law of the text; mutants that these checks must catch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.grammar import Matcher
from chatkv.sampling import Choice, Grammar, Sampler, SamplingParams
from chatkv.spec.drafters.history import HistoryDrafter
from chatkv.spec.drafters.lookahead import LookaheadDrafter
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.drafters.random import RandomDrafter
from chatkv.spec.token_log import TokenIndex
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted, verify

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


def test_identity(toy):
    check_identity(toy)


def test_identity_with_edits(toy):
    check_edits(toy)


def test_ties(toy):
    check_ties(toy)


@given(
    seed=st.integers(0, 2**63 - 1),
    trees=st.integers(0, 1000),
    temperature=st.sampled_from([0, 0.3, 0.7, 1, 2]),
    filters=st.fixed_dictionaries(
        {
            "top_p": st.sampled_from([1, 0.95, 0.5]),
            "top_k": st.sampled_from([0, 1, 4]),
            "min_p": st.sampled_from([0, 0.1]),
        }
    ),
    edits=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.5, 1.1, 3]),
            "presence_penalty": st.floats(-2, 2, width=32),
            "frequency_penalty": st.floats(-2, 2, width=32),
            "logit_bias": st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=4),
            "grammar": st.sampled_from([e["grammar"] for e in EDITS if "grammar" in e]),
        },
    ),
    tokens=st.integers(1, 40),
    ends=st.sampled_from([(), (5,), (0, 3)]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_drafted_equals_plain(toy, seed, trees, temperature, filters, edits, tokens, ends, right):
    model = toy.Model()
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, **filters, **edits
    )
    expected = toy.plain(model, params, ends)
    actual = toy.drafted(model, params, [toy.TreeDrafter(model, trees, right)], ends)
    assert actual.ids == expected.ids
    assert actual.cache == expected.cache


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
@pytest.mark.parametrize(
    "make",
    [
        lambda toy, model: [NgramDrafter()],
        lambda toy, model: [history_of(toy, model)],
        lambda toy, model: [LookaheadDrafter()],
        lambda toy, model: [RandomDrafter(model.vocab_size)],
        lambda toy, model: [toy.ChainDrafter(model, 5)],
        lambda toy, model: [toy.ChainDrafter(model, 5, offset=1)],
        lambda toy, model: [Raising()],
        lambda toy, model: [Nonsense()],
        lambda toy, model: [
            NgramDrafter(),
            history_of(toy, model),
            LookaheadDrafter(),
            RandomDrafter(12),
            Nonsense(),
            toy.TreeDrafter(model, 3),
        ],
        lambda toy, model: [],
    ],
    ids=[
        "ngram",
        "history",
        "lookahead",
        "random",
        "oracle",
        "adversarial",
        "raising",
        "nonsense",
        "merged",
        "none",
    ],
)
def test_any_drafter_leaves_the_text_alone(toy, make, temperature):
    model = toy.Model(scale=4.0)
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=150)
    assert toy.drafted(model, params, make(toy, model)).ids == toy.plain(model, params).ids


def test_oracle_and_adversary_gain_what_they_must(toy):
    model = toy.Model()
    params = SamplingParams(seed=3, max_tokens=1 + 6 * 20)
    assert toy.drafted(model, params, [toy.ChainDrafter(model, 5)]).tau == 6
    assert toy.drafted(model, params, [toy.ChainDrafter(model, 5, offset=1)]).tau == 1


def test_ngram_gains_in_a_loop(toy):
    model = toy.Model()
    params = SamplingParams(temperature=0, max_tokens=400)  # the toy soon repeats itself
    run = toy.drafted(model, params, [NgramDrafter()])
    assert run.ids == toy.plain(model, params).ids
    assert [step.tokens for step in run.steps[-11:-1]] == [16] * 10


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_history_gains_on_a_text_that_was_there(toy, temperature):
    model = toy.Model(scale=1.0)
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=150)
    run = toy.drafted(model, params, [history_of(toy, model, temperature=temperature)])
    assert run.ids == toy.plain(model, params).ids
    assert run.tau > 4


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_lookahead_gains_where_few_tokens_decide(toy, temperature):
    model = toy.Model(scale=4.0)
    model.table[:] = model.table[0, 0]  # the last id alone decides, so wrong paths soon agree
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=150)
    run = toy.drafted(model, params, [LookaheadDrafter()])
    assert run.ids == toy.plain(model, params).ids
    assert run.tau > 1.5


@pytest.mark.parametrize("mode", ["plain", "drafted"])
def test_law(toy, mode):
    check_law(toy, mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "drafted"])
def test_law_of_200_000_runs(toy, mode):
    check_law(toy, runs=200_000, mode=mode)


# Each mutant is one of the ways in which other engines went wrong; the named check must see it.


def at_position_zero(sampler, logits, history, position):
    return original_pick(sampler, logits, history, 0)


def with_one_seed(sampler, logits, history, position):
    other = Sampler(replace(sampler.params, seed=0))
    return original_pick(other, logits, history, position)


def highest_tie(sampler, logits, history, position):
    if sampler.params.temperature == 0:
        return Choice(int(np.flatnonzero(logits == logits.max())[-1]), 0.0)
    return original_pick(sampler, logits, history, position)


def row_as_depth(picker, row):
    return picker.root_position + 1 + row


def filter_on_draft_only(picker, row, path):
    loose = replace(picker.sampler.params, top_k=0, top_p=1, min_p=0)
    sampler = Sampler(loose) if row else picker.sampler
    history = [*picker.history, *path]
    return sampler.pick(picker.rows[row], history, picker.position(row)).token


def accept_likely(tree, pick):
    """A guess is accepted when the model finds it more likely than not."""

    def lenient(row, path):
        logits = pick.rows[row].astype(np.float64)
        chance = np.exp(logits - logits.max())
        chance /= chance.sum()
        for below in tree.children(row):
            if chance[int(tree.tokens[below])] > 0.5:
                return int(tree.tokens[below])
        return pick(row, path)

    return verify(tree, lenient)


def trust_the_draft(tree, pick):
    """The drafter's first guess counts as chosen."""

    def draft(row, path):
        below = tree.children(row)
        return int(tree.tokens[below[0]]) if below else pick(row, path)

    return verify(tree, draft)


def path_dropped(picker, row, path):
    """Penalties and grammar see only what was there when the step began."""
    return picker.sampler.pick(picker.rows[row], picker.history, picker.position(row)).token


def grammar_left_ahead(matcher, ids):
    """What a guess made the grammar take is never taken back."""
    if len(ids) <= len(matcher._taken):
        return True
    return original_follow(matcher, [*matcher._taken, *ids[len(matcher._taken) :]])


def edits_at_the_root_only(picker, row, path):
    bare = replace(
        picker.sampler.params,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias=(),
        grammar=None,
    )
    sampler = Sampler(bare) if row else picker.sampler
    return sampler.pick(picker.rows[row], picker.history, picker.position(row)).token


def keep_siblings(cache, rows):
    original_keep(cache, range(rows[-1] + 1))


def lose_root(cache, rows):
    original_keep(cache, rows[1:])


def stop_at_step_end(accepted, is_last):
    kept = [is_last(token) for token in accepted.tokens]
    del kept
    return accepted


original_pick = Sampler.pick
original_follow = Matcher._follow
original_keep: Callable[..., None]

MUTANTS = {
    "noise reused across positions": ("Sampler.pick", at_position_zero, check_law),
    "one seed for all": ("Sampler.pick", with_one_seed, check_law),
    "tie to the highest id": ("Sampler.pick", highest_tie, check_ties),
    "position off in the tree": ("Picker.position", row_as_depth, check_identity),
    "filter on the draft only": ("Picker.__call__", filter_on_draft_only, check_identity),
    "accept on p > 0.5": ("verify", accept_likely, check_identity),
    "the draft's token for the model's": ("verify", trust_the_draft, check_identity),
    "the draft's token, by its law": ("verify", trust_the_draft, check_law),
    "penalty dropped after the first token": ("Picker.__call__", path_dropped, check_edits),
    "edits at the root only": ("Picker.__call__", edits_at_the_root_only, check_edits),
    "grammar not rolled back": ("Matcher._follow", grammar_left_ahead, check_edits),
    "sibling kept": ("Cache.keep", keep_siblings, check_identity),
    "root row not kept": ("Cache.keep", lose_root, check_identity),
    "stop checked at step end only": ("Accepted.until", stop_at_step_end, check_identity),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(toy, monkeypatch, name):
    global original_keep
    original_keep = toy.Cache.keep
    where, mutant, check = MUTANTS[name]
    if where == "verify":
        monkeypatch.setattr(toy.verify_module, "verify", mutant)
    else:
        owner, attribute = where.split(".")
        classes = {
            "Sampler": Sampler,
            "Accepted": Accepted,
            "Cache": toy.Cache,
            "Picker": toy.Picker,
            "Matcher": Matcher,
        }
        monkeypatch.setattr(classes[owner], attribute, mutant)
    with pytest.raises((AssertionError, IndexError)):
        check(toy)


def test_law_finds_three_points_in_99_of_100(toy):
    model = toy.Model(vocab_size=8, seed=4, scale=1.0)
    chance = law_of(toy, model, 3).reshape(8, 64)
    first = np.array([0.6] + [0.4 / 7] * 7)
    due = (chance / chance.sum(axis=1, keepdims=True) * first[:, None]).ravel()
    shifted = np.array([0.63] + [0.37 / 7] * 7)
    biased = (chance / chance.sum(axis=1, keepdims=True) * shifted[:, None]).ravel()
    rng = np.random.default_rng(0)
    found = passed = 0
    for _ in range(100):
        statistic, freedom = chi_square(rng.multinomial(200_000, biased), due)
        found += statistic >= bound(freedom)
        statistic, freedom = chi_square(rng.multinomial(200_000, due), due)
        passed += statistic < bound(freedom)
    assert found >= 99
    assert passed >= 99


def test_identity_finds_one_flipped_token_in_10_000(toy, monkeypatch):
    calls = 0

    def flip(sampler, logits, history, position):
        nonlocal calls
        choice = original_pick(sampler, logits, history, position)
        calls += 1
        if calls == 9_000:
            return replace(choice, token=(choice.token + 1) % len(logits))
        return choice

    model = toy.Model()
    params = SamplingParams(seed=2, max_tokens=10_000)
    expected = toy.plain(model, params, fast=True)
    monkeypatch.setattr(Sampler, "pick", flip)
    actual = toy.drafted(model, params, [NgramDrafter()], max_rows=2)
    assert calls >= 10_000
    at = len(toy.PROMPT) + 8_999
    assert actual.ids[:at] == expected.ids[:at]
    assert actual.ids != expected.ids
