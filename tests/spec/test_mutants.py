"""Mutants that the checks must catch, and how small a fault they find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from lossless import (
    bound,
    check_edits,
    check_identity,
    check_law,
    check_ties,
    chi_square,
    law_of,
)

from chatkv.grammar import Matcher
from chatkv.sampling import Choice, Sampler, SamplingParams
from chatkv.spec.drafters.ngram import NgramDrafter
from chatkv.spec.verify import Accepted, verify

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
