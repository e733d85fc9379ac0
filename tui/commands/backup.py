"""`chatkv backup` and `chatkv recover`: a copy of the store of chats, of a good one and of a
damaged one."""

from __future__ import annotations

from pathlib import Path

import click

from chatkv.errors import StoreError, plural
from tui import output, wiring
from tui.command import FILE, Command, Globals, json_option


@click.command(cls=Command, short_help="Copy the store of chats while it is in use.")
@click.argument("target", metavar="FILE", type=FILE)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@json_option
@click.pass_obj
def backup(found: Globals, target: Path, force: bool, as_json: bool) -> None:
    """Copy chat.db to FILE, also while others write to it, and check the copy.

    To go back to it, put it in the place of chat.db while no chatkv runs.
    """
    from sessions.recovery import backup as copy

    settings = found.settings()
    path = settings.folders.chat_db
    if not path.exists():
        raise StoreError(
            f"There is no session store at {path}.", hint="Choose its folder with --data-dir."
        )
    with wiring.open_store(settings) as store:
        made = copy(store, target, force=force)
    if as_json:
        names = ("bytes", "sessions", "turns", "messages")
        output.write_json({"file": str(target), **{name: made[name] for name in names}})
    else:
        found.note(
            f"Copied {plural(made['sessions'], 'chat')} (forks counted), "
            f"{plural(made['turns'], 'turn')} to {target} "
            f"({output.size(made['bytes'])}, checked)."
        )


@click.command(cls=Command, short_help="Save what can be read of a damaged store.")
@click.argument("damaged", metavar="[FILE]", required=False, type=FILE)
@click.option("-o", "--output", "target", type=FILE, metavar="FILE", help="The new store.")
@click.option("--force", is_flag=True, help="Overwrite the new store.")
@json_option
@click.pass_obj
def recover(
    found: Globals, damaged: Path | None, target: Path | None, force: bool, as_json: bool
) -> None:
    """Write what can be read of a damaged chat.db to a new store beside it.

    The damaged file (FILE, or the one in use) is only read. Look at the new store with
    chatkv --data-dir once it is called chat.db in a folder of its own.
    """
    from sessions.recovery import recover as save

    source = damaged or found.settings().folders.chat_db
    target = target or source.with_name(f"{source.name}.recovered")
    done = save(source, target, force=force)
    if as_json:
        output.write_json(
            {
                "file": str(target),
                "pages": done.pages,
                "unreadable_pages": done.unreadable_pages,
                "read": done.read,
                "lost": done.lost,
            }
        )
        return
    read = ", ".join(f"{count} {name}" for name, count in done.read.items() if count)
    lost = ", ".join(f"{count} {name}" for name, count in done.lost.items() if count)
    found.note(f"Read {read}: {target}.")
    found.note(f"  Unreadable: {done.unreadable_pages} of {plural(done.pages, 'page')}.")
    found.note(f"  Known to be lost: {lost or 'nothing'}.")
    found.note(f"  {source} is unchanged. To use the new one: move the old away, rename the new.")
