"""What all measurements share: `--runs`, `--csv`, `--json`, and where a result goes."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from chatkv.errors import UsageError
from tui import output
from tui.command import FILE

WRONG = 7
"""Exit status when a result is wrong: a fast wrong answer is no result."""
STDOUT = "-"

Function = Callable[..., Any]


def result_options(*, runs: int, runs_help: str) -> Callable[[Function], Function]:
    """`--json`, `--csv` and `--runs` of every measurement.

    Args:
        runs: Where nobody says.
        runs_help: What is run so often.
    """
    options = (
        click.option(
            "--runs", type=click.IntRange(1, 10_000), default=runs, show_default=True, metavar="N",
            help=runs_help,
        ),
        click.option("--csv", "csv_file", type=FILE, metavar="FILE", help="Write rows as CSV."),
        click.option(
            "--json", "json_file", is_flag=False, flag_value=STDOUT, metavar="[FILE]",
            help="Write one JSON object; to stdout without FILE.",
        ),
    )  # fmt: skip

    def add(function: Function) -> Function:
        for option in options:
            function = option(function)
        return function

    return add


def write_result(
    data: dict[str, Any], lines: Iterable[str], csv_file: Path | None, json_file: str | None
) -> None:
    """Write a result where it is wanted: the lines for people, unless JSON goes to stdout.

    Raises:
        UsageError: A file cannot be written.
    """
    if csv_file is not None:
        _write(csv_file, as_csv(data))
    write_json_file(data, json_file)
    if json_file == STDOUT:
        output.write_json(data)
    else:
        for text in lines:
            output.line(text)


def write_json_file(data: dict[str, Any], json_file: str | None) -> None:
    """Write a result to its file, whole or not at all, if it goes to one. Raises UsageError."""
    if json_file is not None and json_file != STDOUT:
        _write(Path(json_file), json.dumps({"v": output.VERSION, **data}, indent=1) + "\n")


def as_csv(data: dict[str, Any]) -> str:
    """The rows of a result, each with what it was measured on. Of what is in a row, lists stay
    out, and the fields of an object get its name in front."""
    facts = {key: data["about"][key] for key in ("device", "commit", "command")}
    facts |= data["about"]["versions"]
    rows = [_flat(row) for row in data["rows"]]
    text = io.StringIO()
    fields: Sequence[str] = [*dict.fromkeys(key for row in rows for key in row), *facts]
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **facts} for row in rows)
    return text.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": part for name, part in _flat(value).items()}
        elif not isinstance(value, list):
            found[key] = value
    return found


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a pipe, or the terminal
            path.write_text(text, encoding="utf-8")
        else:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", hint="Name another file."
        ) from error
