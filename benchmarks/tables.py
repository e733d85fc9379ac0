"""Markdown from raw results: origins, tables and means. Knows their keys; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

Result = dict[str, Any]
NOTHING = "–"
TREE_PEERS = ("FlashInfer tree", "FA3 two-call", "FlexAttention", "SDPA")
STRONG = ("FlashInfer tree", "FA3 two-call")
"""Tree peers that a careful user would take; the others are far behind."""
OURS = ("cpu", "triton", "npu")


def number(value: float | None, digits: int = 0) -> str:
    """With thousands and so many digits; a dash for None."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """So many digits that matter."""
    if value is None:
        return NOTHING
    rounded = float(f"{value:.{digits - 1}e}")
    after = digits - 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return number(value, max(0, after))


def origin(result: Result) -> str:
    """Device, model, dtype, versions, commit and command of a result."""
    about = result.get("about", result)
    versions = about.get("versions") or {
        name: about[name] for name in ("torch", "triton") if name in about
    }
    parts = [about["device"]]
    if about.get("threads"):
        parts.append(f"{about['threads']} threads")
    parts += [about[name] for name in ("model", "dtype", "backend") if about.get(name)]
    parts += [f"{name} {version}" for name, version in versions.items() if name != "transformers"]
    parts.append(f"commit {about.get('commit') or 'not recorded'}")
    if about.get("command"):
        parts.append(f"`{about['command']}`")
    note = f" ({about['note']})" if about.get("note") else ""
    return ", ".join(parts) + note


def mean(values: Iterable[float]) -> float:
    """Geometric; NaN of nothing."""
    found = list(values)
    return math.exp(fmean(map(math.log, found))) if found else math.nan


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def by_key(result: Result) -> dict[str, Result]:
    """Rows of a result by their `key`."""
    return {row["key"]: row for row in result["rows"]}


def bench_table(result: Result) -> str:
    """`chatkv bench attention`: a line a length, milliseconds of each, and ours in full."""
    names = list(dict.fromkeys(row["backend"] for row in result["rows"]))
    lines: dict[tuple[int, int], dict[str, Result]] = {}
    for row in result["rows"]:
        lines.setdefault((row["rows"], row["kv_len"]), {})[row["backend"]] = row
    own = next((name for name in names if name in OURS), names[-1])
    rows = [
        [
            f"{kv_len:,}",
            f"{count:,}",
            *(_ms(found.get(name)) for name in names),
            significant(found.get(own, {}).get("tflop_per_s")),
            significant(found.get(own, {}).get("gb_per_s")),
            _memory(found.get(own)),
            _memory(found.get("standard")),
        ]
        for (count, kv_len), found in lines.items()
    ]
    head = ["kv_len", "rows", *(f"{name} ms" for name in names)]
    head += [f"{own} TFLOP/s", f"{own} GB/s", f"{own} peak MiB", "standard peak MiB"]
    return markdown(head, rows)


def bench_title(result: Result) -> str:
    """What all rows of `chatkv bench attention` share."""
    row = result["rows"][0]
    seqs = f"{row['num_seqs']} sequence{'s' * (row['num_seqs'] > 1)}"
    heads = f"{row['num_heads']}/{row['num_kv_heads']} heads, D {row['head_dim']}"
    return f"{row['kind']}, {seqs}, {heads}, {row['dtype']}"


def _ms(row: Result | None) -> str:
    if row is None:
        return NOTHING
    return "wrong" if row["wrong"] else significant(row["ms"])


def _memory(row: Result | None) -> str:
    if row is None:
        return NOTHING
    allocated = row["allocated_mib"]
    return number(row["rss_mib"] if allocated is None else allocated, 1)


def tree_rows(result: Result, *, held_out: bool = False) -> list[Result]:
    """The tuned or the held-out shapes with a tree that a strong peer ran, or was quoted for."""
    return [
        row
        for row in result["rows"]
        if row["held_out"] == held_out and fastest(row, STRONG) and not row["shape"].endswith(" T1")
    ]


def tree_table(result: Result) -> str:
    """Tree attention: ours, the fastest tree peer, and FA3's chain."""
    rows = []
    for row in tree_rows(result):
        name, us = _fastest_tree(row)
        chain = row.get("FA3 chain")
        rows.append(
            [
                row["shape"],
                str(row["rows"]),
                significant(row["ours"]),
                f"{significant(us)} ({name})",
                number(us / row["ours"], 2),
                significant(chain),
                NOTHING if chain is None else number(chain / row["ours"], 2),
            ]
        )
    head = ["shape", "rows", "ours", "fastest tree peer", "ratio", "FA3 chain", "ratio"]
    return markdown(head, rows)


def tree_ratios(result: Result, *, many_rows: bool, held_out: bool) -> dict[str, float]:
    """The fastest tree peer's time over ours by shape, up to or above 64 rows."""
    return {
        row["shape"]: _fastest_tree(row)[1] / row["ours"]
        for row in tree_rows(result, held_out=held_out)
        if (row["rows"] > 64) == many_rows
    }


def chain_ratios(result: Result, *, many_rows: bool) -> dict[str, float]:
    """FA3 chain's time over ours on the held-out shapes with more than one row."""
    return {
        row["shape"]: row["FA3 chain"] / row["ours"]
        for row in result["rows"]
        if row["held_out"]
        and "FA3 chain" in row
        and (row["rows"] > 64) == many_rows
        and not row["shape"].endswith(" T1")
    }


def below(ratios: dict[str, float], bar: float) -> str:
    """Shapes under a bar, with their ratio."""
    found = [
        f"{name} {number(ratio, 2)}" for name, ratio in ratios.items() if round(ratio, 2) < bar
    ]
    return ", ".join(found) or "none"


def tree_costs(result: Result) -> str:
    """Sentences about exactness, bandwidth and quantised pages, as far as they were measured."""
    summary, said = result.get("summary", {}), list[str]()
    for kind in ("up to 64 rows", "plain"):
        if tax := summary.get(f"exactness tax, {kind}"):
            said.append(
                f"Exact over tile and splits free, {kind}: {number(tax['mean'], 3)} (worst "
                f"{number(tax['worst'], 2)}, bar 1.05)."
            )
    if shares := summary.get("share of read bandwidth from 0.5 GB on"):
        listed = ", ".join(f"{shape} {number(share, 2)}" for shape, share in shares.items())
        said.append(f"Share of the read bandwidth from 0.5 GB on (bar 0.85): {listed}.")
    if ratios := summary.get("bf16 over quantised"):
        listed = ", ".join(
            f"{name} {number(ratio, 2)}"
            for name, ratio in ratios.items()
            if not name.endswith("bfloat16")
        )
        said.append(f"Time on bf16 pages over that on others: {listed}.")
    return " ".join(said)


def spec_table(result: Result) -> str:
    """Drafting against plain decoding: all replies, those without long repeats, and what the
    slowest and the fastest category gave."""
    head = [
        "temperature", "replies", "plain tok/s", "drafted tok/s", "ratio", "tokens a step",
        "without long repeats", "slowest category", "fastest category", "all but verify",
    ]  # fmt: skip
    lines: list[list[str]] = []
    for row in result["rows"]:
        every, flat = row["all"], row["without_repeats"]
        kinds = sorted(row["categories"].items(), key=lambda item: item[1]["speedup"])
        lines.append(
            [
                f"{row['temperature']:g}",
                number(every["replies"]),
                number(every["plain_tokens_per_s"]),
                number(every["drafted_tokens_per_s"]),
                f"{number(every['speedup'], 2)}x",
                number(every["tokens_per_step"], 2),
                f"{number(flat['speedup'], 2)}x, {number(flat['tokens_per_step'], 2)} a step"
                if flat
                else NOTHING,
                *(f"{name} {number(sums['speedup'], 2)}x" for name, sums in (kinds[0], kinds[-1])),
                f"{number(100 * row['overhead_share'])} %",
            ]
        )
    return markdown(head, lines)


def price_table(result: Result) -> str:
    """What the turn behind a forget costs over the same turn without one."""
    head = ["pages that left", "first token without", "with", "ms a page"]
    rows = [
        [
            number(row["dropped_pages"]),
            f"{number(row['plain_ms'], 1)} ms",
            f"{number(row['forget_ms'], 1)} ms",
            number(row["ms_a_page"], 3),
        ]
        for row in result["prices"]
    ]
    return markdown(head, rows)


def endless_table(result: Result) -> str:
    """Conversations of many turns in a small context, by policy."""
    head = [
        "policy", "turns", "tokens", "forgets", "most in sight", "a turn near 20",
        "one of the last", "ratio", "pinned number",
    ]  # fmt: skip
    rows = [
        [
            f"`{chat['policy']}`",
            number(chat["turns"]),
            number(chat["tokens"]),
            number(chat["forgets"]),
            number(chat["most_live"]),
            f"{number(chat['turn_20_ms'])} ms",
            f"{number(chat['turn_last_ms'])} ms",
            number(chat["ratio"], 3),
            "known" if chat["needle"] else "not known",
        ]
        for chat in result["chats"]
    ]
    return markdown(head, rows)


def differing(result: Result) -> tuple[int, int]:
    """Differing node comparisons, and how many shapes were compared."""
    found = [row["differing"] for row in result["rows"] if row.get("differing") is not None]
    return sum(found), len(found)


def fastest(row: Result, names: Sequence[str]) -> float | None:
    """Microseconds of the fastest of those peers, measured or quoted."""
    found = [row[key] for name in names for key in (name, f"{name} (quoted)") if row.get(key)]
    return min(found, default=None)


def _fastest_tree(row: Result) -> tuple[str, float]:
    found = {
        key: row[key] for name in TREE_PEERS for key in (name, f"{name} (quoted)") if row.get(key)
    }
    name = min(found, key=lambda key: found[key])
    return name, found[name]


def steps_table(result: Result) -> str:
    """Captured steps of each model beside libraries and transformers."""
    rows = []
    for model in result["models"]:
        for step in _steps(model, lambda step: step["rows"] == 1):
            context = step["context"]
            tree = next(
                iter(_steps(model, lambda s, c=context: (s["rows"], s["context"]) == (16, c))), None
            )
            loops = [
                line["captured_step_ms"]
                for line in model.get("library_loop", [])
                if line["context"] == context
            ]
            plain = step["captured_step_ms"]
            sixteen = NOTHING
            if tree is not None:
                ms = tree["captured_step_ms"]
                sixteen = f"{number(ms, 3)} ({number(ms / plain, 3)}x)"
            rows.append(
                [
                    f"{model['model']}, {context:,}",
                    number(plain, 3),
                    sixteen,
                    number(min(loops, default=None), 3),
                    number(_at(model.get("engine"), context), 3),
                    number(_at(model.get("peer_generate"), context), 3),
                ]
            )
    head = ["model, context", "plain", "16 rows", "fastest plain step of libraries"]
    head += ["a token in the engine's loop", "HF generate, static and compiled"]
    return markdown(head, rows)


def prompts_table(result: Result) -> str:
    """Prompts of each model beside transformers."""
    rows = []
    for model in result["models"]:
        for line in model.get("prompts", []):
            peers = {
                peer["attention"]: peer["ms"]
                for peer in model.get("peer_prompts", [])
                if peer["tokens"] == line["tokens"]
            }
            name = min(peers, key=lambda name: peers[name], default=None)
            rows.append(
                [
                    model["model"],
                    f"{line['tokens']:,}",
                    number(line["ms"], 1),
                    number(1000 * line["tokens"] / line["ms"]),
                    NOTHING if name is None else f"{number(peers[name], 1)} ({name})",
                    NOTHING if name is None else number(peers[name] / line["ms"], 2),
                ]
            )
    head = ["model", "tokens", "ms", "tok/s", "transformers ms", "ratio"]
    return markdown(head, rows)


def _steps(model: Result, choose: Callable[[Result], bool]) -> list[Result]:
    return [s for s in model["steps"] if s.get("linear", "triton") == "triton" and choose(s)]


def _at(line: Result | None, context: int) -> float | None:
    return line["ms_a_token"] if line and line["context"] == context else None


def quality_table(result: Result) -> str:
    """A row for each K/V format."""
    lengths = list(result["rows"][0]["needles"])
    head = ["format", "bytes a token", "tokens a byte", "perplexity", "KL", "top-1"]
    head += [f"needles, {int(length):,}" for length in lengths]
    rows: list[list[str]] = []
    for row in result["rows"]:
        found = [round(row["needles"][length] * result["needles"]) for length in lengths]
        rows.append(
            [
                f"`{row['kv']}`" + (" (experimental)" if row["experimental"] else ""),
                number(row["token_bytes"]),
                f"{row['tokens_per_byte']:.2f} times",
                number(row["perplexity"], 4),
                NOTHING if row["kv"] == "bf16" else f"{row['kl']:.1e}",
                number(row["top1"], 4),
                *(f"{count} of {result['needles']}" for count in found),
                str(row["differing"]),
            ]
        )
    return markdown([*head, "differing"], rows)


def policy_table(result: Result) -> str:
    """A row for each forget policy."""
    head = [
        "policy",
        "tokens forgotten",
        "left in sight",
        "perplexity",
        "all in sight",
        "KL",
        "top-1",
    ]
    rows = [
        [
            f"`{row['policy']}`",
            number(row["forgotten"]),
            number(row["in_sight"]),
            number(row["perplexity"], 4),
            number(row["perplexity_full"], 4),
            f"{row['kl']:.1e}",
            number(row["top1"], 4),
        ]
        for row in result["policies"]
    ]
    return markdown(head, rows)
