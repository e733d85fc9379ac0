"""When guesses that were not worth their time are left alone."""

from __future__ import annotations

from chatkv.spec.plain_state import LONG_STREAK, PLAIN_STREAK, PlainState


def dry(state: PlainState, steps: int) -> None:
    """Steps for which drafters were asked in vain: plain takes 10 ms, asking 3."""
    for _ in range(steps):
        state.asked(10.0, 13.0)
        state.plain(1)


def test_three_vain_steps_are_enough_where_nothing_was_gained():
    state = PlainState()
    dry(state, PLAIN_STREAK - 1)
    assert not state.holds
    dry(state, 1)
    assert state.holds


def test_drafters_that_gain_on_average_are_asked_on_through_a_dry_spell():
    state = PlainState()
    for _ in range(20):
        state.asked(22.0, 15.0)
    dry(state, LONG_STREAK - 1)
    assert not state.holds
    dry(state, 1)
    assert state.holds


def test_a_small_gain_is_soon_used_up():
    state = PlainState()
    state.asked(16.0, 15.0)
    dry(state, PLAIN_STREAK)
    assert state.holds


def test_another_run_goes_on_where_it_stood():
    state, other = PlainState(), PlainState()
    for _ in range(20):
        state.asked(22.0, 15.0)
    dry(state, PLAIN_STREAK)
    other.recall(state.to_json())
    assert other.to_json() == state.to_json()
    assert not other.holds
