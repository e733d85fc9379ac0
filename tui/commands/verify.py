"""`chatkv verify`: plays prompts plain and drafted, and compares the token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from chatkv.errors import plural
from tui import output
from tui.command import (
    FILE,
    Command,
    Globals,
    device_option,
    draft_model_option,
    json_option,
    kv_dtype_option,
)
from tui.interrupts import Interrupts
from tui.progress import Progress

DIFFERENT = 7
"""Exit status when an expectation failed."""


class Numbers(click.ParamType):
    """`0,0.7,1`."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 <= number < float("inf") for number in numbers):
            self.fail(f"{value!r} is no list of temperatures such as 0,0.7,1.", param, ctx)
        return numbers


@click.command(cls=Command, short_help="Prove that drafting changes no token.")
@click.option(
    "--prompts",
    type=FILE,
    multiple=True,
    metavar="PATH",
    help="JSONL file or folder; else a few built in.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N conversations.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Most tokens of a reply.",
)
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
    "--drafters",
    default="ngram,random",
    show_default=True,
    metavar="A,..",
    help="Who guesses: ngram, history, heads, random, ...",
)
@draft_model_option
@click.option("-m", "--model", metavar="MODEL", help="Catalogue name, .gguf or folder.")
@device_option
@kv_dtype_option
@click.option("--threads", metavar="N", help="CPU threads.")
@json_option
@click.pass_obj
def verify(
    found: Globals,
    prompts: tuple[Path, ...],
    limit: int | None,
    max_tokens: int,
    temperatures: tuple[float, ...],
    drafters: str,
    draft_model: str | None,
    model: str | None,
    device: str | None,
    kv_dtype: str | None,
    threads: str | None,
    as_json: bool,
) -> int:
    """Play prompts with drafting off and on, for each drafter and temperature, and compare ids.

    Each line of a prompt file is an object with `turns`, played in order. Exit status 7 unless no
    reply differs and something was drafted. Ctrl+C ends it with a report on what was compared.
    """
    if draft_model and "draft_model" not in drafters.split(","):
        drafters += ",draft_model"
    flags = {
        "model": model,
        "device": device,
        "threads": threads,
        "spec.drafters": drafters,
        "kv.dtype": kv_dtype,
    }
    settings = found.settings(flags)
    from chatkv.kv.format import KVFormat
    from chatkv.models import catalog

    file = catalog.find(settings["model"])
    from sessions.verify import verify_prompts  # loads torch, here in this process

    with Interrupts() as interrupts:
        playing = False

        def stop() -> bool:
            nonlocal playing
            playing = True
            return bool(interrupts.exit_code)

        interrupts.guard(lambda: None, lambda: playing)
        report = verify_prompts(
            file,
            list(prompts),
            device=settings["device"],
            limit=limit,
            max_tokens=max_tokens,
            temperatures=temperatures,
            drafters=settings["spec.drafters"],
            draft_model=draft_model,
            threads=settings["threads"],
            kv=KVFormat(settings["kv.dtype"], settings["kv.keep_layers"]),
            progress=Progress(found.note),
            stop=stop,
        )
    if as_json:
        output.write_json(report)
    else:
        for text in output.columns([[key, _told(value)] for key, value in report.items()]):
            output.line(text)
    if report["different"]:
        wrong = plural(report["different"], "reply")
        found.note(f"{wrong} came out different: drafting changed the text.")
    elif not report["complete"]:
        found.note("Stopped: only the replies in this report were compared.")
        return interrupts.exit_code
    elif not report["drafted_steps"]:
        found.note("Nothing was drafted, so nothing is proved. Use more tokens or other drafters.")
    elif not as_json:
        told = f"{plural(report['tokens'], 'token')} of {plural(report['replies'], 'reply')}"
        output.line(f"The same text with and without drafting: {told}.")
    return DIFFERENT if report["different"] or not report["drafted_steps"] else 0


def _told(value: Any) -> str:
    """A number or a list, for people."""
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
