"""`chatkv models`: what can be loaded, and getting it."""

from __future__ import annotations

import sys
from typing import Any

import click

from chatkv.errors import UnknownModel
from chatkv.models import catalog
from tui import output
from tui.command import Command, Globals, json_option


@click.group(short_help="List, describe and fetch models.")
def models() -> None:
    """List, describe and fetch models."""


@models.command(name="list", cls=Command, short_help="The models chatkv knows.")
@json_option
@click.pass_obj
def list_(_found: Globals, as_json: bool) -> None:
    """The models chatkv knows, and whether they are on this machine."""
    rows = catalog.list_models()
    if as_json:
        output.write_json({"models": [_listing_json(row) for row in rows]})
        return
    table = [["name", "size", "context", "license", "here", ""]]
    table += [
        [
            row.name,
            output.size(row.size_bytes),
            str(row.context_limit),
            row.license,
            "yes" if row.path else "no",
            row.about,
        ]
        for row in rows
    ]
    for text in output.columns(table, right=(1, 2)):
        output.line(text)


@models.command(cls=Command, short_help="Where a model comes from and what it is.")
@click.argument("name", required=False)
@json_option
@click.pass_obj
def info(found: Globals, name: str | None, as_json: bool) -> None:
    """Where a model comes from and what it is. NAME is the model of the settings by default."""
    model = catalog.find(name or found.settings()["model"])
    known = next((row for row in catalog.list_models() if row.name == model.name), None)
    data: dict[str, Any] = {
        "name": model.name,
        "path": str(model.path),
        "kind": model.kind,
        "size_bytes": model.size_bytes,
        "sha256": model.sha256 or (catalog.sha256_of(model.path) if model.kind == "gguf" else None),
        "context_limit": model.context_limit,
        "license": known.license if known else None,
        "about": known.about if known else None,
    }
    if as_json:
        output.write_json(data)
        return
    rows = [[key, "-" if value is None else str(value)] for key, value in data.items()]
    for text in output.columns(rows):
        output.line(text)


@models.command(cls=Command, short_help="Fetch a model once.")
@click.argument("name", required=False)
@json_option
@click.pass_obj
def pull(found: Globals, name: str | None, as_json: bool) -> None:
    """Fetch a model of the catalogue into the cache folder, its content checked."""
    wanted = name or found.settings()["model"]
    here = _where(wanted)
    model = catalog.pull(wanted, _progress(found))
    if as_json:
        output.write_json({"name": model.name, "path": str(model.path), "fetched": here is None})
    else:
        found.note(f"{model.name} is {'already ' if here else ''}here: {model.path}")


def _where(name: str) -> str | None:
    try:
        return str(catalog.find(name).path)
    except UnknownModel:
        return None


def _progress(found: Globals) -> catalog.Progress:
    said: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in said and output.is_terminal(sys.stderr):
            said.add(what)
            found.note(f"{what} ({output.size(total)})")

    return tell


def _listing_json(row: catalog.ModelListing) -> dict[str, Any]:
    return {
        "name": row.name,
        "path": str(row.path) if row.path else None,
        "size_bytes": row.size_bytes,
        "license": row.license,
        "context_limit": row.context_limit,
        "about": row.about,
    }
