"""What the engine prepares in idle time for the chat that is open: through its process, killed and
started anew, and out of the way of every request."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.errors import OutOfPages
from chatkv.events import Done, Usage
from chatkv.models import weights
from chatkv.models.catalog import ModelFile
from chatkv.models.decoder import Decoder
from chatkv.spec.control import Controller
from chatkv.spec.drafters.eagle import EagleDrafter
from chatkv.spec.heads.file import HeadFile, save, target_of
from chatkv.spec.heads.modules import new_head
from chatkv.spec.heads.shape import shape_for
from chatkv.tokenizer import Tokenizer
from sessions.chat import Chats
from sessions.client import ChildEngine
from sessions.idle import IdleWork
from sessions.local import LocalEngine
from sessions.port import ChatPort, EnginePort
from sessions.service import EngineService
from sessions.store import ChatStore
from sessions.worker import Worker

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.9, 16: 3.0}
DRAFT_IDS = 160
FIRST, SECOND = "the cat sat on the mat " * 6, "and then the cat"
SAMPLING = {"temperature": 0.8, "max_tokens": 40, "seed": 3}


@pytest.fixture
def model(make_gguf, own_cache, tmp_path) -> Path:
    """A model whose cache folder has an eagle head for it, which looks back much."""
    path = make_gguf(tmp_path / "model.gguf", seed=5)
    decoder = loaded(path)
    torch.manual_seed(1)
    head = new_head(shape_for("eagle", decoder.spec, draft_ids=DRAFT_IDS)).requires_grad_(False)
    head.gamma.mul_(2.5)
    head.o.mul_(8)  # type: ignore[operator]
    target = target_of(decoder.spec, decoder.tokenizer.tok_fp())
    file = HeadFile(head, torch.arange(DRAFT_IDS) + 3, target)
    save(tmp_path / "cache" / "heads" / "eagle.safetensors", file)
    tmp_path.chmod(0o700)
    return path


def loaded(path: Path) -> Decoder:
    made = weights.load(ModelFile("model", path))
    return Decoder(made, Tokenizer.from_file(made.folder / "tokenizer.json"))


def started(model: Path, folder: Path) -> ChildEngine:
    options = {
        "model": str(model), "device": "cpu", "threads": 1, "kv_path": str(folder / "kv.db"),
        "spec": "tree:12", "drafters": ["heads"],
    }  # fmt: skip
    engine = ChildEngine(options, folder / "engine.log")
    engine.start()
    engine.wait_ready()
    return engine


def say(chat: ChatPort, text: str) -> tuple[str, Usage]:
    (*_, done) = chat.send(text)
    assert isinstance(done, Done), done
    return done.text, done.usage


def prepared(chat: ChatPort, engine: EnginePort) -> None:
    chat.expect()
    end = time.monotonic() + 60
    while engine.call("kv_stats")["preparing"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_was_killed_guesses_as_one_that_never_quit(model, tmp_path):
    core = Engine(loaded(model), EngineConfig(spec="tree:12", drafters=("heads",)), costs=COSTS)
    local = LocalEngine(EngineService(core))
    local.start()
    with ChatStore(tmp_path / "chat.db") as store:
        chat = Chats(store, local, settings={"sampling": SAMPLING}).new("kept")
        say(chat, FIRST)
        core.drafting.controller = Controller(COSTS, "tree:12")  # what it learns is not the matter
        text, never_quit = say(chat, SECOND)
    engine = started(model, tmp_path)
    with ChatStore(tmp_path / "chat.db") as store:
        chat = Chats(store, engine, settings={"sampling": SAMPLING}).new("lost")
        say(chat, FIRST)
        chat.price()  # pages are on disk from here on
        assert engine._process is not None
        engine._process.kill()
    engine = started(model, tmp_path)
    with ChatStore(tmp_path / "chat.db") as store:
        chat = Chats(store, engine, settings={}).open("lost")
        prepared(chat, engine)
        again, resumed = say(chat, SECOND)
        engine.close()
    assert again == text
    assert never_quit.steps > 10
    assert resumed.steps == never_quit.steps
    assert resumed.draft_n == never_quit.draft_n
    assert resumed.draft_n_accepted == never_quit.draft_n_accepted
    assert resumed.prompt_n == never_quit.prompt_n, "computed anew"


def test_a_chat_that_is_purged_leaves_nothing_with_the_drafter(model, tmp_path):
    config = EngineConfig(spec="tree:12", drafters=("heads",))
    core = Engine(loaded(model), config, costs=COSTS, guard=False)
    engine = LocalEngine(EngineService(core))
    engine.start()
    (drafter,) = core.drafting.drafters.drafters
    assert isinstance(drafter, EagleDrafter)
    with ChatStore(tmp_path / "chat.db") as store:
        chats = Chats(store, engine, settings={"sampling": SAMPLING})
        chats.new("nothing said").expect()
        assert not engine.service.idle.is_left
        chat = chats.new("gone")
        say(chat, FIRST)
        drafter.clear()
        chat.expect()
        idle = engine.service.idle
        assert idle.do_some()
        assert idle.do_some()
        assert len(core._live) == 1
        chat.redact([chat.turns()[0].id], purge=True)
        assert not drafter.left
        assert not drafter.held
        assert not core._live
        assert not idle.is_left


def test_a_request_comes_before_what_is_left_to_prepare(model, tmp_path):
    core = Engine(loaded(model), EngineConfig(spec="tree:12", drafters=("heads",)), costs=COSTS)
    engine = LocalEngine(EngineService(core))
    engine.start()
    with ChatStore(tmp_path / "chat.db") as store:
        chat = Chats(store, engine, settings={"sampling": SAMPLING}).new()
        say(chat, FIRST)
        chat.expect()
        assert engine.service.idle.do_some()
        say(chat, SECOND)
        assert not engine.service.idle.is_left
        chat.expect()
        engine.close()
        assert not engine.service.idle.is_left


class Service:
    """Has always something to prepare, and takes its time."""

    def __init__(self, worker: Worker) -> None:
        self.idle = IdleWork()
        self.pieces = 0
        self.worker = worker
        self.idle.begin(self.work())

    def work(self):
        while True:
            self.pieces += 1
            if self.pieces == 3:
                self.worker._requests.put({"op": "call", "id": 1})
            yield


def test_the_worker_looks_for_a_request_behind_every_piece():
    worker = Worker(None)  # type: ignore[arg-type]
    service: Any = Service(worker)
    assert worker._next(service) == {"op": "call", "id": 1}
    assert service.pieces == 3
    worker._requests.put(None)
    assert worker._next(service) is None
    assert service.pieces == 3
    service.idle.stop()
    with pytest.raises(queue.Empty):
        worker._requests.get_nowait()


def test_what_cannot_be_prepared_is_nobodys_error(caplog):
    def fails():
        yield
        raise OutOfPages(needed=2, free=1, page_size=16)

    idle = IdleWork()
    assert not idle.do_some()
    idle.begin(fails())
    assert idle.do_some()
    assert not idle.do_some()
    assert not idle.is_left
