"""`chatkv chat`, which is also what `chatkv` alone does: the screen, or lines with --plain."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from chatkv.errors import UsageError
from tui import output, prompt_text, wiring
from tui.command import TEXT, ForkCommand, Globals, flags_of, resume_options, sampling_options
from tui.conversation import check_resume, open_chat
from tui.loading import show_loading

PICK = ""
"""`-r` without an id."""


@click.command(cls=ForkCommand, short_help="Open the chat screen (also: chatkv [PROMPT]).")
@click.argument("prompt", required=False, type=TEXT)
@resume_options
@click.option(
    "-r",
    "--resume",
    is_flag=False,
    flag_value=PICK,
    metavar="[ID]",
    type=TEXT,
    help="Continue this chat; without ID, choose one.",
)
@sampling_options
@click.option("--plain", is_flag=True, help="Lines instead of a screen.")
@click.option("--theme", metavar="T", help="Theme of the screen.")
@click.option("--ascii", is_flag=True, default=None, help="No signs beyond ASCII.")
@click.pass_obj
def chat(
    found: Globals,
    prompt: str | None,
    newest: bool,
    fork: str | None,
    resume: str | None,
    system: str | None,
    options: tuple[tuple[str, str], ...],
    ephemeral: bool,
    plain: bool,
    **flags: Any,
) -> int:
    """Chat. PROMPT is sent first.

    Without a terminal on both ends, or with TERM=dumb, it is --plain: one line is one prompt.
    """
    ref = check_resume(newest, resume, ephemeral=ephemeral, system=system, fork=fork)
    if prompt is not None:
        prompt_text.check(prompt)
    settings = found.settings(flags_of(options, **flags))
    lines = plain or os.environ.get("TERM") == "dumb"
    lines = lines or not (output.is_terminal(sys.stdout) and output.is_terminal(sys.stdin))
    pick = ref == PICK
    if pick and lines:
        raise UsageError("-r needs an id here.", hint="See: chatkv list")
    ref = None if pick else ref
    if found.no_color:
        os.environ["NO_COLOR"] = "1"
    if not lines:
        wiring.check_looks(settings)
    with wiring.open_workspace(settings, ephemeral=ephemeral, resume=ref, policy="turns") as work:
        if lines:
            show_loading(work.engine, found)
            work.start()
        else:
            work.engine.start()  # before anything is drawn; without a model one can still read
        current = open_chat(work, ref, system=system, fork=fork)
        if not lines:
            return wiring.run_screen(work, current, prompt=prompt, pick=pick)
        from tui.plain import PlainChat

        return PlainChat(work, current, found).run(prompt)
