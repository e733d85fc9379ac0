"""`chatkv export`: conversations as JSON lines that another chatkv can read back, or as what other
programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.errors import StoreError, UsageError, plural
from tui import output, wiring
from tui.command import FILE, TEXT, Command, Globals, json_option
from tui.commands.kv import open_kv
from tui.settings import Settings

if TYPE_CHECKING:
    from sessions.records import TurnPath
    from sessions.store import ChatStore

FORMATS = ("chatkv", "openai", "sharegpt", "markdown")


@click.command(cls=Command, short_help="Write chats to a file.")
@click.argument("refs", metavar="ID...", nargs=-1, required=True, type=TEXT)
@click.option(
    "-o", "--output", "target", type=FILE, metavar="FILE", help="Where to; else to stdout."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    default="chatkv",
    show_default=True,
    help="chatkv alone keeps ids, seeds and forks.",
)
@click.option("--path", "path_only", is_flag=True, help="Only the open path, without other forks.")
@click.option("--with-kv", is_flag=True, help="Stored pages too, as .safetensors beside FILE.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@json_option
@click.pass_obj
def export(
    found: Globals,
    refs: tuple[str, ...],
    target: Path | None,
    kind: str,
    path_only: bool,
    with_kv: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write whole chats with token ids, seeds and forks as chatkv JSON lines.

    The other formats hold the text of the open path: OpenAI messages and ShareGPT one chat a line,
    Markdown to read. Several chats follow one another. With --json the records stand in one object,
    or only their number when they go to FILE.
    """
    to_file = target is not None and str(target) != "-"
    if with_kv and (kind != "chatkv" or not to_file):
        raise UsageError("--with-kv needs --format chatkv and -o FILE.")
    settings = found.settings()
    with wiring.open_workspace(settings) as work:
        ids = [work.chats.open(ref).id for ref in refs]
        exports = [(i, list(_lines(work.store, i, kind, path_only=path_only))) for i in ids]
        trees = [work.store.tree(i, path_only=path_only)[1] for i in ids] if with_kv else []
    lines = [line.rstrip("\n") + "\n" for _, rows in exports for line in rows]
    if target is not None and to_file:
        text = "".join(lines)
        beside = target.with_suffix(".safetensors")
        if with_kv and beside.exists() and not force:
            raise UsageError(f"{beside} exists.", hint="Choose another name, or add --force.")
        _write_file(target, text, force=force)
        stored = _write_pages(settings, beside, trees, text, force=force) if with_kv else None
        if as_json:
            made = [{"session": i, "records": len(rows)} for i, rows in exports]
            kv = {"kv": stored} if with_kv else {}
            output.write_json({"file": str(target), "exports": made, **kv})
        else:
            found.note(f"Wrote {plural(len(lines), 'line')} to {target}.")
            if stored is not None:
                about = f"{plural(stored['pages'], 'page')} ({output.size(stored['bytes'])})"
                found.note(f"Wrote {about} to {stored['file']}.")
            elif with_kv:
                found.note("No pages of this are stored; what is imported is computed again.")
    elif as_json:
        output.write_json({"exports": [_records(i, rows, kind) for i, rows in exports]})
    else:
        output.write("".join(lines))


def _lines(store: ChatStore, chat_id: str, kind: str, *, path_only: bool) -> Iterator[str]:
    if kind == "chatkv":
        from sessions.exchange import export_jsonl

        return export_jsonl(store, chat_id, path_only=path_only)
    from sessions.exchange_formats import WRITERS

    return WRITERS[kind](store.family(chat_id)[0].title, store.path(chat_id))


def _write_pages(
    settings: Settings, path: Path, trees: Sequence[Sequence[TurnPath]], text: str, *, force: bool
) -> dict[str, Any] | None:
    """The stored pages of these chats as a file; None without any."""
    from sessions.exchange_kv import paths_of, stored_run, write_pages

    if not settings.folders.kv_db.exists():
        return None
    with closing(open_kv(settings)) as disk:
        run = stored_run(disk, [one for tree in trees for one in paths_of(tree)])
        if run is None:
            return None
        try:
            with path.open("wb" if force else "xb") as file:
                num_bytes = write_pages(disk, run, text.encode(), file)
        except (OSError, StoreError) as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
            raise
    return {"file": str(path), "pages": len(run.heads), "bytes": num_bytes}


def _records(chat_id: str, rows: Sequence[str], kind: str) -> dict[str, Any]:
    if kind == "markdown":
        return {"session": chat_id, "text": "".join(f"{row}\n" for row in rows)}
    return {"session": chat_id, "records": [json.loads(row) for row in rows]}


def _write_file(path: Path, text: str, *, force: bool) -> None:
    try:
        # Exclusive creation follows no link either.
        with path.open("w" if force else "x", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists.", hint="Choose another name, or add --force.") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
