"""What is said while a model loads, where there is no screen."""

from __future__ import annotations

import queue

from app.fake_engine import FakeEngine

from sessions.port import EngineState
from tui.loading import SLOW, Loading, progress_words, stage_words

PATIENCE_S = 20.0


def test_each_stage_is_said_once_from_the_start_on():
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine = FakeEngine(ready=False)
    engine.watch(Loading(said.put, patience_s=0.0, slow_s=3600))
    engine.start()
    assert said.get(timeout=PATIENCE_S) == "starting the engine ..."
    for detail, done in (("checking", 1), ("checking", 2), ("loading", 1)):
        engine.move("loading", detail=detail, done=done, total=9)
        if done == 1:
            assert said.get(timeout=PATIENCE_S) == f"{detail} the model ..."
    engine.become_ready()
    assert said.empty()


def test_loading_that_takes_long_says_why_and_what_is_ready_soon_says_nothing():
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine = FakeEngine(ready=False)
    engine.watch(Loading(said.put, patience_s=3600, slow_s=0.0))
    engine.start()
    assert said.get(timeout=PATIENCE_S) == SLOW
    quick = Loading(said.put, patience_s=3600, slow_s=3600)
    quick(EngineState("starting"))
    quick(EngineState("ready"))
    assert not quick._slow.is_alive() or quick._slow.finished.is_set()
    assert not quick._stage.is_alive() or quick._stage.finished.is_set()
    assert said.empty()


def test_a_prompt_that_takes_long_to_read_is_said_once_each_time():
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine = FakeEngine()
    engine.watch(Loading(said.put, patience_s=0.0, slow_s=3600))
    for _ in range(2):
        engine.move("prefill")
        for done in (0, 512, 1024):
            engine.move("prefill", done=done, total=5353)
            if not done:
                assert said.get(timeout=PATIENCE_S) == "reading 5,353 tokens ..."
        engine.move("generating")
        engine.become_ready()
    assert said.empty()


def test_progress_is_told_in_what_is_counted():
    assert stage_words(EngineState("absent")) == "starting the engine"
    assert stage_words(EngineState("loading")) == "loading the model"
    assert progress_words(EngineState("loading", "converting", 12, 31)) == "12/31"
    assert progress_words(EngineState("loading", "checking", 54_000_000, 87_000_000)) == "54/87 MB"
