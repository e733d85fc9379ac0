"""`chatkv config`: which value each setting has and where it comes from."""

from __future__ import annotations

from typing import Any

import click

from tui import output
from tui.command import Command, Globals, json_option
from tui.schema import SETTINGS


@click.group(short_help="Show settings and folders.")
def config() -> None:
    """Show settings and folders."""


@config.command(cls=Command, short_help="Each setting, its value and its origin.")
@json_option
@click.pass_obj
def show(found: Globals, as_json: bool) -> None:
    """Each setting, its value and what set it: flag, env, profile, file or default."""
    values = found.settings().values
    if as_json:
        rows = [
            {"key": key, "value": v.value, "origin": v.origin, "where": v.where or None}
            for key, v in values.items()
        ]
        output.write_json({"settings": rows})
        return
    table = [["setting", "value", "from", ""]]
    table += [
        [key, _shown(v.value), v.origin, v.where or SETTINGS[key].about]
        for key, v in values.items()
    ]
    for text in output.columns(table):
        output.line(text)


@config.command(cls=Command, short_help="Where files live.")
@json_option
@click.pass_obj
def path(found: Globals, as_json: bool) -> None:
    """Where settings, conversations, pages, logs and converted models live."""
    folders = found.settings().folders
    places = {
        "config": folders.config,
        "data": folders.data,
        "state": folders.state,
        "cache": folders.cache,
        "chat_db": folders.chat_db,
        "kv_db": folders.kv_db,
        "engine_log": folders.engine_log,
    }
    if as_json:
        output.write_json({name: str(place) for name, place in places.items()})
        return
    for text in output.columns([[name, str(place)] for name, place in places.items()]):
        output.line(text)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={keys}" for name, keys in value.items()) or "-"
    return str(value)
