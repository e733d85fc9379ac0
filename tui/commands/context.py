"""`chatkv context, forget, recall, pin, unpin`: what a model sees of a chat, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from chatkv.errors import UsageError
from sessions.port import ChatPort, ContextTurn, ContextView
from tui import output, wiring
from tui.command import Command, Globals, json_option
from tui.commands.chats import id_argument
from tui.commands.redact import NEGATIVE, turns_argument
from tui.turns import spans, turn_numbers, which_turns


@click.command(cls=Command, short_help="What the model sees of a chat.")
@id_argument
@json_option
@click.pass_obj
def context(found: Globals, ref: str, as_json: bool) -> None:
    """Each turn of a chat: live, forgotten, partly, redacted or unanswered; pinned or not; by whom.

    ID is a name, name:fork, @last, or the first 4 or more characters of an id.
    """
    with wiring.open_workspace(found.settings()) as work:
        chat = work.chats.open(ref)
        view, name = chat.context(), chat.name
    if as_json:
        output.write_json({"session": chat.id, "name": name, **context_json(view)})
        return
    for text in context_lines(view):
        output.line(text)


@click.command(cls=Command, context_settings=NEGATIVE, short_help="Hide turns from the model.")
@id_argument
@click.argument("turns", metavar="TURNS...", nargs=-1)
@click.option("--before", metavar="N", help="All turns before this one that are not pinned.")
@json_option
@click.pass_obj
def forget(
    found: Globals, ref: str, turns: tuple[str, ...], before: str | None, as_json: bool
) -> None:
    """Put turns out of the model's sight from the next turn on. You still see them.

    TURNS are 3, 1-4 or -2. `chatkv recall` brings them back.
    """
    if bool(turns) == (before is not None):
        raise UsageError("Name either turns or --before N.", hint="Turns are 3, 1-4 or -2.")

    def act(chat: ChatPort) -> list[int]:
        shown = chat.turns()
        if before is None:
            numbers = turn_numbers(" ".join(turns), len(shown))
        else:
            (first,) = turn_numbers(before, len(shown))
            seen = [turn for turn in shown if turn.seen == "live" and not turn.pinned]
            numbers = [turn.number for turn in seen if turn.number < first]
        chat.forget(numbers)
        return numbers

    _change(found, ref, act, "forgotten", "From the next turn on the model does not see", as_json)


@click.command(cls=Command, context_settings=NEGATIVE, short_help="Show turns to the model again.")
@id_argument
@click.argument("turns", metavar="TURNS...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that are out of its sight.")
@json_option
@click.pass_obj
def recall(found: Globals, ref: str, turns: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Bring turns back into the model's sight, from the next turn on.

    What was computed since they left is computed again then, unless it is stored.
    """
    if bool(turns) == every:
        raise UsageError("Name either turns or --all.", hint="Turns are 3, 1-4 or -2.")

    def act(chat: ChatPort) -> list[int]:
        view = chat.context()
        count = len(view.turns)
        numbers = list(view.missing) if every else turn_numbers(" ".join(turns), count)
        if numbers:
            chat.recall(numbers)
        return numbers

    _change(found, ref, act, "recalled", "From the next turn on the model sees again", as_json)


@click.command(cls=Command, context_settings=NEGATIVE, short_help="Keep turns in every context.")
@id_argument
@turns_argument
@json_option
@click.pass_obj
def pin(found: Globals, ref: str, turns: tuple[str, ...], as_json: bool) -> None:
    """Protect turns from every policy, in every fork that has them. You can still forget them."""
    _change(found, ref, _pins(turns, pinned=True), "pinned", "Pinned:", as_json)


@click.command(cls=Command, context_settings=NEGATIVE, short_help="Let pinned turns go again.")
@id_argument
@turns_argument
@json_option
@click.pass_obj
def unpin(found: Globals, ref: str, turns: tuple[str, ...], as_json: bool) -> None:
    """Let policies forget turns again."""
    _change(found, ref, _pins(turns, pinned=False), "unpinned", "No longer pinned:", as_json)


def _pins(turns: tuple[str, ...], *, pinned: bool) -> Callable[[ChatPort], list[int]]:
    """What sets or lifts the pins of these turns, and says which they were."""

    def act(chat: ChatPort) -> list[int]:
        numbers = turn_numbers(" ".join(turns), len(chat.turns()))
        if warning := chat.pin(numbers, pinned=pinned):
            output.note(warning)
        return numbers

    return act


def _change(
    found: Globals,
    ref: str,
    act: Callable[[ChatPort], list[int]],
    name: str,
    said: str,
    as_json: bool,
) -> None:
    with wiring.open_workspace(found.settings()) as work:
        chat = work.chats.open(ref)
        numbers = act(chat)
        view = chat.context()
    if as_json:
        output.write_json({"session": chat.id, name: numbers, "context": context_json(view)})
    else:
        found.note(f"{said} {which_turns(numbers)}." if numbers else "Nothing is out of its sight.")
        if name == "recalled" and view.kept is not None:
            found.note(f"The next turn: {recall_price(view)}.")


def context_json(view: ContextView) -> dict[str, Any]:
    """The object of `context --json`."""
    return {
        "limit": view.limit or None,
        "used": view.used,
        "used_next": view.used_next,
        "reserved": view.reserved,
        "policy": view.policy,
        "system_tokens": view.system_tokens,
        "missing": list(view.missing),
        "why": {str(number): policy for number, policy in view.why.items()},
        "forget": list(view.forget),
        "recall": list(view.recall),
        "kept": view.kept,
        "recomputed": view.recomputed,
        "warning": view.warning,
        "limit_reason": view.limit_reason,
        "turns": [
            {
                "turn": turn.number,
                "prompt": turn.prompt,
                "tokens": turn.tokens,
                "state": turn.state,
                "why": turn.why or None,
                "pinned": turn.pinned,
                **({"summary": True} if turn.summary else {}),
            }
            for turn in view.turns
        ],
    }


def context_lines(view: ContextView) -> list[str]:
    """The same for people."""
    used = "unknown" if view.used is None else f"{view.used:,}"
    limit = f"{view.limit:,}" if view.limit else "unknown"
    limit += f" ({view.limit_reason})" if view.limit_reason else ""
    system = "" if view.system_tokens is None else f", {view.system_tokens} of them system prompt"
    lines = [f"{used} tokens in sight{system}; limit {limit}, {view.reserved:,} kept for the reply"]
    if view.turns:
        table = [["turn", "tok", "model sees it", "prompt"]]
        table += [_cells(turn) for turn in view.turns]
        lines += output.columns(table, right=(0, 1))
    if view.forget:
        lines.append(f"With the next turn these go: {spans(list(view.forget))}")
    if view.recall:
        price = f" ({recall_price(view)})" if view.kept is not None else ""
        lines.append(f"With the next turn these come back: {spans(list(view.recall))}{price}")
    return [*lines, view.warning] if view.warning else lines


def recall_price(view: ContextView) -> str:
    """What a recall costs at most, as far as it can be told without a model."""
    return (
        f"{view.kept:,} tokens before them are found again where their pages are; "
        f"{view.recomputed:,} are computed again"
    )


def _cells(turn: ContextTurn) -> list[str]:
    state = turn.state if turn.state != "live" else "yes"
    by = f" ({turn.why})" if turn.why else ""
    pinned = ", pinned" if turn.pinned else ""
    pinned += ", a summary" if turn.summary else ""
    tokens = "?" if turn.tokens is None else str(turn.tokens)
    return [str(turn.number), tokens, f"{state}{by}{pinned}", output.shorten(turn.prompt, 50)]
