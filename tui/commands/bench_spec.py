"""`chatkv bench spec`: what drafting is worth here, behind the proof that it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from chatkv.errors import plural
from tui import output
from tui.command import (
    FILE,
    Command,
    Globals,
    device_option,
    draft_model_option,
    kv_dtype_option,
)
from tui.commands.bench_result import (
    WRONG,
    result_options,
    write_json_file,
    write_result,
)
from tui.commands.verify import Numbers
from tui.progress import Progress

if TYPE_CHECKING:
    from sessions.bench.measure import Memory
    from sessions.bench.spec import Report
    from sessions.bench.spec_row import Row, Sums
    from sessions.bench.spec_tax import Tax

OVERHEAD_BAR = 0.15
"""Of a step on a GPU, what draft, accept and host together may take."""
NOISE = 1.02
"""A step with guesses is never faster than a plain one, but for this much of noise."""


@click.command(cls=Command, short_help="Drafting: identity first, then speed.")
@click.option(
    "--prompts",
    type=FILE,
    multiple=True,
    metavar="PATH",
    help="JSONL file or folder; else a few built in.",
)
@click.option("--drafters", metavar="A,..", help="Who guesses: auto, or ngram,history,heads,...")
@draft_model_option
@click.option(
    "--temperature",
    "temperatures",
    type=Numbers(),
    default="0,0.7,1",
    show_default=True,
    metavar="T,..",
    help="All prompts are played at each.",
)
@click.option(
    "--spec",
    "modes",
    default="auto",
    show_default=True,
    metavar="MODE,..",
    help="Drafting: auto|chain:N|tree:N.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N conversations.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    metavar="N",
    help="Most tokens of a reply.",
)
@device_option
@kv_dtype_option
@click.option("-m", "--model", metavar="MODEL", help="Catalogue name, .gguf or folder.")
@result_options(runs=1, runs_help="Times each prompt is played plain, drafted, drafted, plain.")
@click.pass_obj
def spec(
    found: Globals,
    prompts: tuple[Path, ...],
    drafters: str | None,
    draft_model: str | None,
    temperatures: tuple[float, ...],
    modes: str,
    limit: int | None,
    max_tokens: int,
    device: str | None,
    kv_dtype: str | None,
    model: str | None,
    runs: int,
    csv_file: Path | None,
    json_file: str | None,
) -> int:
    """Play prompts plain and drafted, one at a time, and compare ids and clocks.

    Each line of a prompt file is an object with `turns` and maybe a `category`. Rates are of
    decoding alone. Exit status 7, and no speed, if a reply differs.
    """
    flags = {
        "model": model,
        "device": device,
        "spec.drafters": drafters,
        "spec.draft_model": draft_model,
        "kv.dtype": kv_dtype,
    }
    settings = found.settings(flags)
    names: tuple[str, ...] = settings["spec.drafters"]
    if draft_model is not None and "draft_model" not in names:
        names = (*names, "draft_model")
    from chatkv.models import catalog

    file = catalog.find(settings["model"])
    from sessions.bench.spec import Request, measure  # loads torch, here in this process

    request = Request(
        prompts=prompts,
        limit=limit,
        max_tokens=max_tokens,
        temperatures=temperatures,
        modes=tuple(dict.fromkeys(filter(None, modes.split(",")))) or ("",),
        drafters=names,
        draft_model=settings["spec.draft_model"],
        device=settings["device"],
        threads=settings["threads"],
        kv_dtype=settings["kv.dtype"],
        keep_layers=settings["kv.keep_layers"],
        rounds=runs,
    )
    wanted = len(request.temperatures) * len(request.modes)

    def on_row(report: Report) -> None:
        """What is there so far outlives a run that is stopped."""
        if wanted > 1:
            write_json_file(report.to_json(), json_file)
            if report.rows:
                found.note(f"{len(report.rows)} of {wanted} rows: {brief(report.rows[-1])}")

    report = measure(file, request, Progress(found.note), on_row)
    write_result(report.to_json(), table(report), csv_file, json_file)
    if report.identity.different:
        wrong = plural(report.identity.different, "reply")
        found.note(f"{wrong} came out different: drafting changed the text.")
    return WRONG if report.identity.different else 0


def table(report: Report) -> list[str]:
    """For people: identity, what all rows share, then a block for each row."""
    from sessions.bench.about import summary

    same = report.identity
    lines = [
        f"identity: {same.prompts:,} prompts, {same.tokens:,} tokens, {same.different:,} different",
        *(f"different: {_pairs(place)}" for place in same.differences),
        summary(report.about),
        f"drafters {', '.join(report.drafters)}; kv {report.kv_dtype}; plain and drafted in turns, "
        "one prompt at a time",
        *(f"switched off: {text}" for text in report.failures),
    ]
    if report.rows:
        lines.append(_memory(report.plain_memory, report.drafted_memory))
        lines.append(_tax(report.tax))
    for row in report.rows:
        lines += ["", *row_lines(row), *_over_bars(row, report)]
    return lines


def row_lines(row: Row) -> list[str]:
    """One temperature in one mode."""
    return [f"temperature {row.temperature:g}, {row.mode}", *_speeds(row), *_steps(row)]


def brief(row: Row) -> str:
    """The row in one line."""
    return (
        f"temperature {row.temperature:g}, {row.mode}: {row.all.speedup:.2f}x at "
        f"{row.all.tokens_per_step:.2f} tokens a step, plain "
        f"{row.all.plain_tokens_per_s:,.1f} tok/s, drafted {row.all.drafted_tokens_per_s:,.1f}"
    )


def _tax(tax: Tax) -> str:
    if tax.tax is None:
        return f"exactness tax: not measured, {tax.missing}"
    return (
        f"exactness tax {tax.tax:.3f}: plain {tax.exact_tokens_per_s:,.1f} tok/s, with products of "
        f"the library {tax.free_tokens_per_s:,.1f}"
    )


def _over_bars(row: Row, report: Report) -> list[str]:
    """The speed-up over the fastest plain steps, and the overhead of a device's step."""
    lines: list[str] = []
    if report.tax.tax is not None:
        lines.append(
            f"speed-up over the fastest plain steps {row.all.speedup / report.tax.slower:.2f}x"
        )
    if report.device != "cpu":
        word = "over" if row.overhead_share > OVERHEAD_BAR else "within"
        lines.append(f"draft, accept and host are {word} the bar of {OVERHEAD_BAR:.0%} of a step")
    return lines


def _speeds(row: Row) -> list[str]:
    cells = [["", "replies", "plain tok/s", "drafted tok/s", "speed-up", "tokens/step"]]
    groups = {"all": row.all, "without long repeats": row.without_repeats, **row.categories}
    cells += [[name, *_sums(sums)] for name, sums in groups.items() if sums is not None]
    noise = (
        "a speed-up above the tokens a step is noise: something else ran here; measure again"
        if row.all.speedup > NOISE * row.all.tokens_per_step
        else ""
    )
    return [
        *output.columns(cells, right=(1, 2, 3, 4, 5)),
        *filter(None, [noise]),
        f"speed-up of a prompt: median {row.speedup_median:.2f}x, p10 {row.speedup_p10:.2f}x, "
        f"p90 {row.speedup_p90:.2f}x; {row.share_below_1:.0%} of the prompts below 1.00x",
    ]


def _sums(sums: Sums) -> list[str]:
    return [
        f"{sums.replies:,}",
        f"{sums.plain_tokens_per_s:,.1f}",
        f"{sums.drafted_tokens_per_s:,.1f}",
        f"{sums.speedup:.2f}x",
        f"{sums.tokens_per_step:.2f}",
    ]


def _steps(row: Row) -> list[str]:
    parts = {name: getattr(row, f"{name}_ms") for name in row.shares}
    told = ", ".join(f"{name} {ms:.3f} ms ({row.shares[name]:.1%})" for name, ms in parts.items())
    lines = [f"a step: {told}; all but verify is {row.overhead_share:.1%}"]
    if row.expected_tokens_per_s is not None:
        lines.append(
            f"expected {row.expected_tokens_per_s:,.1f} tok/s, measured "
            f"{row.all.drafted_tokens_per_s:,.1f}"
        )
    lines.append(f"{row.plain_steps:,} of {row.steps:,} steps plain, {row.probes:,} probes")
    ordered = sorted(row.plain_reasons.items(), key=lambda item: -item[1])
    lines += [f"  {count:,} plain: {reason}" for reason, count in ordered]
    for source in row.all.sources:
        rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in source.acceptance)
        lines.append(
            f"{source.name}: {sum(source.accepted):,} of {sum(source.offered):,} guesses right; "
            f"by depth {rates}"
        )
    lines.append(
        f"first token: plain {row.plain_first_token_ms:,.1f} ms, drafted "
        f"{row.drafted_first_token_ms:,.1f} ms; prompts: plain "
        f"{row.plain_prefill_tokens_per_s:,.0f} tok/s, drafted "
        f"{row.drafted_prefill_tokens_per_s:,.0f} tok/s"
    )
    return [*lines, row.explain]


def _memory(plain: Memory, drafted: Memory) -> str:
    pairs = (
        ("allocated", plain.allocated_mib, drafted.allocated_mib),
        ("reserved", plain.reserved_mib, drafted.reserved_mib),
        ("resident", plain.rss_mib, drafted.rss_mib),
    )
    parts = [
        f"{name} {after - before:+,.1f} MiB"
        for name, before, after in pairs
        if before is not None and after is not None
    ]
    return f"peak memory added by drafting: {', '.join(parts) or 'not known here'}"


def _pairs(place: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in place.items())
