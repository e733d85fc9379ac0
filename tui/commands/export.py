"""`chatkv export`: conversations as JSON lines that another chatkv can read back."""

from __future__ import annotations

import json
from pathlib import Path

import click

from chatkv.errors import StoreError, UsageError
from tui import output, wiring
from tui.command import FILE, TEXT, Command, Globals, json_option


@click.command(cls=Command, short_help="Write chats as JSON lines.")
@click.argument("refs", metavar="ID...", nargs=-1, required=True, type=TEXT)
@click.option("-o", "--output", "target", type=FILE, metavar="FILE", help="- is stdout.")
@click.option("--path", "path_only", is_flag=True, help="Only the open path, without other forks.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@json_option
@click.pass_obj
def export(
    found: Globals,
    refs: tuple[str, ...],
    target: Path | None,
    path_only: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write whole chats with token ids, seeds and forks as chatkv JSON lines.

    Several chats follow one another, each with its own header. With --json the records stand in
    one object, or only their number when they go to FILE.
    """
    from sessions.exchange import export_jsonl

    with wiring.open_workspace(found.settings()) as work:
        ids = [work.chats.open(ref).id for ref in refs]
        exports = [
            (chat_id, list(export_jsonl(work.store, chat_id, path_only=path_only)))
            for chat_id in ids
        ]
    lines = [line.rstrip("\n") + "\n" for _, rows in exports for line in rows]
    if target is not None and str(target) != "-":
        _write_file(target, "".join(lines), force=force)
        if as_json:
            made = [{"session": i, "records": len(rows)} for i, rows in exports]
            output.write_json({"file": str(target), "exports": made})
        else:
            found.note(f"Wrote {len(lines)} lines to {target}.")
    elif as_json:
        made = [{"session": i, "records": [json.loads(r) for r in rows]} for i, rows in exports]
        output.write_json({"exports": made})
    else:
        output.write("".join(lines), exact=True)


def _write_file(path: Path, text: str, *, force: bool) -> None:
    try:
        # Exclusive creation follows no link either.
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists.", hint="Choose another name, or add --force.") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
