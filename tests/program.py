"""chatkv without its processes: a store, pages, an engine on the tiny model. Starts any number of
times on the same folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fakes import TinyModel

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Done
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.port import ChatPort
from sessions.service import EngineService
from sessions.store import ChatStore

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
PROMPTS = ["the cat sat on the mat", "and then?", "the cat sat on the mat again", "why?"]
SAMPLING = {"temperature": 1.0, "max_tokens": 30, "seed": 11}


class Program:
    """One run of it.

    Args:
        folder: Where its files are.
        kv: Whether pages are kept on disk.
        spec: How it drafts.
        model: Answers; the tiny model of `seed` if None.
        seed: Of the weights.
        sampling: What a new conversation begins with.
        limit_bytes: The budget of kv.db.
        pool_tokens: Of the engine's pool; None is what the model asks for.
        wrap: What the engine gets in place of the page store.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kv: bool = True,
        spec: str = "none",
        model: TinyModel | None = None,
        seed: int = 0,
        sampling: Mapping[str, Any] = SAMPLING,
        limit_bytes: int = 1 << 30,
        pool_tokens: int | None = None,
        wrap: Callable[[SqlitePageStore], Any] = lambda pages: pages,
    ) -> None:
        self.model = model = model or TinyModel(seed)
        self.pages = None
        if kv:
            identity = model.identity(model.page_size)
            self.pages = SqlitePageStore(folder / "kv.db", identity, limit_bytes=limit_bytes)
        engine = Engine(
            model,
            EngineConfig(spec=spec, drafters=("ngram", "random"), pool_tokens=pool_tokens),
            store=None if self.pages is None else wrap(self.pages),
            salt=self.pages.salt if self.pages else b"",
            costs=COSTS,
            guard=False,
        )
        self.engine = LocalEngine(EngineService(engine, self.pages))
        self.engine.start()
        try:
            self.store = ChatStore(folder / "chat.db")
        except BaseException:
            self._close_engine()
            raise
        self.chats = Chats(
            self.store, self.engine, settings={"model": "tiny", "sampling": dict(sampling)}
        )

    @property
    def core(self) -> Engine:
        """The engine itself."""
        return self.engine.service.engine

    def flush(self) -> None:
        """Wait until all pages so far are on disk."""
        assert self.core.saver is not None
        assert self.core.saver.flush(10.0)

    def close(self) -> None:
        self._close_engine()
        self.store.close()

    def _close_engine(self) -> None:
        self.engine.close()
        if self.pages is not None:
            self.pages.close()


def say(chat: ChatPort, text: str) -> Done:
    """Send a prompt; its last event, which must be the end of a whole reply."""
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done
