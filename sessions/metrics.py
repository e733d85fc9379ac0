"""What is counted, in the text format of Prometheus. Knows names and numbers; no file, no engine.

No label holds text, titles or ids: a policy that an imported file made up is `other`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatkv.forget import POLICIES
from sessions.counters import TIERS

POLICY_LABELS = (*POLICIES, "user", "rebase")

HELP = {
    "chatkv_store_bytes": ("gauge", "Size of kv.db."),
    "chatkv_store_budget_bytes": ("gauge", "What kv.db may hold."),
    "chatkv_store_pages": ("gauge", "Pages in kv.db."),
    "chatkv_store_quarantined_pages": ("gauge", "Pages that failed a check and are never used."),
    "chatkv_prompt_tokens_total": ("counter", "Prompt tokens, by where their K/V came from."),
    "chatkv_reusable_tokens_total": (
        "counter",
        "Of these, the ones that had been computed before.",
    ),
    "chatkv_forgets_total": ("counter", "Times a policy, or the user, put turns out of sight."),
    "chatkv_forgotten_tokens_total": ("counter", "Tokens that went out of sight with them."),
}


def prometheus(stats: Mapping[str, Any]) -> str:
    """A page of metrics.

    Args:
        stats: `disk`: what kv.db holds; `all`: `sessions.counters.Sums` as JSON, over all chats;
            `forgets`: times and tokens by policy.
    """
    lines: list[str] = []
    named = ""
    for name, labels, value in _samples(stats):
        if name != named:
            kind, about = HELP[name]
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            named = name
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")
    return "".join(f"{line}\n" for line in lines)


def _samples(stats: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], int]]:
    """Name, labels and value; those of one name together."""
    disk, sums = stats["disk"], stats["all"]
    yield "chatkv_store_bytes", {}, disk["file_bytes"]
    if disk.get("limit_bytes"):
        yield "chatkv_store_budget_bytes", {}, disk["limit_bytes"]
    yield "chatkv_store_pages", {}, disk["pages"]
    yield "chatkv_store_quarantined_pages", {}, disk["quarantined"]
    tokens = {tier: sums["tiers"][tier]["tokens"] for tier in TIERS}
    unknown = sums["reused_tokens"] - sum(tokens.values())  # of a version that did not say where
    tokens |= {"unknown": unknown} if unknown else {}
    for source, value in {**tokens, "computed": sums["computed_tokens"]}.items():
        yield "chatkv_prompt_tokens_total", {"source": source}, value
    yield "chatkv_reusable_tokens_total", {}, sums["reusable_tokens"]
    forgets: dict[str, tuple[int, int]] = {}
    for policy, found in stats["forgets"].items():
        label = policy if policy in POLICY_LABELS else "other"
        times, size = forgets.get(label, (0, 0))
        forgets[label] = (times + found["times"], size + found["tokens"])
    for place, name in enumerate(("chatkv_forgets_total", "chatkv_forgotten_tokens_total")):
        for label, counts in sorted(forgets.items()):
            yield name, {"policy": label}, counts[place]
