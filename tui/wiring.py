"""Builds the stores, the engine's client and the conversations from settings.

The one place where the terminal names their classes; commands, screen and tests go through
`open_workspace`. Nothing heavy is imported before it is needed, torch never.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatkv.errors import ConfigError, StoreError, UnknownSession
from sessions.port import ChatPort, ChatsPort, EnginePort
from tui.schema import nearest
from tui.settings import Settings

if TYPE_CHECKING:
    from sessions.store import ChatStore


@dataclass(slots=True)
class Workspace:
    """What one run of chatkv works with. Close it, or use it in a `with` block."""

    settings: Settings
    store: ChatStore
    engine: EnginePort
    chats: ChatsPort
    model: str
    """What the settings or the resumed chat name: a catalogue name or a path."""
    ephemeral: bool = False

    def start(self) -> None:
        """Begin to load the model. Raises ModelError at once if there is none of that name."""
        from chatkv.models import catalog

        catalog.find(self.model)
        self.engine.start()

    @property
    def replying(self) -> bool:
        """Whether the engine is in a reply, or so near one that `cancel` reaches it."""
        return self.engine.state.phase in ("ready", "prefill", "generating", "stopping")

    @property
    def model_name(self) -> str:
        """Name of the model that is loaded, or that will be."""
        ready = self.engine.state.ready
        return ready.model if ready else self.model

    def close(self) -> None:
        """End the engine, which lets saved pages reach the disk, then the store."""
        try:
            self.engine.close()
        finally:
            self.store.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_workspace(
    settings: Settings,
    *,
    ephemeral: bool = False,
    resume: str | None = None,
    policy: str = "error",
) -> Workspace:
    """Open chat.db and prepare, but do not start, the engine.

    Args:
        settings: The settings of this run.
        ephemeral: Keep the conversations in memory and no pages on disk.
        resume: The chat that will be opened: its own model is used unless a flag names one.
        policy: What to do when a turn does not fit, where neither settings nor the chat say it.

    Raises:
        StoreError: chat.db cannot be opened.
        UnknownSession: There is no chat `resume`.
    """
    store = open_store(settings, ephemeral=ephemeral)
    try:
        model = model_of(settings, store, resume)
        engine = make_engine(settings, model, ephemeral=ephemeral, logged=not ephemeral)
        chats = make_chats(store, engine, settings, model, policy=policy)
        return Workspace(settings, store, engine, chats, model, ephemeral)
    except BaseException:  # a Ctrl-C while the model loads, too: the store is to be closed
        store.close()
        raise


def open_store(settings: Settings, *, ephemeral: bool = False) -> ChatStore:
    """chat.db, or one in memory."""
    from sessions.store import ChatStore

    return ChatStore(":memory:" if ephemeral else settings.folders.chat_db)


def make_engine(
    settings: Settings, model: str, *, ephemeral: bool, logged: bool = True
) -> EnginePort:
    """The engine's client; its process starts with `start`.

    Args:
        settings: The settings of this run.
        model: Name or path of the model.
        ephemeral: Save no pages.
        logged: Keep what the process writes to its stderr.
    """
    from sessions.client import ChildEngine

    log = settings.folders.engine_log if logged else None
    return ChildEngine(engine_options(settings, model, ephemeral=ephemeral), log)


def make_chats(
    store: ChatStore,
    engine: EnginePort,
    settings: Settings,
    model: str,
    *,
    policy: str = "error",
) -> ChatsPort:
    """The conversations over a store and an engine."""
    from sessions.chat import Chats

    return Chats(store, engine, settings=chat_settings(settings, model), policy=policy)


def engine_options(settings: Settings, model: str, *, ephemeral: bool) -> dict[str, Any]:
    """What the engine's process is built from: JSON values only."""
    saves = not ephemeral and settings["kv.codec"] != "off"
    return {
        "model": model,
        "device": settings["device"],
        "threads": settings["threads"],
        "context": settings["context.limit"],
        "spec": settings["spec.mode"],
        "drafters": list(settings["spec.drafters"]),
        "draft_model": settings["spec.draft_model"],
        "kv_dtype": settings["kv.dtype"],
        "keep_layers": list(settings["kv.keep_layers"]),
        "kv_path": str(settings.folders.kv_db) if saves else None,
        "kv_limit_bytes": settings["kv.disk_max"],
        "kv_restore": settings["kv.restore"],
        "host_bytes": settings["kv.host_max"],
        "chat_db": None if ephemeral else str(settings.folders.chat_db),
    }


def chat_settings(settings: Settings, model: str) -> dict[str, Any]:
    """What a new chat begins with, and an old one falls back to."""
    sampling = {key: v for key, v in settings.group("sampling").items() if v not in (None, ())}
    found = {"model": model, "sampling": sampling, "spec": settings["spec.mode"]}
    policy = settings["context.on_overflow"]
    return found if policy is None else {**found, "policy": policy}


def model_of(settings: Settings, store: ChatStore, resume: str | None) -> str:
    """The model to load: a flag's, else the resumed chat's own, else the settings'."""
    chosen = settings.values["model"]
    if resume is None or chosen.origin in ("flag", "env"):
        return chosen.value
    return store.find(resume).settings.get("model") or chosen.value


def run_screen(work: Workspace, chat: ChatPort, *, prompt: str | None, pick: bool) -> int:
    """Run the screen until it is left. Returns the exit status.

    Args:
        work: Stores, engine and conversations, opened.
        chat: The conversation to show first.
        prompt: Sent first, if any.
        pick: Begin with the list of chats.
    """

    from tui.app import ChatApp
    from tui.drafts import Drafts
    from tui.driver import TerminalDriver

    settings = work.settings
    drafts = Drafts(None if work.ephemeral else settings.folders.drafts)
    drafts.sweep(partial(_exists, work.store))
    app = ChatApp(
        work.engine,
        work.chats,
        chat,
        prompt,
        pick=pick,
        ephemeral=work.ephemeral,
        theme=settings["ui.theme"],
        keys=settings["keys"],
        plain_glyphs=settings["ui.ascii"],
        drafts=drafts,
        driver_class=TerminalDriver,
    )
    app.run()
    return app.return_code or 0


def _exists(store: ChatStore, chat_id: str) -> bool:
    try:
        store.session(chat_id)
    except UnknownSession:
        return False
    return True


def check_looks(settings: Settings) -> None:
    """Refuse a theme or an action that the screen does not know. Raises ConfigError."""
    from textual.theme import BUILTIN_THEMES

    from tui.actions import ACTIONS

    known = [action.id for action in ACTIONS]
    for name in settings["keys"]:
        if name not in known:
            where = settings.values["keys"].where
            hint = nearest(name, known, "F1 in the chat lists keys.")
            raise ConfigError(f"There is no action {name!r} ({where}).", hint=hint)
    theme = settings["ui.theme"]
    if theme not in BUILTIN_THEMES:
        themes = sorted(BUILTIN_THEMES)
        hint = nearest(theme, themes, f"Known: {', '.join(themes)}.")
        raise ConfigError(f"There is no theme {theme!r}.", hint=hint)


def disk_stats(settings: Settings) -> dict[str, Any]:
    """What kv.db holds, of all models; a file that is not there holds nothing."""
    from sessions.pages import open_page_store

    path = settings.folders.kv_db
    names = ("pages", "tokens", "payload_bytes", "file_bytes", "snapshots", "quarantined")
    if not path.exists():
        return dict.fromkeys(names, 0)
    opened = open_page_store(path, limit_bytes=settings["kv.disk_max"])
    if opened.store is None:
        raise StoreError(opened.notice, hint="Chats are not touched by it.")
    with closing(opened.store) as store:
        found = asdict(store.stats())
    return {name: found[name] for name in (*names, "limit_bytes")}


def reuse_stats(settings: Settings, ref: str | None = None) -> dict[str, Any]:
    """What the cache was worth, from the turns in chat.db: `all` and `window`, and with a chat its
    last `turn` and the `session`. Raises UnknownSession."""
    from sessions.counters import WINDOW_S, Sums
    from sessions.store import ChatStore

    found: dict[str, Sums] = {"all": Sums(), "window": Sums()}
    path = settings.folders.chat_db
    if ref is not None:
        found = {"turn": Sums(), "session": Sums(), **found}
    if path.exists() or ref is not None:
        since = int(1000 * (time.time() - WINDOW_S))
        with ChatStore(path) as store:
            for created_at, usage in store.turn_usage():
                found["all"].add_stored(usage)
                if created_at >= since:
                    found["window"].add_stored(usage)
            if ref is not None:
                turns = store.path(store.find(ref).id)[1:]
                for turn in turns:
                    found["session"].add_stored(turn.turn.usage)
                if turns:
                    found["turn"].add_stored(turns[-1].turn.usage)
    return {name: sums.to_json() for name, sums in found.items()}


def forget_stats(settings: Settings) -> dict[str, dict[str, int]]:
    """What left the model's sight in all chats: `times` and `tokens` by policy."""
    from sessions.store import ChatStore

    if not settings.folders.chat_db.exists():
        return {}
    with ChatStore(settings.folders.chat_db) as store:
        return store.forget_counts()


def page_round_trip(path: Path) -> bool:
    """Whether a page written to a fresh kv.db at `path` comes back the same after reopening."""
    from chatkv.kv.keys import page_key
    from chatkv.kv.store import PageImage
    from sessions.pages import SqlitePageStore

    identity = {
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 64,
        "page_tokens": 16,
        "pool_dtype": "bfloat16",
    }
    ids, sampled = tuple(range(16)), (False,) * 16
    payload = os.urandom(1 * 2 * 1 * 16 * 64 * 2)
    with closing(SqlitePageStore(path, identity, limit_bytes=64 << 20)) as store:
        key = page_key(store.root, ids, sampled)
        page = PageImage(key, store.root, 0, 0, ids, sampled, "step", payload)
        store.write([page])
    with closing(SqlitePageStore(path, identity, limit_bytes=64 << 20)) as store:
        return list(store.read([key])) == [page]
