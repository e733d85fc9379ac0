"""What all commands share: the global options, accepted before and behind the command's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tui import output, schema, settings


@dataclass(slots=True)
class Globals:
    """The global options as given; None or False where one was not."""

    config: str | None = None
    data_dir: str | None = None
    profile: str | None = None
    quiet: bool = False
    no_color: bool = False

    def settings(self, flags: Mapping[str, Any] | None = None) -> settings.Settings:
        """Settings with these options and a command's own flags. Raises ConfigError."""
        return settings.load(
            flags, config=self.config, data_dir=self.data_dir, profile=self.profile
        )

    def note(self, text: str) -> None:
        """A line on stderr that `-q` silences."""
        if not self.quiet:
            output.note(text)


def global_options() -> list[click.Parameter]:
    """The global options; new objects, since a command owns its own."""
    return [
        click.Option(["--config"], metavar="FILE", help="Settings file."),
        click.Option(["--data-dir"], metavar="DIR", help="Folder of conversations and state."),
        click.Option(["--profile"], metavar="P", help="Settings of a [profiles.P] table."),
        click.Option(
            ["-q", "--quiet"], is_flag=True, help="Say nothing but the result and errors."
        ),
        click.Option(["--no-color"], is_flag=True, help="No colours."),
    ]


class Command(click.Command):
    """A command that takes the global options too; its function gets `Globals` first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = global_options()
        for option in self._shared:
            assert isinstance(option, click.Option)
            option.hidden = True
        self.params.extend(self._shared)

    def invoke(self, ctx: click.Context) -> Any:
        found = ctx.find_object(Globals) or Globals()
        for option in self._shared:
            assert option.name is not None
            if value := ctx.params.pop(option.name):
                setattr(found, option.name, value)
        ctx.obj = found
        return super().invoke(ctx)


class ForkCommand(Command):
    """A command whose `--fork [TURN]` may be followed by the prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from tui.conversation import fork_words

        return super().parse_args(ctx, fork_words(args))


class Text(click.ParamType):
    """Text that can be stored: bytes that are no UTF-8 become U+FFFD, with a warning."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        from tui.prompt_text import readable

        return readable(value)


TEXT = Text()
FILE = click.Path(path_type=Path)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--json` of every command that prints data."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(
        function
    )


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--device` of every command that loads a model."""
    return click.option(
        "--device", metavar="DEVICE", help="Where the model runs: auto|cpu|cuda|npu."
    )(function)


def kv_dtype_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--kv-dtype` of every command that runs a model."""
    return click.option(
        "--kv-dtype", metavar="FORMAT", help="How keys and values are held: bf16|int8|int4|fp8."
    )(function)


def draft_model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--draft-model` of every command that drafts."""
    return click.option(
        "--draft-model", metavar="MODEL", help="A smaller model of the same tokenizer that guesses."
    )(function)


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the model, the engine and the sampler, for `chat` and `ask`."""
    for option in reversed(
        (
            click.option("-m", "--model", metavar="MODEL", help="Catalogue name, .gguf or folder."),
            click.option("-s", "--system", type=TEXT, metavar="SYSTEM", help="System prompt."),
            click.option(
                "-o",
                "--option",
                "options",
                nargs=2,
                multiple=True,
                metavar="K V",
                help="A sampling setting: -o temperature 0.",
            ),
            click.option("--spec", metavar="MODE", help="Drafting: none|auto|chain:N|tree:N."),
            click.option(
                "--drafters", metavar="A,..", help="Who guesses: auto, or ngram,history,heads,..."
            ),
            draft_model_option,
            click.option("--context", metavar="N", help="Tokens a conversation may hold."),
            click.option(
                "--on-overflow",
                metavar="POLICY",
                help="When a turn does not fit: error|turns|oldest|window|..., with parameters.",
            ),
            device_option,
            kv_dtype_option,
            click.option("--threads", metavar="N", help="CPU threads."),
            click.option("--kv-restore", metavar="WHEN", help="Read pages: auto|always|never."),
            click.option("--ephemeral", is_flag=True, help="Keep nothing on disk."),
        )
    ):
        function = option(function)
    return function


def resume_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which chat to go on with; `-r` is the command's own."""
    for option in (
        click.option(
            "--fork", metavar="[TURN]", help="Go on in a fork, from that turn or the last."
        ),
        click.option("-c", "--continue", "newest", is_flag=True, help="Continue the newest chat."),
    ):
        function = option(function)
    return function


def flags_of(options: tuple[tuple[str, str], ...], **flags: Any) -> dict[str, Any]:
    """Settings by dotted key, from `-o K V` pairs and flags that name one. Raises ConfigError."""
    found = {schema.key_of(name): value for name, value in options}
    names = {
        "model": "model",
        "spec": "spec.mode",
        "drafters": "spec.drafters",
        "draft_model": "spec.draft_model",
        "context": "context.limit",
        "on_overflow": "context.on_overflow",
        "device": "device",
        "kv_dtype": "kv.dtype",
        "threads": "threads",
        "kv_restore": "kv.restore",
        "max_tokens": "sampling.max_tokens",
        "seed": "sampling.seed",
        "stop": "sampling.stop",
        "logprobs": "sampling.logprobs",
        "grammar": "sampling.grammar",
        "theme": "ui.theme",
        "ascii": "ui.ascii",
    }
    found.update({names[name]: value for name, value in flags.items() if value not in (None, ())})
    return found
