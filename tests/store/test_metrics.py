"""Metrics: each sample under its own name, sums whole, and no foreign text in a label."""

from __future__ import annotations

import re

from chatkv.events import Usage
from sessions.counters import Sums
from sessions.metrics import HELP, prometheus

DISK = {"file_bytes": 4096, "pages": 3, "quarantined": 1, "limit_bytes": 1 << 30}


def read(text: str) -> dict[str, float]:
    """Samples by name and labels, as a collector reads them."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = re.fullmatch(r'(\w+(?:{\w+="[^"\\\n]*"})?) (\S+)', line).groups()
            assert name not in found
            found[name] = float(value)
    return found


def told(**forgets: tuple[int, int]) -> str:
    sums = Sums()
    sums.add(Usage(cached_tokens=60, host_tokens=10, disk_tokens=20, token_bytes=4, prompt_n=40))
    counts = {name: {"times": n, "tokens": size} for name, (n, size) in forgets.items()}
    return prometheus({"disk": DISK, "all": sums.to_json(), "forgets": counts})


def test_every_sample_has_its_name_and_the_sources_add_up():
    text = told(turns=(2, 90), summarize=(1, 30))
    found = read(text)
    sources = {name: value for name, value in found.items() if "prompt_tokens" in name}
    assert sources == {
        'chatkv_prompt_tokens_total{source="pool"}': 30,
        'chatkv_prompt_tokens_total{source="host"}': 10,
        'chatkv_prompt_tokens_total{source="disk"}': 20,
        'chatkv_prompt_tokens_total{source="computed"}': 40,
    }
    assert found['chatkv_forgets_total{policy="turns"}'] == 2
    assert found['chatkv_forgotten_tokens_total{policy="summarize"}'] == 30
    assert found["chatkv_store_quarantined_pages"] == 1
    for name in {name.partition("{")[0] for name in found}:
        assert text.count(f"# TYPE {name} {HELP[name][0]}\n") == 1


def test_a_policy_that_a_file_made_up_is_other():
    found = read(told(**{'x"} 1\n# my secret': (1, 5), "and more": (1, 6), "user": (3, 7)}))
    forgets = {name: value for name, value in found.items() if "forgotten" in name}
    assert forgets == {
        'chatkv_forgotten_tokens_total{policy="other"}': 11,
        'chatkv_forgotten_tokens_total{policy="user"}': 7,
    }


def test_tokens_of_older_replies_have_no_source():
    sums = Sums()
    sums.add(Usage(cached_tokens=60, prompt_n=40))
    text = prometheus({"disk": DISK, "all": sums.to_json(), "forgets": {}})
    assert read(text)['chatkv_prompt_tokens_total{source="unknown"}'] == 60
