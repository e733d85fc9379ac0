"""docs/faults.md is the table of faults: each row has its tests, and each test its row."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_row_has_its_tests(fault_rows):
    found: dict[int, list[str]] = {}
    for file in sorted(HERE.glob("test_*.py")):
        for name, number in re.findall(
            r"^(?:async )?def (test_(\d\d)_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            found.setdefault(int(number), []).append(name)
    assert sorted(found) == sorted(fault_rows) == list(range(1, 31))
    for number, (_, tests) in fault_rows.items():
        assert sorted(re.findall(r"`(\w+)`", tests)) == sorted(found[number])
    doc = HERE.parents[1] / "docs" / "faults.md"
    for file in re.findall(r"`(test_\w+\.py)`", doc.read_text(encoding="utf-8")):
        assert (HERE / file).exists(), file
