"""`chatkv bench`: measurements on this machine, as a table, JSON or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.errors import plural
from tui import output
from tui.command import Command, Globals
from tui.commands.bench_quality import quality
from tui.commands.bench_result import WRONG, result_options, write_result
from tui.commands.bench_spec import spec
from tui.progress import Progress

if TYPE_CHECKING:
    from sessions.bench.attention import Report, Row


class Counts(click.ParamType):
    """`1,16,64`."""

    name = "counts"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in value.split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is no list of counts such as 1,16,64.", param, ctx)
        return counts


class Heads(click.ParamType):
    """`32/8`: query heads and kv heads."""

    name = "heads"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        query, slash, kv = value.partition("/")
        if not slash or not query.isdecimal() or not kv.isdecimal() or not int(query) * int(kv):
            self.fail(f"{value!r} is no pair of heads such as 32/8.", param, ctx)
        return int(query), int(kv)


@click.group(short_help="Measure this machine.")
def bench() -> None:
    """Measure this machine. What is timed is first compared with the reference."""


@bench.command(cls=Command, short_help="Attention: time, rates and memory.")
@click.option("--backend", "backends", metavar="B,..", help="Rows of the table; else all here.")
@click.option(
    "--shape",
    "kind",
    type=click.Choice(["decode", "prefill", "tree"]),
    default="decode",
    show_default=True,
    help="What the new rows are.",
)
@click.option(
    "--kv-len",
    "kv_lens",
    type=Counts(),
    default="512,2048,8192",
    show_default=True,
    metavar="L,..",
    help="Tokens of a sequence, new rows counted.",
)
@click.option(
    "--rows",
    type=Counts(),
    metavar="R,..",
    help="New rows of a sequence: 1, 16 of a tree, all of a prefill by default.",
)
@click.option(
    "--seqs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences side by side.",
)
@click.option(
    "--heads",
    type=Heads(),
    default="9/3",
    show_default=True,
    metavar="HQ/HK",
    help="Query heads and kv heads.",
)
@click.option(
    "--head-dim",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="D",
    help="Size of a head.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of queries, keys and values.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where attention runs.",
)
@result_options(runs=20, runs_help="Times each row is measured; the median is shown.")
@click.pass_obj
def attention(
    found: Globals,
    backends: str | None,
    kind: str,
    kv_lens: tuple[int, ...],
    rows: tuple[int, ...] | None,
    seqs: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    device: str,
    runs: int,
    csv_file: Path | None,
    json_file: str | None,
) -> int:  # fmt: skip
    """Time attention by every backend and peer that is here.

    Random keys and values on scattered pages; no model is loaded. Exit status 7 if a result is
    wrong.
    """
    from sessions.bench.attention import measure  # loads torch, here in this process
    from sessions.bench.request import Request

    request = Request(
        kind=kind,  # type: ignore[arg-type]
        kv_lens=kv_lens,
        rows=rows or (),
        num_seqs=seqs,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        backends=tuple(filter(None, (backends or "").split(","))),
        turns=runs,
    )

    report = measure(request, Progress(found.note))
    write_result(report.to_json(), table(report), csv_file, json_file)
    if report.num_wrong:
        found.note(f"{report.num_wrong} of {len(report.rows)} results are wrong.")
    return WRONG if report.num_wrong else 0


def table(report: Report) -> list[str]:
    """The table for people: a block for each number of rows, then what is missing and why."""
    from sessions.bench.about import summary

    lines = [summary(report.about)]
    blocks: dict[str, list[Row]] = {}
    for row in report.rows:
        # All of a prefill differ in their rows.
        rows = row.rows if row.kind != "prefill" or row.rows != row.kv_len else 0
        title = (
            f"{row.kind}, {plural(row.num_seqs, 'seq')}, "
            f"{plural(rows, 'row') if rows else 'all rows'}, "
            f"{row.num_heads}/{row.num_kv_heads} heads, D {row.head_dim}, {row.dtype}"
        )
        blocks.setdefault(title, []).append(row)
    for title, rows in blocks.items():
        on_cpu = all(row.allocated_mib is None for row in rows)
        memory = "peak RSS" if on_cpu else "allocated / reserved"
        cells = [["kv_len", "attention", "ms", "p10-p90", "TFLOP/s", "GB/s", memory]]
        last = None
        for row in rows:
            cells.append(["" if row.kv_len == last else f"{row.kv_len:,}", *_cells(row)])
            last = row.kv_len
        lines += ["", f"{title}; memory: peak MiB over inputs"]
        lines += output.columns(cells, right=(0, 2, 3, 4, 5, 6))
    gaps: dict[str, list[str]] = {}
    for gap in report.missing:
        where = "" if gap.kv_len is None else f" at kv_len {gap.kv_len:,}, {gap.rows:,} rows"
        gaps.setdefault(f"{gap.backend}: {gap.reason}", []).append(where)
    lines += [""] * bool(gaps)
    lines += [f"missing: {text}{';'.join(filter(None, where))}" for text, where in gaps.items()]
    return lines


def _cells(row: Row) -> list[str]:
    name = row.backend if row.backend not in ("triton", "cpu") else f"{row.backend} paged"
    if row.ms is None:
        return [name, "wrong", "", "", "", f"error {row.error:.1e}"]
    if row.allocated_mib is not None:
        memory = f"{row.allocated_mib:,.1f} / {row.reserved_mib:,.1f}"
    else:
        memory = "-" if row.rss_mib is None else f"{row.rss_mib:,.1f}"
    return [
        name,
        f"{row.ms:,.4f}" if row.ms < 1 else f"{row.ms:,.3f}",
        f"{row.p10_ms:,.4f}-{row.p90_ms:,.4f}",
        f"{row.tflop_per_s:,.3f}",
        f"{row.gb_per_s:,.1f}",
        memory,
    ]


bench.add_command(spec)
bench.add_command(quality)
