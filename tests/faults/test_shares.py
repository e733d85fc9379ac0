from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from shares import shares


@given(st.integers(0, 2000), st.integers(1, 130))
def test_shares_are_all_of_it_and_about_equal(count, jobs):
    parts = shares(count, jobs)
    assert sum(parts) == count
    assert len(parts) == min(count, jobs)
    assert not parts or max(parts) - min(parts) <= 1 <= min(parts)
