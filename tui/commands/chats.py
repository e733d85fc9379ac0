"""`chatkv list, show, search, rename, fork, rm, restore`: conversations without the screen."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from typing import Any

import click

from chatkv.errors import UsageError, plural
from sessions.port import ChatPort, ChatRow, TurnView
from tui import answer, output, wiring
from tui.command import TEXT, Command, Globals, json_option
from tui.conversation import find_turn
from tui.turn_tree import tree_lines

SORTS = {
    "updated": lambda row: -row.updated_at,
    "size": lambda row: -row.tokens,
    "name": lambda row: (row.name.lower(), row.fork.lower()),
}
ALL = 1 << 31
NAME_WANTED, NAME_LEAST = 30, 8
"""Characters of a name in a list: without them the model is left out; and what is left of it."""

id_argument = click.argument("ref", metavar="ID", type=TEXT)


@click.command(name="list", cls=Command, short_help="List the chats, newest first.")
@click.option("--trash", is_flag=True, help="Those in the trash.")
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    default="updated",
    show_default=True,
    help="What comes first.",
)
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="At most N.")
@json_option
@click.pass_obj
def list_(found: Globals, trash: bool, sort: str, limit: int | None, as_json: bool) -> None:
    """List the chats, newest first."""
    with wiring.open_workspace(found.settings()) as work:
        # Sorting by anything but time has to see all of them before it can leave some out.
        take = limit if limit and sort == "updated" else ALL
        rows = sorted(work.chats.chats(limit=take, trash=trash), key=SORTS[sort])[:limit]
    if as_json:
        output.write_json({"chats": [_row_json(row) for row in rows]})
    elif rows:
        _table(rows)
    else:
        found.note("The trash is empty." if trash else "There are no chats yet. Start: chatkv")


@click.command(cls=Command, short_help="Find chats by their words.")
@click.argument("query", type=TEXT)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="At most N.",
)
@json_option
@click.pass_obj
def search(found: Globals, query: str, limit: int, as_json: bool) -> None:
    """Find chats whose messages or names hold QUERY."""
    if not query.strip():
        raise UsageError("There is nothing to search for.", hint="Give a word or two.")
    with wiring.open_workspace(found.settings()) as work:
        rows = work.chats.chats(query, limit=limit)
    if as_json:
        output.write_json({"chats": [{**_row_json(row), "match": row.match} for row in rows]})
        return
    for row in rows:
        output.line(f"{_title(row)}  {row.id[:12]}  {output.when(row.updated_at)}")
        if row.match:
            output.line(f"  {output.shorten(row.match, 100)}")
    if not rows:
        found.note("No chat holds that.")


@click.command(cls=Command, short_help="Print a chat.")
@id_argument
@click.option("--turn", metavar="T", help="Only this turn; -1 is the last.")
@click.option("--tree", is_flag=True, help="All turns with forks and siblings, a line each.")
@json_option
@click.pass_obj
def show(found: Globals, ref: str, turn: str | None, tree: bool, as_json: bool) -> None:
    """Print the open path of a chat: prompts and replies. With --tree, where it parts.

    ID is a name, name:fork, @last, or the first 4 or more characters of an id.
    """
    if tree and turn is not None:
        raise UsageError("Only one of --tree and --turn can be used.")
    with wiring.open_workspace(found.settings()) as work:
        chat = work.chats.open(ref)
        if tree:
            _print_tree(chat, as_json)
            return
        turns = [find_turn(chat, turn)] if turn is not None else chat.turns()
        about = {"session": chat.id, "name": chat.name, "fork": chat.fork_name}
    if as_json:
        output.write_json({**about, "turns": [answer.turn_json(view) for view in turns]})
        return
    for view in turns:
        _print_turn(view)


@click.command(cls=Command, short_help="Give a chat another name.")
@id_argument
@click.argument("name", type=TEXT)
@json_option
@click.pass_obj
def rename(found: Globals, ref: str, name: str, as_json: bool) -> None:
    """Give a chat, or a fork of one, another name."""
    if not name.strip():
        raise UsageError("The name is empty.", hint="Give the chat a name to find it by.")
    with wiring.open_workspace(found.settings()) as work:
        chat = work.chats.open(ref)
        chat.rename(name)
        _say(found, as_json, f"Named {chat.id[:12]} {name}.", session=chat.id, name=chat.name)


@click.command(cls=Command, short_help="Start a new chat that shares the turns of another.")
@id_argument
@click.option("--at", metavar="TURN", help="The last turn to share; the newest by default.")
@click.option("--name", type=TEXT, default="", help="Name of the fork.")
@json_option
@click.pass_obj
def fork(found: Globals, ref: str, at: str | None, name: str, as_json: bool) -> None:
    """Start a chat that shares the turns of another; the other does not change."""
    with wiring.open_workspace(found.settings()) as work:
        chat = work.chats.open(ref)
        made = chat.fork(find_turn(chat, at).id if at is not None else None, name)
        shared = len(made.turns())
        _say(
            found,
            as_json,
            f"{made.name}:{made.fork_name} ({made.id[:12]}) shares {plural(shared, 'turn')}.",
            session=made.id,
            name=made.name,
            fork=made.fork_name,
            forked_from=chat.id,
            turns=shared,
        )


@click.command(cls=Command, short_help="Move chats to the trash, or delete them for good.")
@click.argument("refs", metavar="ID...", nargs=-1, required=True, type=TEXT)
@click.option("--forever", is_flag=True, help="Delete them, those in the trash too, for good.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def rm(found: Globals, refs: tuple[str, ...], forever: bool, yes: bool, as_json: bool) -> None:
    """Move chats to the trash. `chatkv restore` brings them back.

    With --forever they are deleted: text, token ids and stored pages. Turns that a fork shares stay
    with that fork.
    """
    if forever:
        from tui.commands.trash import delete_for_good

        delete_for_good(found, refs, yes=yes, as_json=as_json)
        return
    with wiring.open_workspace(found.settings()) as work:
        chats = [work.chats.open(ref) for ref in refs]  # all must exist before one goes
        if not yes and not as_json and output.is_terminal(sys.stdin):
            names = ", ".join(output.shorten(chat.name or chat.id[:12], 40) for chat in chats)
            output.confirm(f"Move {names} to the trash?")
        for chat in chats:
            work.chats.trash(chat.id)
        ids = [chat.id for chat in chats]
        _say(found, as_json, f"{len(ids)} in the trash; see chatkv list --trash.", trashed=ids)


@click.command(cls=Command, short_help="Bring chats back from the trash.")
@click.argument("refs", metavar="ID...", nargs=-1, required=True, type=TEXT)
@json_option
@click.pass_obj
def restore(found: Globals, refs: tuple[str, ...], as_json: bool) -> None:
    """Bring chats back from the trash."""
    with wiring.open_workspace(found.settings()) as work:
        for ref in refs:
            work.chats.restore(ref)
        _say(found, as_json, f"{len(refs)} brought back.", restored=list(refs))


def _say(found: Globals, as_json: bool, text: str, **data: Any) -> None:
    if as_json:
        output.write_json(data)
    else:
        found.note(text)


def _row_json(row: ChatRow) -> dict[str, Any]:
    data = asdict(row)
    del data["match"]
    return data


def _title(row: ChatRow, limit: int | None = None) -> str:
    """The name, cut to so many characters, but not the name of a fork behind it."""
    name = row.name or "(no turn yet)"
    fork = "" if row.forked_from is None else f":{row.fork}"
    if limit is not None:
        name = output.shorten(name, max(NAME_LEAST, limit - len(fork)))
    return name + fork


def _table(rows: list[ChatRow]) -> None:
    """As wide as the terminal, and whole where there is none: names there are for programs."""
    facts = [["turns", "tok", "updated", "model", "id"]]
    facts += [
        [str(row.turns), str(row.tokens), output.when(row.updated_at), row.model, row.id[:12]]
        for row in rows
    ]
    limit = None
    if output.is_terminal(sys.stdout):
        wide = shutil.get_terminal_size().columns
        limit = wide - 2 - max(map(output.cells, output.columns(facts)))
        if limit < NAME_WANTED:
            for line in facts:
                del line[3]
            limit = wide - 2 - max(map(output.cells, output.columns(facts)))
    names = ["name", *(_title(row, limit) for row in rows)]
    table = [[name, *line] for name, line in zip(names, facts, strict=True)]
    for text in output.columns(table, right=(1, 2)):
        output.line(text)


def _print_tree(chat: ChatPort, as_json: bool) -> None:
    about = {"session": chat.id, "name": chat.name, "fork": chat.fork_name}
    if as_json:
        output.write_json({**about, "tree": [asdict(turn) for turn in chat.tree()]})
        return
    for line in tree_lines(chat.tree()):
        output.line(line.lead + line.words())


def _print_turn(turn: TurnView) -> None:
    marks = [f"{turn.sibling}/{turn.siblings}"] if turn.siblings > 1 else []
    if turn.state != "done":
        marks.append(turn.state)
    who = ("summary asked for", "summary") if turn.summary else ("you", "assistant")
    output.line(" ".join([f"── {turn.number} {who[0]}", *(f"({mark})" for mark in marks)]))
    output.line(turn.prompt)
    output.line(f"── {turn.number} {who[1]}")
    if not turn.reply and turn.state == "interrupted":
        output.line(f"({answer.NO_REPLY})")
    else:
        output.line(turn.reply)
