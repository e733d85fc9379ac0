"""`chatkv kv`: the page cache on disk."""

from __future__ import annotations

import tempfile
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.errors import ChatKVError, StoreError, UsageError
from tui import output, wiring
from tui.command import Command, Globals, json_option
from tui.settings import Settings

if TYPE_CHECKING:
    from sessions.cachefile import CacheFile

NAMED = (
    *("prompt_tokens", "reused_tokens", "reusable_tokens", "hit_rate", "reuse_share"),
    *("pool", "host", "disk"),
)
SIZES = {"payload_bytes", "file_bytes", "limit_bytes", "freed_bytes"}


@click.group(short_help="What the page cache on disk holds; check it, clean it up.")
def kv() -> None:
    """The page cache on disk. Deleting kv.db is always allowed: it costs time and nothing else."""


@kv.command(cls=Command, short_help="Pages and bytes, and what reuse was worth.")
@click.argument("ref", metavar="[ID]", required=False)
@click.option("--prometheus", is_flag=True, help="As metrics for a text file collector.")
@json_option
@click.pass_obj
def stats(found: Globals, ref: str | None, prometheus: bool, as_json: bool) -> None:
    """Pages, tokens and bytes that kv.db holds, and how much of the prompts was reused.

    Rates are ratios of sums: over all chats and the last minutes, and with ID over its last turn
    and all of its turns. What each number means stands below them.
    """
    from sessions import metrics
    from sessions.counters import DEFINITIONS

    if prometheus and (ref is not None or as_json):
        raise UsageError("--prometheus tells of all chats, and goes with neither ID nor --json.")
    settings = found.settings()
    data, forgets = wiring.disk_stats(settings), wiring.forget_stats(settings)
    if prometheus:
        sums = wiring.reuse_stats(settings)["all"]
        output.write(metrics.prometheus({"disk": data, "all": sums, "forgets": forgets}))
        return
    data["path"] = str(settings.folders.kv_db)
    reuse = wiring.reuse_stats(settings, ref)
    shown = {key: DEFINITIONS[key] for key in DEFINITIONS if key in NAMED or key in reuse}
    if as_json:
        output.write_json({**data, "reuse": reuse, "forgets": forgets, "definitions": shown})
        return
    _print(data, as_json)
    output.line("")
    table = [["reuse", "turns", "prompt", "reused", "reusable", "hit rate", "share"]]
    table += [[name, *_cells(sums)] for name, sums in reuse.items()]
    for text in output.columns(table, right=(1, 2, 3, 4, 5, 6)):
        output.line(text)
    output.line("")
    for text in output.columns(_tiers(reuse), right=(1, 2, 3)):
        output.line(text)
    if forgets:
        output.line("")
        table = [["forgotten by", "times", "tokens"]]
        table += [[name, f"{n['times']:,}", f"{n['tokens']:,}"] for name, n in forgets.items()]
        for text in output.columns(table, right=(1, 2)):
            output.line(text)
    output.line("")
    for text in output.columns([[name, about] for name, about in shown.items()]):
        output.line(text)


def _tiers(reuse: dict[str, Any]) -> list[list[str]]:
    """Tokens that were found, and the bytes of their K/V, a column a tier."""
    tiers = ("pool", "host", "disk")
    rows = [["found in", *tiers]]
    for name, sums in reuse.items():
        found = [sums["tiers"][tier] for tier in tiers]
        rows.append([name, *(f"{f['tokens']:,} ({output.size(f['bytes'])})" for f in found)])
    return rows


def _cells(sums: dict[str, Any]) -> list[str]:
    names = ("turns", "prompt_tokens", "reused_tokens", "reusable_tokens")
    rates = (sums["hit_rate"], sums["reuse_share"])
    return [
        *(f"{sums[name]:,}" for name in names),
        *("-" if rate is None else f"{100 * rate:.1f} %" for rate in rates),
    ]


@kv.command(cls=Command, short_help="Read and check every page.")
@json_option
@click.pass_obj
def verify(found: Globals, as_json: bool) -> int:
    """Read every page of kv.db and check its size, key, checksum and model.

    A page that fails is never used again and computed anew when it is needed. Then one page is
    written to a file of its own, read back and compared. Exit status 7 if anything failed.
    """
    from sessions import upkeep

    settings = found.settings()
    path = settings.folders.kv_db
    report, notices = upkeep.Verified(), list[str]()
    if path.exists():
        with closing(open_kv(settings)) as disk:
            report = upkeep.verify(disk)
            notices += disk.notices
    same = _round_trip(path)
    for notice in notices:
        found.note(notice)
    _print({**asdict(report), "round_trip": same, "path": str(path)}, as_json)
    return 7 if report.bad or report.damaged or not same else 0


@kv.command(cls=Command, short_help="Remove what is no use, and free the space.")
@click.option("--all", "every", is_flag=True, help="Pages of models that are not installed too.")
@json_option
@click.pass_obj
def gc(found: Globals, every: bool, as_json: bool) -> None:
    """Remove pages of deleted chats, quarantined and unreachable ones; evict down to the budget.

    With --all the pages of models that are not on this machine go too. No chat is touched: a page
    that is missing is computed again.
    """
    from sessions import upkeep

    settings = found.settings()
    path = settings.folders.kv_db
    report, purged = upkeep.Collected(), 0
    if path.exists():
        purged = _purge(settings)
        with closing(open_kv(settings)) as disk:
            report = upkeep.collect(disk, _installed(settings) if every else None)
            for notice in disk.notices:
                found.note(notice)
    data = {"purged": purged, **asdict(report), "path": str(path)}
    _print(data, as_json)


def open_kv(settings: Settings) -> CacheFile:
    """kv.db for upkeep, with the budget of the settings. Raises StoreError."""
    from sessions.cachefile import CacheFile
    from sessions.pages import default_budget

    path = settings.folders.kv_db
    disk = CacheFile(path, limit_bytes=settings["kv.disk_max"] or default_budget(path))
    if not disk.is_open:
        raise StoreError(" ".join(disk.notices), hint="Chats are not touched by it.")
    return disk


def _purge(settings: Settings) -> int:
    """Pages of deleted chats that could not be removed when they were deleted."""
    from sessions.deletion import purge_pages
    from sessions.store import ChatStore

    folders = settings.folders
    if not folders.chat_db.exists():
        return 0
    with ChatStore(folders.chat_db) as store:
        return purge_pages(store, folders.kv_db, limit_bytes=settings["kv.disk_max"])


def _installed(settings: Settings) -> set[str]:
    """Weight digests of all models here: those of the catalogue, the settings' and the chats' own.

    Raises StoreError if chat.db cannot be read: then nobody knows which models are wanted.
    """
    from chatkv.models import catalog
    from sessions.store import ChatStore
    from tui.installed import weights_digest

    names = {row.name for row in catalog.list_models()} | {settings["model"]}
    if settings["spec.draft_model"]:
        names.add(settings["spec.draft_model"])
    if settings.folders.chat_db.exists():
        with ChatStore(settings.folders.chat_db, read_only=True) as store:
            names |= {row.model for trash in (False, True) for row in store.sessions(trash=trash)}
    digests: set[str] = set()
    for name in names - {""}:
        with suppress(ChatKVError):
            digests.add(weights_digest(catalog.find(name)))
    return digests


def _round_trip(path: Path) -> bool:
    base = next(folder for folder in path.absolute().parents if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix=".chatkv-verify-", dir=base) as folder:
        return wiring.page_round_trip(Path(folder) / "kv.db")


def _print(data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.write_json(data)
        return
    rows = [[key, output.size(v) if key in SIZES else _text(v)] for key, v in data.items()]
    for text in output.columns(rows):
        output.line(text)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{count} {reason}" for reason, count in value.items()) or "0"
    return str(value)
