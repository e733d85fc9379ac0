"""`chatkv train-heads`: which stages run, with what."""

from __future__ import annotations

import subprocess
import types

import pytest

from chatkv.errors import BackendUnavailable
from chatkv.models import devices
from tui.commands import train_heads


@pytest.fixture
def stages(monkeypatch, tmp_path):
    """The stages that were asked for; `fails` makes one of them fail."""
    ran = types.SimpleNamespace(stages=[], fails="", interrupted="", devices=[])

    def run(command, check):
        assert command[1:3] == ["-m", "chatkv.spec.train"]
        ran.stages.append(command[3:])
        if command[3] == ran.interrupted:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, 3 if command[3] == ran.fails else 0)

    monkeypatch.setattr(train_heads.subprocess, "run", run)
    monkeypatch.setattr(devices, "expect_cuda", lambda device: ran.devices.append(device))
    gguf = tmp_path / "own.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("CHATKV_MODEL", str(gguf))
    monkeypatch.setenv("CHATKV_CACHE_DIR", str(tmp_path / "cache"))
    return ran


def test_all_stages_share_the_time(chatkv, stages, tmp_path):
    ran = chatkv("train-heads", "--minutes", "10", "--prompts", "a", "--measure", "b", "--json")
    assert ran.code == 0
    assert ran.json["folder"] == str(tmp_path / "cache" / "heads")
    assert [stage[0] for stage in stages.stages] == ["distill", "train", "measure", "export"]
    minutes = [float(stage[stage.index("--minutes") + 1]) for stage in stages.stages[:3]]
    assert sum(minutes) == pytest.approx(10)
    assert all(stage[stage.index("--device") + 1] == "cuda" for stage in stages.stages)
    assert stages.stages[0][-2:] == ["--prompts", "a"]


def test_a_stage_that_fails_ends_it_and_says_how_to_go_on(chatkv, stages, tmp_path):
    stages.fails = "train"
    ran = chatkv("train-heads", "--work", str(tmp_path))
    assert ran.code == 4
    assert "The stage train ended with status 3" in ran.err
    assert "Nothing was learned" in ran.err
    assert [stage[0] for stage in stages.stages] == ["distill", "train"]
    (tmp_path / "distill-00-00.npz").write_bytes(b"")
    assert "goes on from there" in chatkv("train-heads", "--work", str(tmp_path)).err


def test_ctrl_c_says_what_is_kept(chatkv, stages, tmp_path):
    stages.interrupted = "train"
    (tmp_path / "distill-00-00.npz").write_bytes(b"")
    ran = chatkv("train-heads", "--work", str(tmp_path))
    assert ran.code == 130
    assert "goes on from there" in ran.err


@pytest.mark.parametrize("device", ["auto", "cuda", "npu"])
def test_no_stage_begins_where_none_could_end(chatkv, stages, monkeypatch, device):
    def refuse(device):
        raise BackendUnavailable("No CUDA device can be used.", hint="Choose --device cpu.")

    monkeypatch.setattr(devices, "expect_cuda", refuse)
    ran = chatkv("train-heads", "--device", device)
    assert ran.code == 4
    assert "--device cpu" in ran.err
    assert not stages.stages
    assert chatkv("train-heads", "--device", "cpu").code == 0


def test_too_little_time(chatkv, stages):
    assert chatkv("train-heads", "--minutes", "1").code == 2
    assert not stages.stages


def test_an_import_is_one_stage_and_trains_nothing(chatkv, stages, tmp_path):
    ran = chatkv("train-heads", "--import", str(tmp_path / "theirs"), "--json")
    assert ran.json["kind"] == "eagle"
    (stage,) = stages.stages
    assert stage[0] == "import"
    assert stage[stage.index("--folder") + 1] == str(tmp_path / "theirs")
    stages.fails = "import"
    assert "Nothing was written" in chatkv("train-heads", "--import", "x").err
