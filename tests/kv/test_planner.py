"""Restore or recompute: the cheaper one by what was measured, and restoring where nothing was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.kv.planner import MIN_BYTES, MIN_TOKENS, Rates, plan

COUNTS = st.integers(0, 10_000)
SPEEDS = st.floats(1, 1e9)


@given(COUNTS, COUNTS, SPEEDS, SPEEDS, SPEEDS, st.integers(1, 1 << 20))
def test_the_cheaper_way_is_taken(given_, chosen, disk, prompt, step, token_bytes):
    rates = Rates(disk, prompt, step)
    made = plan(rates, given_, chosen, token_bytes, compares=True)
    assert made.restore_s == pytest.approx((given_ + chosen) * token_bytes / disk)
    assert made.compute_s == pytest.approx(given_ / prompt + chosen / step)
    assert made.restore == (made.restore_s <= made.compute_s)
    assert plan(rates, given_, chosen, token_bytes, compares=False).restore
    assert f"{given_ + chosen} stored tokens" in made.detail


@pytest.mark.parametrize("missing", ["disk_bytes_s", "given_tokens_s", "chosen_tokens_s"])
def test_what_nobody_measured_decides_nothing(missing):
    rates = Rates(1.0, 1e9, 1e9)
    assert not plan(rates, 5, 5, 1000, compares=True).restore
    setattr(rates, missing, None)
    made = plan(rates, 5, 5, 1000, compares=True)
    assert made.restore
    assert made.detail == ""


def test_a_kind_that_does_not_occur_needs_no_rate():
    assert not plan(Rates(1.0, 1e9, None), 5, 0, 1000, compares=True).restore
    assert not plan(Rates(1.0, None, 1e9), 0, 5, 1000, compares=True).restore


def test_rates_follow_what_is_measured():
    rates = Rates()
    for _ in range(30):
        rates.read(10 * MIN_BYTES, 0.5)
        rates.computed(1000, 0, 2.0)
        rates.computed(0, 100, 1.0)
    assert rates.disk_bytes_s == pytest.approx(20 * MIN_BYTES)
    assert (rates.given_tokens_s, rates.chosen_tokens_s) == pytest.approx((500, 100))
    # A mixed prompt that takes twice what they say makes both slower, and keeps their ratio.
    rates.computed(1000, 100, 6.0)
    assert rates.given_tokens_s == pytest.approx(500 * 0.85)
    assert rates.chosen_tokens_s == pytest.approx(100 * 0.85)


def test_small_pieces_and_no_time_are_not_measured():
    rates = Rates()
    rates.read(MIN_BYTES - 1, 1.0)
    rates.read(MIN_BYTES, 0.0)
    rates.computed(MIN_TOKENS - 1, 0, 1.0)
    rates.computed(MIN_TOKENS, 0, 0.0)
    assert rates == Rates()


def test_rates_are_kept_as_json_and_nonsense_is_left_out():
    rates = Rates(1.5, 2.0, None)
    assert Rates.of(json.loads(json.dumps(rates.to_json()))) == rates
    bad = {"disk_bytes_s": -1, "given_tokens_s": "x", "chosen_tokens_s": float("nan"), "x": 1}
    assert Rates.of(bad) == Rates()
