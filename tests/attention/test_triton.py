"""Runs interpreted_triton.py where the interpreter is on: that must be set before the import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatkv.attention.triton_launch import MANY_ROWS, Launch, Partition, balance

pytest.importorskip("triton")


def test_kernels_in_the_interpreter():
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            here / "interpreted_triton.py",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def launch(rows: int, sequences: int = 1, length: int = 4096, **options: bool) -> Launch:
    given = {"quantised": False, "is_mixed": False, "can_be_wide": False, "pdl": True, **options}
    return Launch.of(rows, sequences, 8, 256, length, Partition.of(8), **given)


def test_few_long_sequences_are_owned_by_leaves_and_mixed_ones_by_what_the_plan_says():
    assert launch(64, length=16384).owner == "leaf"
    assert launch(64, length=512).owner == "group"
    assert launch(64, sequences=8, length=16384).owner == "group"
    assert launch(64, sequences=8, is_mixed=True).owner == "either"


def test_many_rows_are_wide_where_that_can_be():
    assert launch(MANY_ROWS + 1, can_be_wide=True).wide
    assert not launch(MANY_ROWS, can_be_wide=True).wide
    assert not launch(256).wide


@pytest.mark.parametrize("sequences", [1, 8])
def test_what_decides_bits_of_quantised_pages_does_not_follow_the_call(sequences: int):
    found = [launch(rows, sequences, quantised=True) for rows in (1, 16, 64, 256)]
    assert {(each.block_m, each.nodes) for each in found} == {(64, 1)}
    pairs = [launch(rows, sequences, quantised=True, in_pairs=True) for rows in (1, 16, 17, 256)]
    assert [each.block_m for each in pairs] == [16, 16, 64, 64]
    assert launch(4, 8, length=65536, quantised=True, in_pairs=True).owner == "leaf"


def test_leaves_cost_more_the_more_rows_write_them():
    partition = Partition.of(8)
    few, many = (balance(rows, 8, 128, partition, wide=False) for rows in (4, 64))
    assert few[2] < many[2]
    # One leaf a group is never owned otherwise.
    assert balance(64, 8, 128, Partition(64, 16, 1), wide=False)[2] == 0
