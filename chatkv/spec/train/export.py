"""Stage `export`: a trained head and its model card, as they are shipped."""

# What was measured is JSON: too loose for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatkv.models.catalog import DEFAULT_MODEL
from chatkv.models.spec import ModelSpec
from chatkv.spec.heads.file import HeadFile, load, save
from chatkv.spec.heads.modules import parameters_of

SOURCES = (
    ("self-instruct, seed tasks and user-oriented instructions", "yizhongw/self-instruct", 412),
    ("IFEval prompts", "google-research/google-research", 535),
    ("Arena-Hard prompts", "lmarena/arena-hard-auto", 864),
    ("role-play prompts (CC0-1.0)", "f/awesome-chatgpt-prompts", 207),
    ("composed for this project (CC0-1.0)", "chatkv", 4069),
)
"""Prompts of the heads that ship: what, where from, rows. Apache-2.0 where nothing is said."""


def export(
    path: Path,
    spec: ModelSpec,
    tokenizer: bytes,
    to: Path,
    facts: Mapping[str, Any],
    measured: Mapping[str, Any] | None = None,
) -> Path:
    """Copy a checkpoint under its final name and write the card beside it.

    Args:
        facts: More about how it was trained.
        measured: What `measure` found, if the checkpoint does not say so itself.

    Raises:
        HeadsMismatch: It was made for another model.
    """
    file = load(path, spec, tokenizer)
    file = replace(file, training={**file.training, **facts}, measured=measured or file.measured)
    name = f"{spec.name.lower()}-{file.head.shape.kind}.safetensors"
    save(to / name, file, packed=True)
    (to / name).with_suffix(".md").write_text(card(spec, file), encoding="utf-8")
    return to / name


def card(spec: ModelSpec, file: HeadFile) -> str:
    """The model card."""
    shape, training = file.head.shape, file.training
    weights = sum(weight.numel() for _, weight in parameters_of(file.head))
    lines = [
        f"# Draft head for {spec.name}: {shape.kind}",
        "",
        "Guesses the next tokens from states of the target, for drafting in chatkv. The text never",
        "depends on it. Licence: Apache-2.0.",
        "",
        f"- Target: {spec.name}, quantised tensors SHA-256 `{file.target['weights']}`; with other",
        "  weights it is refused.",
        f"- Tokenizer: `{file.target['tokenizer']}`.",
        f"- Form: {weights / 1e6:.2f} M weights, matrices in eight bits; taps of layers "
        f"{', '.join(map(str, shape.taps))}; {shape.draft_ids:,} draft ids; trained for "
        f"{shape.depth} guesses.",
        "- Learned from answers of the target itself, half of them at temperature 0, the others at",
        "  0.7 and 1. No answers of others.",
        "- Limits: English for the most part, and this exact quantisation.",
        "",
        "## Training",
        "",
        *(f"- {name}: {value}" for name, value in training.items()),
        "",
    ]
    if spec.name == DEFAULT_MODEL:
        lines += ["## Prompts", "", "| prompts | from | rows |", "|---|---|---|"]
        lines += [f"| {what} | {where} | {rows:,} |" for what, where, rows in SOURCES]
        lines += ["| made up by the target | after a bare user header | the rest |", ""]
    lines += ["## Tokens a step", "", *_table(file.measured)]
    return "\n".join(lines) + "\n"


def _table(measured: Mapping[str, Any]) -> list[str]:
    if not measured:
        return ["Not measured."]
    lines = [
        "Walked offline over answers to prompts it never saw; without answers that repeat sixteen",
        "tokens or more in brackets. `python -m chatkv.spec.train measure` makes this table.",
        "",
        "| form | temperature | answers | tau | a_1, a_2, ... |",
        "|---|---|---|---|---|",
    ]
    for form, by_heat in measured.items():
        if not isinstance(by_heat, Mapping):
            continue
        for heat, line in by_heat.items():
            lines.append(
                f"| {form} | {heat} | {line['answers']} ({line['without_repeats']}) | "
                f"{line['tau']} ({line['tau_without_repeats']}) | "
                f"{' '.join(map(str, line['a']))} |"
            )
    return lines
