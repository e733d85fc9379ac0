"""`chatkv doctor`: is everything here that a chat needs? One row a check."""

from __future__ import annotations

import click

from tui import output
from tui.command import Command, Globals, device_option, flags_of, json_option, kv_dtype_option
from tui.health import MARKS, Check, checks


@click.command(cls=Command, short_help="Check this installation.")
@click.option("--load", is_flag=True, help="Load the model for real.")
@device_option
@kv_dtype_option
@json_option
@click.pass_obj
def doctor(
    found: Globals, load: bool, device: str | None, kv_dtype: str | None, as_json: bool
) -> int:
    """Check Python, packages, device, model, stores and, with --load, the engine.

    Exit status 1 if a check fails; a warning is none.
    """
    rows: list[Check] = []
    settings = found.settings(flags_of((), device=device, kv_dtype=kv_dtype))
    for check in checks(found, settings, load=load):
        rows.append(check)
        if not as_json:
            output.line(f"{MARKS[check.status]:4}  {check.name:13}  {check.detail}")
            if check.hint:
                output.line(f"{'':21}{check.hint}")
    if as_json:
        output.write_json({"checks": [check.to_json() for check in rows]})
    return 1 if any(check.status == "fail" for check in rows) else 0
