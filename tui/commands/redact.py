"""`chatkv redact`: turns that the model and every stored page lose for good."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import click

from chatkv.errors import UsageError, plural
from tui import output, wiring
from tui.command import TEXT, Command, Globals, json_option
from tui.commands.chats import id_argument
from tui.turns import turn_numbers, which_turns

turns_argument = click.argument("turns", metavar="TURNS...", nargs=-1, required=True, type=TEXT)
NEGATIVE = {"ignore_unknown_options": True}
"""So that -2 is a turn and no option."""


@click.command(
    cls=Command, context_settings=NEGATIVE, short_help="Take turns from the model for good."
)
@id_argument
@turns_argument
@click.option("--purge", is_flag=True, help="Blank their text and ids too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def redact(
    found: Globals, ref: str, turns: tuple[str, ...], purge: bool, yes: bool, as_json: bool
) -> None:
    """Take turns from the model, and delete every stored page that saw them. No way back.

    TURNS are 3, 1-4 or -2. The text stays for you to read unless --purge. Forks that share a turn
    lose it as well. What comes behind is computed again without it.
    """
    from sessions import deletion

    settings = found.settings()
    with wiring.open_store(settings) as store:
        row = store.find(ref)
        path = store.path(row.id)
        numbers = turn_numbers(" ".join(turns), len(path) - 1)
        ids = [path[number].turn.id for number in numbers]
        forks = deletion.shared_with(store, row.id, ids)
        versions = len(store.versions(ids)) - len(ids)
        _confirm(numbers, forks, versions, purge=purge, yes=yes, as_json=as_json)
        kv = settings.folders.kv_db
        remove = partial(deletion.purge_pages, store, kv, limit_bytes=settings["kv.disk_max"])
        gone = deletion.redact(store, ids, purge=purge, remove=remove)
    if as_json:
        output.write_json(
            {
                "session": row.id,
                "redacted": numbers,
                "versions": versions,
                "forks": list(forks),
                "purged": purge,
                "pages": gone.pages,
                "files": list(gone.files),
            }
        )
        return
    found.note(f"Redacted {which_turns(numbers)}, and {plural(gone.pages, 'stored page')} with it.")
    for file in gone.files:
        found.note(f"Deleted: {file}")
    if purge:
        found.note("Exports and backups of your own may still hold the text.")


def _confirm(
    numbers: list[int],
    forks: Sequence[str],
    versions: int,
    *,
    purge: bool,
    yes: bool,
    as_json: bool,
) -> None:
    if yes:
        return
    if as_json or not output.is_terminal(sys.stdin):
        shared = f" They are shared with {', '.join(forks)}." if forks else ""
        raise UsageError(f"Redacting has to be confirmed.{shared}", hint="Add --yes.")
    if forks:
        output.note(f"Shared with {', '.join(forks)}: these lose them too.")
    if versions:
        output.note(f"{plural(versions, 'other reply')} to the same prompts go as well.")
    what = "Take from the model and blank the text of" if purge else "Take from the model"
    output.confirm(f"{what} {which_turns(numbers)}? Nothing brings them back")
