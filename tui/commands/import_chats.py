"""`chatkv import`: chats from files of ours, of OpenAI messages, of ShareGPT or of Markdown."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from chatkv.errors import ChatKVError, UsageError, plural
from tui import output, wiring
from tui.command import FILE, TEXT, Command, Globals, json_option

if TYPE_CHECKING:
    from sessions.exchange_import import Imported

FORMATS = ("auto", "chatkv", "openai", "sharegpt", "markdown")
SHOWN = 10
"""Failures that are told one by one; the rest are counted."""


@click.command(name="import", cls=Command, short_help="Read chats from files.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    default="auto",
    show_default=True,
    help="What FILE is; auto looks into it.",
)
@click.option("--name", type=TEXT, default="", metavar="N", help="Name of the chat.")
@click.option("--trust-kv", is_flag=True, help="Use the pages beside FILE, after checks.")
@click.option(
    "--max-bytes", type=click.IntRange(min=1), default=2 << 30, metavar="N", help="Most of a file."
)
@json_option
@click.pass_obj
def import_(
    found: Globals,
    files: tuple[Path, ...],
    kind: str,
    name: str,
    trust_kv: bool,
    max_bytes: int,
    as_json: bool,
) -> int:
    """Read chats from files; - is stdin.

    A conversation is stored whole or not at all, under an id of its own; one that is here with the
    same content is skipped. Those that cannot be read do not keep the others out.

    With --trust-kv the pages in FILE.safetensors are used: they are checked, one of them, chosen at
    random, is computed again and compared, and only the chats of FILE ever see them.
    """
    from sessions.exchange_files import LIMITS, BadFile
    from sessions.exchange_import import ImportStore

    if trust_kv:
        for path in files:
            if not path.with_suffix(".safetensors").is_file():
                raise UsageError(
                    f"There is no {path.with_suffix('.safetensors')}.", hint="Leave out --trust-kv."
                )
    chats: list[dict[str, Any]] = []
    failed: list[tuple[Path, BadFile]] = []
    with ExitStack() as open_files, ImportStore(found.settings().folders.chat_db) as store:
        # All must exist before one is read.
        for path, stream in [(path, open_files.enter_context(_open(path))) for path in files]:
            try:
                limits = replace(LIMITS, file_bytes=max_bytes)
                for chat in store.read(stream, kind=kind, name=name, limits=limits):
                    if isinstance(chat, BadFile):
                        failed.append((path, chat))
                        continue
                    chats.append(_json(path, chat))
                    if not as_json:
                        _say(found, path, chat)
            except BadFile as error:  # nothing more can be read of this file
                failed.append((path, error))
    for path in files:
        made = [chat for chat in chats if chat["file"] == str(path) and not chat["skipped"]]
        if made and trust_kv:
            taken = take_pages(found, path, [chat["session"] for chat in made], max_bytes)
            for chat in made:
                chat["kv_pages"] = taken
        elif made and not as_json and path.with_suffix(".safetensors").exists():
            found.note("The pages beside it are left out; --trust-kv uses them.")
    if failed and not chats:
        path, error = failed[0]
        more = f" ({len(failed) - 1} more like it.)" if len(failed) > 1 else ""
        raise _Unread(f"{_shown(path)}: {error.message}{more}", hint=error.hint)
    if as_json:
        bad = [{"file": str(p), "line": e.line, **e.to_json()} for p, e in failed]
        output.write_json({"chats": chats, "failed": bad})
    else:
        for path, error in failed[:SHOWN]:
            output.note(f"chatkv: {_shown(path)}: {error.message}")
        if len(failed) > SHOWN:
            output.note(f"chatkv: {len(failed) - SHOWN} more could not be read.")
    return _Unread.exit_code if failed else 0


def take_pages(found: Globals, path: Path, sessions: list[str], max_bytes: int) -> int:
    """Have the engine take the pages beside a file for the chats that came from it."""
    from sessions.exchange_kv import digest_of
    from sessions.records import KV_SALT
    from tui.loading import show_loading

    with wiring.open_workspace(found.settings(), resume=sessions[0]) as work:
        show_loading(work.engine, found)
        work.start()
        with path.open("rb") as file:
            jsonl = digest_of(file)
        pages = path.with_suffix(".safetensors").absolute()
        told = work.engine.call("take_pages", path=str(pages), jsonl=jsonl, max_bytes=max_bytes)
        for row in [row for one in sessions for row in work.store.family(one)]:
            work.store.set_settings(row.id, {**row.settings, KV_SALT: told["salt"]})
    found.note(f"Took {plural(told['pages'], 'page')}; one was computed again and is the same.")
    return int(told["pages"])


class _Unread(ChatKVError):
    """No conversation of a file could be read."""

    code = "bad_file"


def _open(path: Path) -> BinaryIO:
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"The file {path} cannot be read: {error.strerror}.") from error


def _shown(path: Path) -> str:
    return "stdin" if str(path) == "-" else str(path)


def _json(path: Path, chat: Imported) -> dict[str, Any]:
    return {
        "file": str(path),
        "line": chat.line,
        "session": chat.session,
        "name": chat.name,
        "turns": chat.turns,
        "forks": chat.forks,
        "skipped": chat.skipped,
        "unknown_ids": chat.unknown_ids,
        "notes": list(chat.notes),
    }


def _say(found: Globals, path: Path, chat: Imported) -> None:
    name = f"{output.shorten(chat.name, 40)} ({chat.session[:12]})"
    if chat.skipped:
        found.note(f"Skipped, the same is here: {name}.")
        return
    forks = f", {plural(chat.forks, 'fork')}" if chat.forks else ""
    found.note(f"Imported {name}: {plural(chat.turns, 'turn')}{forks}.")
    if chat.unknown_ids:
        found.note(
            f"  The ids of {plural(chat.unknown_ids, 'message')} are of a tokenizer not used here "
            "yet; with another model they are made anew from the text."
        )
    for note in chat.notes:
        found.note(f"  Note: {note}.")
