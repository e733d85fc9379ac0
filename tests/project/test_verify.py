"""`chatkv verify` on the tiny model: the proof, a wrong step, and a run that is stopped."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from fakes import TinyModel

from chatkv.models.catalog import ModelFile
from sessions import verify
from tui import progress
from tui.progress import Progress

FILE = ModelFile("tiny", Path("tiny"), "random")
SMALL = ("verify", "--max-tokens", "8", "--temperature", "0.7")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(verify, "load_model", lambda *args, **kwargs: (TinyModel(), ""))
    monkeypatch.setattr("chatkv.models.catalog.find", lambda name: FILE)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": str(number), "turns": ["abcabcabc", "abc"]} for number in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_the_proof(chatkv, prompts):
    ran = chatkv(*SMALL, "--prompts", prompts, "--json")
    assert (ran.code, ran.err) == (0, "")
    report = ran.json
    assert (report["complete"], report["different"]) == (True, 0)
    assert (report["prompts"], report["replies"]) == (10, 20)
    assert report["drafted_steps"] > 0
    told = chatkv(*SMALL, "--prompts", prompts).out
    assert told.endswith(f"without drafting: {report['tokens']} tokens of 20 replies.\n")
    assert "ngram, random" in told
    assert "[" not in told


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
@pytest.mark.parametrize("step", [1, 45], ids=["plain", "second group"])
def test_a_run_that_is_stopped_reports_what_it_compared(
    chatkv, prompts, monkeypatch, number, code, step
):
    steps = itertools.count(1)
    real = verify.Engine.step

    def stepped(self, seqs):
        if next(steps) == step:
            os.kill(os.getpid(), number)
        return real(self, seqs)

    monkeypatch.setattr(verify.Engine, "step", stepped)
    ran = chatkv(*SMALL, "--prompts", prompts, "--temperature", "0.7,1", "--json")
    assert ran.code == code
    assert "only the replies in this report were compared" in ran.err
    report = ran.json
    assert (report["complete"], report["different"]) == (False, 0)
    assert report["replies"] == 0 if step == 1 else 16 <= report["replies"] < 40


def test_a_difference_outweighs_that_it_was_stopped(chatkv, prompts, monkeypatch):
    real, steps, play = verify.Engine.step, itertools.count(1), verify._play

    def stepped(self, seqs):
        if next(steps) == 45:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, seqs)

    def wrong(engine, group, stop, log=None):
        found = play(engine, group, stop, log)
        return [[(*reply, 0) for reply in talk] for talk in found] if log is not None else found

    monkeypatch.setattr(verify.Engine, "step", stepped)
    monkeypatch.setattr(verify, "_play", wrong)
    ran = chatkv(*SMALL, "--prompts", prompts, "--temperature", "0.7,1", "--json")
    assert (ran.code, ran.json["complete"]) == (7, False)
    assert ran.json["different"] >= 16


def test_a_log_is_told_how_far_it_came_every_half_minute(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    tell = Progress(said.append)
    for number in range(10):
        now[0] += 10
        tell(str(number))
    assert said == ["2", "5", "8"]
    monkeypatch.setattr("tui.output.is_terminal", lambda stream: True)
    tell("all for a person")
    assert said[-1] == "all for a person"
