"""`chatkv trash` and `chatkv rm --forever`: deleting chats for good."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from chatkv.errors import UnknownSession, UsageError, plural
from tui import output, wiring
from tui.command import Command, Globals, json_option
from tui.drafts import delete_drafts
from tui.settings import Settings

if TYPE_CHECKING:
    from sessions.records import SessionRow
    from sessions.store import ChatStore

DAY_MS = 86_400_000


@click.group(short_help="Empty the trash.")
def trash() -> None:
    """The trash; `chatkv list --trash` shows it, `chatkv restore` brings chats back."""


@trash.command(cls=Command, short_help="Delete what is in the trash for good.")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Only what lies there so long.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def empty(found: Globals, older_than: float | None, yes: bool, as_json: bool) -> None:
    """Delete the chats in the trash for good, with their token ids and stored pages.

    What a chat outside the trash shares with them stays.
    """
    settings = found.settings()
    before = time.time_ns() // 1_000_000 - DAY_MS * (older_than or 0)
    with wiring.open_store(settings) as store:
        rows = [
            row
            for row in store.sessions(trash=True)
            if older_than is None or (row.trashed_at or 0) <= before
        ]
        names = [row.title or row.first_line or row.id[:12] for row in rows]
        if rows:
            _confirm(names, yes=yes, as_json=as_json)
        _delete(found, settings, store, [row.id for row in rows], as_json)


def delete_for_good(found: Globals, refs: Sequence[str], *, yes: bool, as_json: bool) -> None:
    """`rm --forever`: chats of the list or of the trash; all must exist before one goes."""
    settings = found.settings()
    with wiring.open_store(settings) as store:
        rows = {row.id: row for row in (_find(store, ref) for ref in refs)}
        _confirm([row.title or row.id[:12] for row in rows.values()], yes=yes, as_json=as_json)
        _delete(found, settings, store, list(rows), as_json)


def _find(store: ChatStore, ref: str) -> SessionRow:
    try:
        return store.find(ref)
    except UnknownSession as unknown:
        try:
            return store.find(ref, trash=True)
        except UnknownSession:
            raise unknown from None


def _confirm(names: Sequence[str], *, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if as_json or not output.is_terminal(sys.stdin):
        raise UsageError("Deleting for good has to be confirmed.", hint="Add --yes.")
    shown = ", ".join(output.shorten(name, 40) for name in names)
    output.confirm(f"Delete {shown} for good? Nothing brings it back")


def _delete(
    found: Globals, settings: Settings, store: ChatStore, ids: list[str], as_json: bool
) -> None:
    from sessions.deletion import delete_forever

    folders = settings.folders
    delete_drafts(folders.drafts, ids)
    pages = delete_forever(store, ids, folders.kv_db, limit_bytes=settings["kv.disk_max"])
    copies = sorted(map(str, folders.data.glob(f"{folders.chat_db.name}.bak-*")))
    if as_json:
        output.write_json({"deleted": ids, "pages": pages, "backups": copies})
        return
    found.note(
        f"{plural(len(ids), 'chat')} deleted for good, {plural(pages, 'stored page')} with them."
    )
    if ids and copies:
        found.note(f"Backups may still hold them: {', '.join(copies)}")
