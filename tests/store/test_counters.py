"""What the cache was worth: definitions that hold, and the reason where it was worth little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.events import Usage
from sessions.counters import WINDOW_S, Sums, Window, is_low

numbers = st.integers(0, 5000)


def usage(reused: int, computed: int, reusable: int) -> Usage:
    return Usage(cached_tokens=reused, prompt_n=computed, reusable_tokens=reusable)


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=8))
def test_rates_are_ratios_of_sums(turns):
    sums = Sums()
    for turn in turns:
        sums.add(usage(*turn))
    assert sums.prompt_tokens == sums.reused_tokens + sums.computed_tokens
    reused, reusable = (sum(turn[i] for turn in turns) for i in (0, 2))
    assert (sums.hit_rate is None) == (reusable == 0)
    if reusable:
        assert sums.hit_rate == min(reused, reusable) / reusable


def test_new_text_cannot_lower_the_hit_rate():
    few, much = usage(300, 10, 300), usage(300, 5000, 300)
    assert few.hit_rate == much.hit_rate == 1
    assert usage(0, 10, 0).hit_rate is None


def test_reuse_by_tier_adds_up():
    sums = Sums()
    sums.add(Usage(cached_tokens=300, host_tokens=40, disk_tokens=100, token_bytes=8))
    sums.add_stored({"cached_tokens": 7, "prompt_n": 0, "reusable_tokens": 7})  # nobody knows where
    sums.add(Usage(cached_tokens=10, token_bytes=2))
    assert sums.to_json()["tiers"] == {
        "pool": {"tokens": 170, "bytes": 160 * 8 + 10 * 2},
        "host": {"tokens": 40, "bytes": 320},
        "disk": {"tokens": 100, "bytes": 800},
    }


def test_the_window_forgets():
    now = [0.0]
    window = Window(lambda: now[0])
    window.add(usage(10, 0, 10))
    now[0] = WINDOW_S - 1
    window.add(usage(0, 20, 10))
    assert window.sums().turns == 2
    now[0] = WINDOW_S + 1
    assert (window.sums().turns, window.sums().hit_rate) == (1, 0)
    now[0] = 3 * WINDOW_S
    assert window.sums().hit_rate is None


@pytest.mark.parametrize(
    ("reused", "reusable", "low"),
    [(229, 256, True), (231, 256, False), (0, 255, False), (0, 256, True), (0, 0, False)],
)
def test_what_is_told(reused, reusable, low):
    assert is_low(usage(reused, 1000, reusable)) is low


def test_turns_that_were_never_counted_add_nothing():
    sums = Sums()
    sums.add_stored({})
    sums.add_stored({"cached_tokens": 5, "prompt_n": 5})  # of a version that did not count
    sums.add_stored({"cached_tokens": 5, "prompt_n": 5, "reusable_tokens": 10})
    assert (sums.turns, sums.hit_rate) == (1, 0.5)
