"""The checks of `chatkv doctor`. Each looks at one thing and never stops the next.

Knows folders, versions and the ports. Loads the engine only when asked to, in its own process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from chatkv.errors import ChatKVError, EngineLost, plural
from tui import output, wiring
from tui.command import Globals
from tui.loading import show_loading
from tui.settings import Settings

MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}
PACKAGES = ("torch", "numba", "numpy", "tokenizers", "transformers", "textual")
TORCH = (2, 11)
SQLITE = (3, 37)
ROOM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """What one look found."""

    name: str
    status: str
    """`ok`, `warn` or `fail`."""
    detail: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row of `checks`."""
        return asdict(self)


def checks(found: Globals, settings: Settings, *, load: bool) -> Iterator[Check]:
    """Yield each check as it is done."""
    looks: list[Callable[[Settings], Check]] = [
        _python,
        _torch,
        _packages,
        _device,
        _sqlite,
        _folders,
        _numba_cache,
        _model,
        _chat_db,
        _kv_db,
        _kv_round_trip,
    ]
    for look in looks:
        name = look.__name__[1:].replace("_", " ")
        try:
            yield look(settings)
        except ChatKVError as error:
            yield Check(name, "fail", error.message, error.hint)
        except OSError as error:
            yield Check(name, "fail", str(error))
    if load:
        yield _engine(settings, found)


def _python(_: Settings) -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version} on {sys.platform}, {cores} cores")


def _torch(_: Settings) -> Check:
    hint = f"Install torch {TORCH[0]}.{TORCH[1]} or newer."
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "fail", "not installed", hint)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < TORCH:
        return Check("torch", "fail", f"{version} is too old", hint)
    return Check("torch", "ok", version)


def _packages(_: Settings) -> Check:
    found, missing = [], []
    for name in PACKAGES[1:]:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        hint = f"Install them: pip install {' '.join(missing)}"
        return Check("packages", "fail", f"missing: {', '.join(missing)}", hint)
    return Check("packages", "ok", ", ".join(found))


def _device(settings: Settings) -> Check:
    """Whether the device of the settings is here; torch is loaded only where there may be one."""
    wanted = settings["device"]
    if wanted == "cpu" or (wanted == "auto" and not _has_driver()):
        return Check("device", "ok", "cpu" if wanted == "cpu" else "cpu: no NVIDIA driver is here")
    import torch

    from chatkv.models.devices import expect_cuda, expect_no_npu

    try:
        expect_no_npu(wanted)
        place = expect_cuda("cuda" if wanted == "auto" else wanted)
    except ChatKVError as error:
        status = "warn" if wanted == "auto" else "fail"
        return Check("device", status, error.message, error.hint)
    free, total = torch.cuda.mem_get_info(place)
    major, minor = torch.cuda.get_device_capability(place)
    detail = (
        f"{torch.cuda.get_device_name(place)}, compute capability {major}.{minor}, "
        f"{output.size(free)} of {output.size(total)} free"
    )
    return Check("device", "ok", detail)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _sqlite(_: Settings) -> Check:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info[:2] < SQLITE:
        return Check("sqlite", "fail", f"{version} is too old", "3.37 or newer is needed.")
    with sqlite3.connect(":memory:") as connection:
        try:
            connection.execute("CREATE VIRTUAL TABLE t USING fts5(x, tokenize='trigram')")
        except sqlite3.OperationalError:
            return Check("sqlite", "fail", f"{version} has no trigram search", "FTS5 is needed.")
    connection.close()
    return Check("sqlite", "ok", version)


def _folders(settings: Settings) -> Check:
    folders = settings.folders
    for folder in (folders.data, folders.kv, folders.state, folders.cache):
        if not os.access(_existing(folder), os.W_OK):
            hint = "Choose another with --data-dir or CHATKV_CACHE_DIR, or chat with --ephemeral."
            return Check("folders", "fail", f"{folder} cannot be written", hint)
    free = shutil.disk_usage(_existing(folders.kv)).free
    detail = f"{folders.data}, {output.size(free)} free"
    if free < ROOM_BYTES:
        return Check("folders", "warn", detail, "Pages of long chats may not be saved.")
    return Check("folders", "ok", detail)


def _numba_cache(settings: Settings) -> Check:
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or settings.folders.cache / "numba")
    if not os.access(_existing(folder), os.W_OK):
        hint = "Name another with NUMBA_CACHE_DIR; without it every start compiles for long."
        return Check("numba cache", "warn", f"{folder} cannot be written", hint)
    kernels = sum(1 for _ in folder.rglob("*.nbi")) if folder.is_dir() else 0
    if not kernels:
        hint = "The first load compiles them: chatkv doctor --load"
        return Check("numba cache", "warn", f"{folder} holds no kernels yet", hint)
    return Check("numba cache", "ok", f"{kernels} kernels in {folder}")


def _model(settings: Settings) -> Check:
    from chatkv.models import catalog

    model = catalog.find(settings["model"])
    if model.kind == "random":
        return Check("model", "ok", f"{model.name}: random weights")
    if model.sha256 is None:
        return Check("model", "ok", f"{model.path} (not of the catalogue: content not checked)")
    digest = catalog.sha256_of(model.path)
    if digest != model.sha256:
        detail = f"{model.path} has SHA-256 {digest[:16]}..., not {model.sha256[:16]}..."
        return Check("model", "fail", detail, f"Remove it, then: chatkv models pull {model.name}")
    return Check("model", "ok", f"{model.name}, {model.path}, SHA-256 as expected")


def _chat_db(settings: Settings) -> Check:
    path = settings.folders.chat_db
    if not path.exists():
        return Check("chat db", "ok", f"{path} will be made by the first chat")
    with wiring.open_workspace(settings) as work:
        chats = len(work.chats.chats(limit=1 << 31))
    return Check(
        "chat db", "ok", f"{path}, {plural(chats, 'chat')}, {output.size(path.stat().st_size)}"
    )


def _kv_db(settings: Settings) -> Check:
    path = settings.folders.kv_db
    if settings["kv.codec"] == "off":
        return Check("kv db", "ok", "off: pages are not saved")
    if not path.exists():
        return Check("kv db", "ok", f"{path} will be made by the first chat")
    stats = wiring.disk_stats(settings)
    detail = f"{path}, {plural(stats['pages'], 'page')}, {output.size(stats['file_bytes'])}"
    if stats["quarantined"]:
        return Check("kv db", "warn", f"{detail}, {stats['quarantined']} of them damaged")
    return Check("kv db", "ok", detail)


def _kv_round_trip(settings: Settings) -> Check:
    base = _existing(settings.folders.kv)
    with tempfile.TemporaryDirectory(prefix=".chatkv-doctor-", dir=base) as folder:
        begun = perf_counter()
        same = wiring.page_round_trip(Path(folder) / "kv.db")
        took_ms = 1000 * (perf_counter() - begun)
    if not same:
        return Check("kv round trip", "fail", "a page read back differs from the one written")
    return Check(
        "kv round trip", "ok", f"a page came back the same after reopening, {took_ms:.0f} ms"
    )


def _engine(settings: Settings, found: Globals) -> Check:
    log = settings.folders.engine_log
    engine = wiring.make_engine(settings, settings["model"], ephemeral=True)
    try:
        show_loading(engine, found, always=True)
        begun = perf_counter()
        engine.start()
        ready = engine.wait_ready()
        took_s = perf_counter() - begun
        drafting = engine.call("explain_drafting")["text"]
    except EngineLost as error:
        return Check("engine", "fail", error.message, f"Its last words are in {log}")
    except ChatKVError as error:
        return Check("engine", "fail", error.message, error.hint)
    finally:
        engine.close()
    reason = f" ({ready.limit_reason})" if ready.limit_reason else ""
    detail = (
        f"{ready.model} on {ready.device}, backend {ready.backend} ({ready.mode}), "
        f"context {ready.context_limit}{reason}, loaded in {took_s:.1f} s. {drafting}"
    )
    return Check("engine", "ok" if ready.mode == "exact" else "warn", detail, ready.notice)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    while not path.exists():
        path = path.parent
    return path
