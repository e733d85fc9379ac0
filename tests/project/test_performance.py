"""docs/performance.md is what the raw results make."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_what_it_was_measured_on(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"[\s\"=]/(opt|home|tmp|root|usr|mnt)/", text), "a machine's path"
    data = json.loads(text)
    about = data.get("about", data)
    assert about["device"]
    assert "torch" in about.get("versions", about)
