"""`chatkv train-heads`: draft heads for a model of one's own, from its own answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from chatkv.errors import ModelError
from chatkv.models import catalog
from tui import output
from tui.command import FILE, Command, Globals, device_option, json_option

DISTILL, TRAIN = 0.3, 0.6
"""Shares of the time; the rest is for measuring and loading."""
LEAST_MINUTES = 2.0


@click.command(cls=Command, name="train-heads", short_help="Train draft heads for a model.")
@click.argument("model", required=False)
@click.option(
    "--prompts",
    type=FILE,
    multiple=True,
    metavar="PATH",
    help="JSONL file or folder; beside what the model makes up.",
)
@click.option("--measure", "measured", type=FILE, multiple=True, metavar="PATH",
              help="Prompts to measure with, never trained on.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=LEAST_MINUTES), default=25.0, metavar="N",
              show_default=True, help="Time for everything.")  # fmt: skip
@click.option("--kind", type=click.Choice(["recurrent", "eagle", "parallel"]), default="recurrent",
              show_default=True, help="What is trained.")  # fmt: skip
@click.option("--import", "imported", type=FILE, metavar="DIR",
              help="Take an EAGLE-3 head of others instead: a folder as SafeAILab or "
              "Speculators lay it out.")  # fmt: skip
@click.option("--work", type=FILE, metavar="DIR", help="Folder of what is learned so far.")
@device_option
@json_option
@click.pass_obj
def train_heads(
    found: Globals,
    model: str | None,
    prompts: tuple[Path, ...],
    measured: tuple[Path, ...],
    minutes: float,
    kind: str,
    imported: Path | None,
    work: Path | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Train a draft head for MODEL, the model of the settings by default.

    The model answers the prompts and texts it makes up itself; the head learns from that. A run
    that is stopped goes on where it was. The head is used from then on with `--drafters heads`.
    Training needs a CUDA device; --device cpu takes days and is for trying it out.
    """
    settings = found.settings({"model": model, "device": device})
    name = settings["model"]
    file = catalog.find(name)
    folder = work or catalog.cache_dir() / "heads-training" / file.name.replace("/", "-")
    where = "cuda" if settings["device"] == "auto" else settings["device"]
    if where != "cpu" and imported is None:
        from chatkv.models.devices import expect_cuda, expect_no_npu

        expect_no_npu(where)
        expect_cuda(where)  # or every stage would find that out for itself
    target = catalog.cache_dir() / "heads"
    shared = ["--model", name, "--device", where, "--out", str(folder)]
    stages = [
        ["distill", "--minutes", f"{minutes * DISTILL:.2f}", *_paths("--prompts", prompts)],
        ["train", "--minutes", f"{minutes * TRAIN:.2f}", "--kinds", kind],
    ]
    if measured:
        rest = f"{minutes * (1 - DISTILL - TRAIN):.2f}"
        stages.append(
            ["measure", "--minutes", rest, "--kinds", kind, *_paths("--prompts", measured)]
        )
    stages.append(["export", "--kind", kind, "--to", str(target)])
    if imported is not None:
        stages = [["import", "--folder", str(imported), "--to", str(target)]]
        found.note(f"{imported} becomes a head of {file.name}.")
    else:
        found.note(
            f"{minutes:g} minutes of {where} for {file.name}: "
            f"{', '.join(stage[0] for stage in stages)}; files in {folder}."
        )
    for stage in stages:
        found.note(f"{stage[0]} ...")
        command = [sys.executable, "-m", "chatkv.spec.train", stage[0], *shared, *stage[1:]]
        try:
            done = subprocess.run(command, check=False)
        except KeyboardInterrupt:
            found.note(_kept(folder))
            raise
        if done.returncode:
            raise ModelError(
                f"The stage {stage[0]} ended with status {done.returncode}.",
                hint="Nothing was written." if imported is not None else _kept(folder),
            )
    if as_json:
        output.write_json(
            {
                "model": file.name,
                "kind": kind if imported is None else "eagle",
                "folder": str(target),
            }
        )
    else:
        output.line(f"The head is in {target}. Use it with --drafters ngram,heads.")


def _kept(folder: Path) -> str:
    """What there is of a run that ended early."""
    if not any(folder.glob("*.npz")):
        return "Nothing was learned."
    return "What was learned is kept: the same command goes on from there."


def _paths(option: str, paths: tuple[Path, ...]) -> list[str]:
    return [option, *map(str, paths)] if paths else []
