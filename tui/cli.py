"""The `chatkv` command: which word means which command, and how errors become exit statuses.

Knows names and help lines only; a command's module is imported when it runs. A first word that is
no command is a prompt; one that is nearly a command is refused.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

import chatkv
from chatkv.errors import ChatKVError, UsageError
from tui import output
from tui.command import Globals, global_options
from tui.interrupts import Stopped

COMMANDS = {
    "chat": ("tui.commands.chat:chat", "Open the chat screen (also: chatkv [PROMPT])."),
    "ask": ("tui.commands.ask:ask", "Ask once and print the reply."),
    "list": ("tui.commands.chats:list_", "List the chats, newest first."),
    "show": ("tui.commands.chats:show", "Print a chat."),
    "search": ("tui.commands.chats:search", "Find chats by their words."),
    "explain": ("tui.commands.explain:explain", "Why each turn was computed, or was not."),
    "rename": ("tui.commands.chats:rename", "Give a chat another name."),
    "fork": ("tui.commands.chats:fork", "Start a new chat that shares the turns of another."),
    "context": ("tui.commands.context:context", "What the model sees of a chat."),
    "forget": ("tui.commands.context:forget", "Hide turns from the model."),
    "recall": ("tui.commands.context:recall", "Show turns to the model again."),
    "pin": ("tui.commands.context:pin", "Keep turns in every context."),
    "unpin": ("tui.commands.context:unpin", "Let pinned turns go again."),
    "redact": ("tui.commands.redact:redact", "Take turns from the model for good."),
    "rm": ("tui.commands.chats:rm", "Move chats to the trash, or delete them for good."),
    "restore": ("tui.commands.chats:restore", "Bring chats back from the trash."),
    "trash": ("tui.commands.trash:trash", "Empty the trash."),
    "export": ("tui.commands.export:export", "Write chats to a file."),
    "import": ("tui.commands.import_chats:import_", "Read chats from files."),
    "backup": ("tui.commands.backup:backup", "Copy the store of chats while it is in use."),
    "recover": ("tui.commands.backup:recover", "Save what can be read of a damaged store."),
    "verify": ("tui.commands.verify:verify", "Prove that drafting changes no token."),
    "bench": ("tui.commands.bench:bench", "Measure this machine."),
    "train-heads": ("tui.commands.train_heads:train_heads", "Train draft heads for a model."),
    "models": ("tui.commands.models:models", "List, describe and fetch models."),
    "kv": ("tui.commands.kv:kv", "What the page cache on disk holds; check it, clean it up."),
    "doctor": ("tui.commands.doctor:doctor", "Check this installation."),
    "config": ("tui.commands.config:config", "Show settings and folders."),
}
"""Name to `module:command` and its help line."""

DEFAULT = "chat"
ELSEWHERE = {
    "ls": "list", "delete": "rm", "remove": "rm", "run": "chat -m MODEL", "pull": "models pull",
}  # fmt: skip
"""What other programs call commands, and what it is here."""


class LazyGroup(click.Group):
    """Commands by name, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = self._first_own_word(args)
        word = args[place] if place < len(args) else None
        if word == "help":
            args = [*args[:place], *args[place + 1 :], "--help"]
        elif word == "version" and len(args) == place + 1:
            args = [*args[:place], "--version"]
        elif word is None or word not in (*COMMANDS, "-h", "--help", "--version"):
            _refuse_near_miss(word)
            args = [*args[:place], DEFAULT, *args[place:]]
        return super().parse_args(ctx, args)

    def _first_own_word(self, args: Sequence[str]) -> int:
        """Where the global options end."""
        takes_value = {
            name: not option.is_flag
            for option in self.params
            if isinstance(option, click.Option)
            for name in option.opts
        }
        place = 0
        while place < len(args) and (name := args[place].partition("=")[0]) in takes_value:
            place += 2 if takes_value[name] and "=" not in args[place] else 1
        return place


def _refuse_near_miss(word: str | None) -> None:
    if word is None or len(word) < 2 or word.startswith("-") or " " in word:
        return
    meant = ELSEWHERE.get(word.lower())
    if meant is None and len(word) > 2:
        close = difflib.get_close_matches(word.lower(), [*COMMANDS, "help"], 1, 0.7)
        meant = close[0] if close else None
    if meant:
        raise UsageError(
            f"There is no command {word!r}.",
            hint=f'Did you mean {meant}? To send it as a prompt: chatkv chat "{word}"',
        )


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=global_options(),
    subcommand_metavar="[PROMPT] | COMMAND ...",
    epilog='A first word that is no command is a prompt: chatkv "Hello".',
)
@click.version_option(chatkv.__version__, prog_name="chatkv", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, **given: Any) -> None:
    """Chat with a local model in the terminal. It never re-reads what it already knows."""
    ctx.obj = Globals(**given)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    options = args[: args.index("--")] if "--" in args else args
    as_event = "--jsonl" in options
    as_json = as_event or "--json" in options
    try:
        # Not `cli.main`: it has its own words for errors, and its own status for a closed pipe.
        with cli.make_context("chatkv", list(args)) as ctx:
            return cli.invoke(ctx) or 0
    except click.exceptions.Exit as left:
        return left.exit_code
    except ChatKVError as error:
        failure = error
    except click.ClickException as error:
        failure = _as_ours(error)
    except (Stopped, click.Abort, KeyboardInterrupt) as stop:
        failure = Interrupted(stop.exit_code if isinstance(stop, Stopped) else 130)
        if not as_json:
            return failure.exit_code
    try:
        output.write_error(failure, as_json=as_json, as_event=as_event)
    except ChatKVError:  # stdout itself is what failed
        output.write_error(failure, as_json=False)
    return failure.exit_code


def main() -> None:
    """The entry point."""
    try:
        code = run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read us has enough. Python flushes once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    sys.exit(code)


class Interrupted(ChatKVError):
    """A signal came before there was a reply. Said with `--json` only."""

    code = "interrupted"

    def __init__(self, exit_code: int) -> None:
        super().__init__("Stopped before there was a reply.")
        self.exit_code = exit_code


def _as_ours(error: click.ClickException) -> ChatKVError:
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx else "chatkv"
    message = error.format_message()
    hint = f"See: {command} --help"
    if "unexpected extra argument" in message:
        hint = f'Put a prompt of several words in quotes: {command} "..."'
    return UsageError(message, hint=hint)


if __name__ == "__main__":
    main()
