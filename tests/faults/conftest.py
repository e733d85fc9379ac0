"""The conversation that things happen to, and the table of faults with what became of each."""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conversation import Conversation, golden
from forked import CHILDREN

HERE = Path(__file__).parent
DOC = HERE.parents[1] / "docs" / "faults.md"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory where there is one: a kill cannot tell it from a disk, and it is faster
    to wait for."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="chatkv-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


@pytest.fixture(
    params=[
        pytest.param(1.0, id="sampled"),
        pytest.param(0.0, id="greedy", marks=pytest.mark.slow),
    ]
)
def told(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Conversation]:
    """A conversation, with the golden test behind everything that is said in it."""
    with closing(Conversation(tmp_path / "data", request.param)) as conversation:
        conversation.expected = golden(request.param)
        yield conversation


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator[Conversation]:
    """As `told`, sampled only: for faults that do not look at how tokens are chosen."""
    with closing(Conversation(tmp_path / "data", 1.0)) as conversation:
        conversation.expected = golden(1.0)
        yield conversation


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    for child in CHILDREN:
        child.kill()
    CHILDREN.clear()


# The table.


def read_rows() -> dict[int, tuple[str, str]]:
    """Number to fault and tests, as docs/faults.md has them."""
    cells = re.compile(r"^\| (\d+) \| (.+?) \| .+? \| (.+?) \|$", re.MULTILINE)
    found = cells.findall(DOC.read_text(encoding="utf-8"))
    return {int(number): (fault, tests) for number, fault, tests in found}


@pytest.fixture
def fault_rows() -> dict[int, tuple[str, str]]:
    return read_rows()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a row, when the whole table was run."""
    outcomes: dict[int, list[str]] = defaultdict(list)
    seconds: dict[int, float] = defaultdict(float)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            found = re.search(r"faults/test_\w+\.py::test_(\d\d)_", report.nodeid)
            if found:
                outcomes[int(found[1])].append(outcome)
                seconds[int(found[1])] += getattr(report, "duration", 0.0)
    rows = read_rows()
    if not rows or not set(rows) <= set(outcomes):
        return
    terminalreporter.section("faults")
    for number, (fault, _) in rows.items():
        all_of = outcomes[number]
        bad = {"failed", "error"} & set(all_of)
        verdict = "FAIL" if bad else "pass" if "passed" in all_of else "skip"
        tests = f"{len(all_of):3} tests" if len(all_of) > 1 else "  1 test "
        terminalreporter.write_line(
            f"{number:2}  {fault:52}  {verdict}  {tests}  {seconds[number]:5.1f} s"
        )
