"""`chatkv explain`: why each turn of a chat was computed again, or was not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from chatkv.errors import UsageError, plural
from tui import answer, installed, output, wiring
from tui.command import Command, Globals, json_option
from tui.commands.chats import id_argument
from tui.conversation import find_turn
from tui.loading import show_loading

if TYPE_CHECKING:
    from sessions.divergence import Divergence, Side
    from sessions.explain import TurnReport


@click.command(cls=Command, short_help="Why each turn was computed, or was not.")
@id_argument
@click.option("--preview", is_flag=True, help="What going on with it would cost; loads the model.")
@click.option("--at", metavar="TURN", help="With --preview: after this turn, as a fork would.")
@json_option
@click.pass_obj
def explain(found: Globals, ref: str, preview: bool, at: str | None, as_json: bool) -> None:
    """For each turn of the open path: tokens reused and computed, and why.

    Where a prompt left what was stored before it, the position and both texts are shown. No model
    is loaded, but for --preview. ID is a name, name:fork, @last, or the first 4 or more characters
    of an id.
    """
    if at is not None and not preview:
        raise UsageError("--at goes with --preview.")
    if preview:
        _preview(found, ref, at, as_json)
        return
    from sessions import explain as reasons

    with wiring.open_store(found.settings()) as store:
        row = store.find(ref)
        model = str(row.settings.get("model") or "")
        tokenizer = installed.tokenizer_of(model) if model else None
        reports = reasons.explain(store, row.id, tokenizer)
        name = store.family(row.id)[0].title
    if as_json:
        turns = [asdict(report) for report in reports]
        output.write_json({"session": row.id, "name": name, "model": model, "turns": turns})
        return
    if not reports:
        found.note("This chat has no turn yet.")
        return
    table = [["turn", "prompt", "reused", "hit", "computed", "time", "why"]]
    table += [_cells(report) for report in reports]
    for text in output.columns(table, right=(0, 1, 2, 3, 4, 5)):
        output.line(text)
    for report in reports:
        if report.divergence is not None:
            _show(report, report.divergence)


def _preview(found: Globals, ref: str, at: str | None, as_json: bool) -> None:
    """What the next prompt would find, and what it would have to wait for."""
    with wiring.open_workspace(found.settings(), resume=ref) as work:
        show_loading(work.engine, found)
        chat = work.chats.open(ref)
        turn = None if at is None else find_turn(chat, at).id
        work.start()
        work.engine.wait_ready()
        cost = chat.preview(turn)
        if as_json:
            output.write_json({"session": chat.id, "name": chat.name, "preview": asdict(cost)})
        else:
            output.line(f"{plural(cost.tokens, 'token')}: {answer.preview_words(cost)}")


def _cells(report: TurnReport) -> list[str]:
    hit = "-" if report.hit_rate is None else f"{100 * report.hit_rate:.0f}%"
    numbers = (report.prompt_tokens, report.reused, hit, report.computed)
    time = "" if report.prompt_ms is None else f"{report.prompt_ms:.0f} ms"
    return [str(report.turn), *("" if n is None else str(n) for n in numbers), time, _why(report)]


def _why(report: TurnReport) -> str:
    parts = [report.reason or report.state]
    if report.divergence is not None:
        where = f"at token {report.divergence.position}: {report.divergence.cause}"
        parts = (
            [f"{parts[0]} {where}"] if report.reason == "diverged" else [*parts, f"left {where}"]
        )
    if report.note:
        parts.append(report.note)
    if report.restored_pages:
        proof = {True: ", verified", False: ", refused by the model", None: ""}[report.verified]
        parts.append(f"{plural(report.restored_pages, 'page')} from disk{proof}")
    if report.host_pages:
        parts.append(f"{plural(report.host_pages, 'page')} from memory")
    return " · ".join(parts)


def _show(report: TurnReport, divergence: Divergence) -> None:
    output.line("")
    output.line(f"turn {report.turn} differs at token {divergence.position} ({divergence.cause})")
    output.line(f"  stored: {_side(divergence.stored)}")
    output.line(f"  now:    {_side(divergence.now)}")


def _side(side: Side) -> str:
    """Both parts as JSON strings, so that spaces and line breaks are seen."""
    if side.text is None:
        return f"ids {list(side.ids)}"
    return f"{_quoted(side.before or '')} then {_quoted(side.text)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
