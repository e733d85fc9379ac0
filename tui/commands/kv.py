"""`chatkv kv`: the page cache on disk."""

from __future__ import annotations

import click

from tui import output, wiring
from tui.command import Command, Globals, json_option


@click.group(short_help="What the page cache on disk holds.")
def kv() -> None:
    """The page cache on disk. Deleting kv.db is always allowed: it costs time and nothing else."""


@kv.command(cls=Command, short_help="Pages, tokens and bytes.")
@json_option
@click.pass_obj
def stats(found: Globals, as_json: bool) -> None:
    """Pages, tokens and bytes that kv.db holds."""
    settings = found.settings()
    data = wiring.disk_stats(settings)
    data["path"] = str(settings.folders.kv_db)
    if as_json:
        output.write_json(data)
        return
    sizes = {"payload_bytes", "file_bytes", "limit_bytes"}
    rows = [[key, output.size(v) if key in sizes else str(v)] for key, v in data.items()]
    for text in output.columns(rows):
        output.line(text)
