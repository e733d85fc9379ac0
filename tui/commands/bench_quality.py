"""`chatkv bench quality`: what is lost when keys and values are held in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.kv.format import NAMES
from tui import output
from tui.command import FILE, Command, Globals, device_option
from tui.commands.bench_result import WRONG, write_result
from tui.progress import Progress

if TYPE_CHECKING:
    from sessions.bench.quality import Report

STDOUT = "-"


class Lengths(click.ParamType):
    """`512,2048`."""

    name = "lengths"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            lengths = tuple(int(part) for part in value.split(","))
        except ValueError:
            lengths = ()
        if not lengths or min(lengths) < 256:
            self.fail(f"{value!r} is no list of lengths from 256 on, such as 512,2048.", param, ctx)
        return lengths


@click.command(cls=Command, short_help="Quality: what fewer bits of K/V lose.")
@click.option(
    "--kv-dtype",
    "formats",
    default=",".join(NAMES[1:]),
    show_default=True,
    metavar="F,..",
    help="Formats to compare with bf16.",
)
@click.option("--text", "texts", type=FILE, multiple=True, metavar="FILE", help="UTF-8 text.")
@click.option(
    "--tokens",
    type=click.IntRange(min=64),
    default=4096,
    show_default=True,
    metavar="N",
    help="Of each text.",
)
@click.option(
    "--needle-lengths",
    type=Lengths(),
    default="512,2048,8192",
    show_default=True,
    metavar="L,..",
    help="Tokens of the texts that hide a needle.",
)
@click.option(
    "--needles",
    type=click.IntRange(1, 20),
    default=20,
    show_default=True,
    metavar="N",
    help="Texts of each length.",
)
@device_option
@click.option("-m", "--model", metavar="MODEL", help="Catalogue name, .gguf or folder.")
@click.option("--threads", metavar="N", help="CPU threads.")
@click.option("--csv", "csv_file", type=FILE, metavar="FILE", help="Write rows as CSV.")
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE]",
    help="Write one JSON object; to stdout without FILE.",
)
@click.pass_obj
def quality(
    found: Globals,
    formats: str,
    texts: tuple[Path, ...],
    tokens: int,
    needle_lengths: tuple[int, ...],
    needles: int,
    device: str | None,
    model: str | None,
    threads: str | None,
    csv_file: Path | None,
    json_file: str | None,
) -> int:
    """Read texts with each K/V format and compare with bf16: perplexity, KL, top-1, needles.

    Without --text the model writes three chats first, from fixed seeds. Texts share ragged steps;
    exit status 7 if a row has other bits than alone.
    """
    settings = found.settings({"model": model, "device": device, "threads": threads})
    from chatkv.kv.format import KVFormat
    from chatkv.models import catalog

    names = tuple(filter(None, (name.strip() for name in formats.split(","))))
    for name in names:
        KVFormat(name)  # an unknown one fails before the model is loaded
    file = catalog.find(settings["model"])
    from sessions.bench.quality import Request, measure  # loads torch, here in this process

    request = Request(
        formats=names,
        keep_layers=settings["kv.keep_layers"],
        texts=texts,
        tokens=tokens,
        needle_lengths=needle_lengths,
        needles=needles,
        device=settings["device"],
        threads=settings["threads"],
    )
    report = measure(file, request, Progress(found.note))
    write_result(report.to_json(), table(report), csv_file, json_file)
    if report.differing:
        found.note(f"{report.differing} rows have other bits alone than in company.")
    return WRONG if report.differing else 0


def table(report: Report) -> list[str]:
    """For people."""
    from sessions.bench.about import summary

    lengths = list(report.rows[0].needles) if report.rows else []
    head = ["kv", "bytes/token", "tokens/byte", "perplexity", "KL", "top-1"]
    cells = [[*head, *(f"needles {int(length):,}" for length in lengths), ""]]
    for row in report.rows:
        cells.append(
            [
                row.kv,
                f"{row.token_bytes:,}",
                f"{row.tokens_per_byte:.2f}x",
                f"{row.perplexity:.4f}",
                "-" if row.kv == "bf16" else f"{row.kl:.1e}",
                f"{row.top1:.4f}",
                *(
                    f"{round(row.needles[length] * report.needles)}/{report.needles}"
                    for length in lengths
                ),
                "experimental" if row.experimental else "",
            ]
        )
    right = tuple(range(1, 6 + len(lengths)))
    lines = [
        summary(report.about),
        f"{report.tokens:,} tokens of {len(report.texts)} texts ({', '.join(report.texts)}), "
        f"side by side in ragged steps; {report.differing} rows differ from each alone",
        "",
        *output.columns(cells, right=right),
    ]
    if report.policies:
        head = ["policy", "forgot", "in sight", "perplexity", "all in sight", "KL", "top-1"]
        rows = [
            [
                row.policy,
                f"{row.forgotten:,}",
                f"{row.in_sight:,}",
                f"{row.perplexity:.4f}",
                f"{row.perplexity_full:.4f}",
                f"{row.kl:.1e}",
                f"{row.top1:.4f}",
            ]
            for row in report.policies
        ]
        context = report.policies[0].context
        lines += ["", f"forgetting, context of {context:,} tokens, 256 tokens behind it", ""]
        lines += output.columns([head, *rows], right=(1, 2, 3, 4, 5, 6))
    lines += [f"missing: {name}: {why}" for name, why in report.missing.items()]
    return lines
