"""docs/cli.md names every command, option, setting and exit status."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from chatkv import errors
from tui import cli
from tui.schema import SETTINGS
from tui.settings import PLACES

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name."""
    for name in cli.COMMANDS:
        command = cli.cli.get_command(None, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", found) for sub, found in command.commands.items())
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda x: str(x))
def test_each_command_and_option_is_documented(name, command):
    section = re.search(rf"\*\*`{name}\b.*?(?=\n\*\*`|\n## )", PAGE, re.DOTALL)
    assert section, f"no section of {name}"
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            shortest = min(option.opts, key=len)
            assert f"`{shortest}" in section[0], f"{name} {option.opts}"


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda x: str(x))
def test_each_option_says_what_it_is_for_and_takes(name, command):
    context = click.Context(command, info_name=name)
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{name} {option.opts}"
            assert "RANGE" not in option.make_metavar(context), f"{name} {option.opts}"


def test_global_options_are_documented():
    for option in cli.cli.params:
        assert f"`{option.opts[0]}" in PAGE


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.key)
def test_each_setting_is_documented(setting):
    assert f"| `{setting.key}` |" in PAGE
    assert setting.key == "keys" or f"`{setting.env}`" in PAGE


def test_places_and_exit_statuses_are_documented():
    assert all(f"`{name}`" in PAGE for name in PLACES)
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.ChatKVError)
    }
    assert all(re.search(rf"^\| {code} \|", PAGE, re.MULTILINE) for code in codes)
