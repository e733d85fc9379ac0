"""`chatkv ask`: one prompt, one reply, for people and for scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from chatkv.errors import ConfigError, EngineLost, TimedOut, UsageError
from chatkv.events import Event, ForgetEvent, RecallEvent, Summarizing
from chatkv.forget import ANSWERS, asks_first
from tui import answer, output, prompt_text, wiring
from tui.command import (
    FILE,
    TEXT,
    ForkCommand,
    Globals,
    flags_of,
    json_option,
    resume_options,
    sampling_options,
)
from tui.conversation import check_resume, open_chat
from tui.interrupts import TIMEOUT, Interrupts, Stopped
from tui.loading import show_loading
from tui.printers import printer


@click.command(cls=ForkCommand, short_help="Ask once and print the reply.")
@click.argument("prompt", required=False, type=TEXT)
@sampling_options
@resume_options
@click.option("-r", "--resume", metavar="ID", type=TEXT, help="Continue this chat.")
@click.option(
    "-f", "--file", "files", type=FILE, multiple=True, help="A file to put behind PROMPT."
)
@json_option
@click.option("--jsonl", is_flag=True, help="One event a line.")
@click.option("--raw", is_flag=True, help="The exact text, on a terminal too.")
@click.option("-x", "--extract", is_flag=True, help="Only the last code block of the reply.")
@click.option("--stop", multiple=True, type=TEXT, metavar="S", help="Text that ends the reply.")
@click.option(
    "--json-schema", type=TEXT, metavar="FILE|JSON", help="The reply is JSON of this schema."
)
@click.option(
    "--regex", type=TEXT, metavar="RE", help="The whole reply matches this regular expression."
)
@click.option(
    "--logprobs", metavar="N", help="With --json: how likely each token and the best N were."
)
@click.option("--max-tokens", metavar="N", help="Most tokens of the reply.")
@click.option("--seed", metavar="N", help="Seed of the sampling noise.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=1e7),
    metavar="S",
    help="Seconds until the reply is stopped.",
)
@click.pass_obj
def ask(
    found: Globals,
    prompt: str | None,
    system: str | None,
    options: tuple[tuple[str, str], ...],
    ephemeral: bool,
    newest: bool,
    fork: str | None,
    resume: str | None,
    files: tuple[Path, ...],
    timeout: float | None,
    as_json: bool,
    jsonl: bool,
    raw: bool,
    extract: bool,
    json_schema: str | None,
    regex: str | None,
    **flags: Any,
) -> int:
    """Ask PROMPT and print the reply; - is stdin.

    What is piped in follows PROMPT after a blank line, then the files. The chat is saved and can be
    continued with -c, unless --ephemeral.
    """
    if as_json + jsonl + raw + extract > 1:
        raise UsageError("Only one of --json, --jsonl, --raw and -x can be used.")
    if timeout is not None and timeout != timeout:
        raise UsageError("--timeout is not a number.", hint="Give seconds, such as 30.")
    ref = check_resume(newest, resume, ephemeral=ephemeral, system=system, fork=fork)
    if flags["logprobs"] is not None and not (as_json or jsonl):
        raise UsageError("--logprobs needs --json or --jsonl.")
    grammar = _grammar(json_schema, regex)
    settings = found.settings(flags_of(options, grammar=grammar, **flags))
    if asks_first(policy := settings["context.on_overflow"] or "error"):
        raise _unanswered(policy)
    form = printer(as_json=as_json, jsonl=jsonl, raw=raw, extract=extract)
    text = prompt_text.assemble(prompt, files)
    chat = done = None
    moments: list[str] = []
    interrupts = Interrupts(timeout)
    try:
        with (
            interrupts,
            wiring.open_workspace(settings, ephemeral=ephemeral, resume=ref) as work,
        ):
            show_loading(work.engine, found)
            work.start()
            chat = open_chat(work, ref, system=system, fork=fork)
            interrupts.guard(chat.cancel, lambda: work.replying)

            if asks_first(chat.policy) and chat.policy not in ANSWERS and chat.plan(text):
                raise _unanswered(chat.policy)

            def pass_on(event: Event) -> None:
                interrupts.remind()
                if isinstance(event, ForgetEvent | RecallEvent):
                    moments.append(answer.moment(event))
                if isinstance(event, Summarizing) and not event.done and not (as_json or jsonl):
                    found.note(answer.summarizing(event))
                form.event(event, chat)

            done = answer.play(chat.send(text), pass_on)
            if interrupts.exit_code != TIMEOUT:
                form.end(chat, done, model=work.model_name, saved=not ephemeral)
    except (Stopped, EngineLost):
        if not interrupts.exit_code:
            raise
        if interrupts.exit_code != TIMEOUT:
            raise Stopped(interrupts.exit_code) from None
    finally:
        form.finish()
    if interrupts.exit_code == TIMEOUT:
        raise TimedOut(
            f"The reply was stopped after {timeout:g} s.",
            hint=f"What arrived is saved: chatkv show {chat.id}"
            if chat and chat.id and not ephemeral
            else "",
        )
    if done is not None and chat is not None and not (as_json or jsonl):
        for text in moments or answer.missing(chat.context()):
            found.note(text)
    if done is not None and done.notice:
        # Where both streams end in one place, it must not stand right behind the reply.
        found.note(("\n" if form.open_line else "") + done.notice)
    if done is not None and output.is_terminal(sys.stderr) and not (as_json or jsonl):
        found.note(answer.summary(done))
    return interrupts.exit_code


def _unanswered(policy: str) -> ConfigError:
    return ConfigError(
        f"on_overflow {policy} needs a screen to answer at.",
        hint="Here use error, turns, oldest, window or summarize:ask=no.",
    )


def _grammar(json_schema: str | None, regex: str | None) -> str | None:
    """The form that the flags ask for, as `sampling.grammar` spells it.

    Raises:
        UsageError: Two forms, or a file that cannot be read.
    """
    if json_schema is None:
        return None if regex is None else f"regex:{regex}"
    if regex is not None:
        raise UsageError("Only one of --json-schema and --regex can be used.")
    if json_schema.lstrip().startswith("{"):
        return f"json_schema:{json_schema}"
    try:
        text = Path(json_schema).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The schema {json_schema} cannot be read: {error}.", hint="Name a file, or write JSON."
        ) from None
    return f"json_schema:{text}"
