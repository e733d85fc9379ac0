"""Conversations on a CUDA device: resumed = never quit, and drafted = plain, from end to end."""

# ruff: noqa: E402

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    if os.environ.get("CHATKV_REQUIRE") == "gpu":
        pytest.fail("CHATKV_REQUIRE=gpu, and torch sees no CUDA device", pytrace=False)
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from chatkv.events import Done
from chatkv.models import catalog
from sessions.build import build_service
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.store import ChatStore

PROMPTS = ("Name three rivers of Europe.", "Which is the longest?", "Say that again in French.")
DEFAULT = next((row for row in catalog.list_models() if row.path), None)
MODELS = ("random:tiny", *([DEFAULT.name] if DEFAULT else []))
Start = Callable[..., Any]


@pytest.fixture(params=MODELS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts the program on the same folder, or on another, after ending the one before."""
    running: list[Callable[[], None]] = []

    def begin(name: str = "a", **options: Any) -> Chats:
        while running:
            running.pop()()
        folder = tmp_path / name
        folder.mkdir(exist_ok=True, mode=0o700)
        service = build_service(
            {
                "model": request.param,
                "device": "cuda",
                "context": 2048,
                "kv_path": str(folder / "kv.db"),
                "drafters": ["ngram", "random"],
                "spec": "tree:6",
                **options,
            }
        )
        assert service.ready().device.startswith("cuda")
        engine, store = LocalEngine(service), ChatStore(folder / "chat.db")
        running.extend((store.close, engine.close))
        engine.start()
        sampling = {"temperature": 0.7, "max_tokens": 100, "seed": 5}
        return Chats(store, engine, settings={"model": request.param, "sampling": sampling})

    yield begin
    while running:
        running.pop()()


def say(chat: Any, text: str) -> Done:
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done


def ids(chats: Chats) -> list[tuple[int, ...]]:
    chat = chats.new("one")
    return [say(chat, prompt).ids for prompt in PROMPTS]


def test_resumed_is_never_quit(start: Start, tmp_path: Path) -> None:
    expected = ids(start("reference", spec="none", kv_path=None))
    for deleted in (False, True):
        name = f"deleted-{deleted}"
        got = []
        for place, prompt in enumerate(PROMPTS):
            if deleted:
                for file in (tmp_path / name).glob("kv.db*"):
                    file.unlink()
            chats = start(name)
            chat = chats.open("one") if place else chats.new("one")
            done = say(chat, prompt)
            got.append(done.ids)
            if place and not deleted:
                assert done.usage.cached_tokens > 64
                assert done.usage.restored_pages > 0
                assert done.usage.verified is True
        assert got == expected


def test_drafted_is_plain(start: Start) -> None:
    assert ids(start("plain", spec="none")) == ids(start("drafted"))


def test_pages_leave_while_the_loop_goes_on(start: Start, tmp_path: Path) -> None:
    """What was read is the page as it was, whatever was written behind it."""
    chats = start()
    chat = chats.new("one")
    for prompt in PROMPTS:
        say(chat, prompt)
    service = chats.engine.service
    engine, pool = service.engine, service.engine.pool
    (page,) = pool.take()
    pool.data[:, page].fill_(1.0)
    before = pool.read(page, pool.page_size)
    pool.data[:, page].fill_(2.0)
    assert before() == torch.ones_like(pool.data[:, page]).cpu().view(torch.uint8).numpy().tobytes()
    pool.release(page)
    assert engine.saver.notice == ""
