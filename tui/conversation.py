"""Opening a conversation as the flags ask, finding its turns by number. Knows the ports only."""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.errors import UnknownSession, UsageError, plural
from sessions.port import ChatPort, TurnView
from tui.wiring import Workspace

LAST = "@last"
"""The newest chat."""
LAST_TURN = "last"


def fork_words(args: Sequence[str]) -> list[str]:
    """`--fork [TURN]` with its turn filled in: the word behind it may be the prompt instead."""
    words = list(args)
    for place, word in enumerate(words):
        if word == "--":
            break
        if word == "--fork":
            following = words[place + 1] if place + 1 < len(words) else ""
            if following.removeprefix("-").isdigit():
                words[place : place + 2] = [f"--fork={following}"]
            else:
                words[place] = f"--fork={LAST_TURN}"
            break
    return words


def check_resume(
    newest: bool, ref: str | None, *, ephemeral: bool, system: str | None, fork: str | None
) -> str | None:
    """The chat that `-c` and `-r ID` name, or None for a new one. Raises UsageError."""
    if newest and ref is not None:
        raise UsageError("-c and -r exclude each other.", hint="-c is the newest chat, -r ID any.")
    chosen = LAST if newest else ref
    if chosen is None:
        if fork is not None:
            raise UsageError("--fork needs a chat to fork.", hint="Name it with -c or -r ID.")
        return None
    if ephemeral:
        raise UsageError("An ephemeral chat is always a new one.", hint="Leave out -c and -r.")
    if system is not None:
        raise UsageError(
            "A chat keeps the system prompt it began with.", hint="Start a new one for another."
        )
    return chosen


def open_chat(
    work: Workspace, ref: str | None, *, system: str | None = None, fork: str | None = None
) -> ChatPort:
    """Open, fork or begin a chat, and set what flags and environment demand for its turns.

    Raises:
        UnknownSession: There is no such chat or turn.
        ConfigError: A setting that the chat refuses.
    """
    if ref is None:
        chat = work.chats.new(system=system)
    else:
        chat = work.chats.open(ref)
        if fork is not None:
            chat = chat.fork(None if fork == LAST_TURN else find_turn(chat, fork).id)
    demand(work, chat)
    return chat


def demand(work: Workspace, chat: ChatPort) -> None:
    """Set what flags and environment ask for: they win over what the chat itself remembers."""
    for key, value in work.settings.demanded("sampling").items():
        chat.set(key, value)
    if work.settings.values["spec.mode"].origin in ("flag", "env"):
        set_spec(chat, work.settings["spec.mode"])
    if work.settings.values["context.on_overflow"].origin in ("flag", "env"):
        chat.set_policy(work.settings["context.on_overflow"])


def set_spec(chat: ChatPort, mode: str) -> None:
    """Change how the turns to come are drafted. Raises ConfigError."""
    chat.set_spec(mode)


def find_turn(chat: ChatPort, number: str | int) -> TurnView:
    """The turn of that number on the open path; -1 is the last.

    Raises:
        UnknownSession: There is no such turn.
        UsageError: That is no number.
    """
    try:
        wanted = int(number)
    except ValueError:
        raise UsageError(f"{number!r} is no number of a turn.", hint="Write 3, or -1.") from None
    turns = chat.turns()
    if wanted < 0:
        wanted += len(turns) + 1
    for turn in turns:
        if turn.number == wanted:
            return turn
    raise UnknownSession(
        f"{chat.name or chat.id} has no turn {number}.",
        hint=f"It has {plural(len(turns), 'turn')}.",
    )
