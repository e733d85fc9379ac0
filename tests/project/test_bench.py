"""`chatkv bench attention` on tiny shapes. Nothing here looks at how fast anything is."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from sessions.bench import about, attention, measure, request, ways
from sessions.bench.shapes import Data, Expected, Shape

SMALL = ("bench", "attention", "--kv-len", "48,70", "--heads", "4/2", "--head-dim", "32")
HERE = ("standard", "sdpa", "cpu")
SHAPES = [
    Shape(kind, num_seqs, rows, kv_len, 6, 2, 32, "fp32", "cpu")
    for kind, num_seqs, rows, kv_len in (
        ("decode", 2, 1, 70),
        ("decode", 1, 5, 33),
        ("tree", 2, 16, 70),
        ("tree", 1, 70, 90),
        ("prefill", 1, 150, 150),
        ("prefill", 2, 20, 50),
    )
]


@pytest.fixture(autouse=True)
def one_thread():
    """A waiting team only spins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spoil(monkeypatch):
    """Put something else in the place of what a way returns."""

    def spoil(name, change):
        way = ways.WAYS[name]

        def build(copies):
            built = way.build(copies)
            runs = [lambda run=run: change(run()) for run in built.runs]
            return dataclasses.replace(built, runs=runs)

        monkeypatch.setitem(ways.WAYS, name, dataclasses.replace(way, build=build))

    return spoil


def test_the_table(chatkv):
    ran = chatkv(*SMALL, "--runs", "2")
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert "threads" in lines[0]
    assert "commit" in lines[0]
    assert lines[2].startswith("decode, 1 seq, 1 row, 4/2 heads, D 32, bf16")
    columns = ["kv_len", "attention", "ms", "p10-p90", "TFLOP/s", "GB/s", "peak RSS"]
    assert re.split("  +", lines[3]) == columns
    assert [line.lstrip(" 0123456789").split()[0] for line in lines[4:10]] == [*HERE, *HERE]
    missing = [line for line in lines if line.startswith("missing: ")]
    assert "missing: triton: the pages are on cpu, not on a CUDA device" in missing
    assert len(missing) == len(ways.WAYS) - len(HERE)


def test_json_on_stdout_and_in_files(chatkv, tmp_path):
    data = chatkv(*SMALL, "--runs", "2", "--seqs", "2", "--json").json
    assert set(data) == {"v", "bench", "about", "rows", "missing"}
    assert {"device", "model", "dtype", "versions", "commit", "command"} <= set(data["about"])
    assert [(row["kv_len"], row["backend"]) for row in data["rows"]] == [
        (kv_len, name) for kv_len in (48, 70) for name in HERE
    ]
    for row in data["rows"]:
        assert row["p10_ms"] <= row["ms"] <= row["p90_ms"]
        assert row["tflop_per_s"] > 0 < row["gb_per_s"]
        assert not row["wrong"]
        assert row["allocated_mib"] is None
    target, sheet = tmp_path / "a.json", tmp_path / "a.csv"
    ran = chatkv(*SMALL, "--runs", "1", "--json", str(target), "--csv", str(sheet))
    assert "decode" in ran.out
    rows = json.loads(target.read_text())["rows"]
    with sheet.open() as file:
        table = list(csv.DictReader(file))
    assert [row["backend"] for row in table] == [row["backend"] for row in rows]
    assert table[0]["torch"] == data["about"]["versions"]["torch"]


@pytest.mark.parametrize(
    "change", [lambda out: out * 1.02, lambda out: out.index_fill(0, torch.tensor([0]), torch.nan)]
)
def test_a_wrong_result_is_not_timed(chatkv, spoil, change):
    spoil("cpu", change)
    ran = chatkv(*SMALL, "--runs", "1", "--backend", "sdpa,cpu")
    assert ran.code == 7
    assert ran.out.count("wrong") == 2
    assert "2 of 4" in ran.err
    ran = chatkv(*SMALL, "--runs", "1", "--backend", "cpu", "--json")
    assert ran.code == 7
    assert [(row["wrong"], row["ms"]) for row in ran.json["rows"]] == [(True, None)] * 2


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_every_way_is_right(shape):
    data = [Data(shape, 0)]
    expected = Expected(data[0])
    for name in HERE:
        built = ways.WAYS[name].build(data)
        assert expected.error(built.unpack(built.runs[0]())) < 1e-5, name


def test_a_tree_without_its_mask_is_noticed():
    shape = dataclasses.replace(SHAPES[2], kv_len=1000)
    data = Data(shape, 0)
    expected = Expected(data)
    data.seen = torch.ones_like(data.seen)
    built = ways.WAYS["standard"].build([data])
    assert expected.error(built.unpack(built.runs[0]())) > 0.01


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.title)
def test_visible_keys_and_bytes(shape):
    data = Data(shape, 0)
    assert shape.visible_keys == shape.num_seqs * int(data.seen.sum())
    assert shape.flops == 4 * 6 * 32 * shape.visible_keys
    keys, values = data.contiguous
    parts = (keys, values, data.q, data.q, data.table)
    assert shape.needed_bytes == sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--kv-len", "8", "--rows", "9"], 2, "--kv-len 8 is less than the 9 new rows"),
        (["--shape", "tree", "--kv-len", "8"], 2, "less than the 16 new rows"),
        (["--shape", "tree", "--kv-len", "9000", "--rows", "1,600"], 2, "512 are the most"),
        (["--heads", "9/4"], 2, "4 kv heads do not divide 9 query heads"),
        (["--heads", "9"], 2, "32/8"),
        (["--heads", "9/0"], 2, "32/8"),
        (["--head-dim", "40"], 2, "multiple of 16"),
        (["--head-dim", "512"], 2, "up to 256"),
        (["--dtype", "fp16"], 2, "not served on cpu"),
        (["--kv-len", "1,x"], 2, "1,16,64"),
        (["--kv-len", "0"], 2, "1,16,64"),
        (["--backend", "reference"], 2, "not timed"),
        (["--backend", "sdpa,nothing"], 2, "no attention backend 'nothing'"),
        (["--backend", "triton"], 4, "Backend triton cannot run decode"),
        (["--backend", "flex", "--kv-len", "64"], 4, "CUDA"),
        (["--kv-len", "99999999", "--seqs", "99"], 2, "GiB are free on cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(chatkv, words, code, said):
    ran = chatkv("bench", "attention", "--device", "cpu", *words)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert len(ran.err.splitlines()) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["decode", "tree", "prefill"])
def test_on_a_device(chatkv, kind):
    """Captured graphs stay right while others are measured beside them."""
    if not torch.cuda.is_available():
        assert os.environ.get("CHATKV_REQUIRE") != "gpu", "torch sees no CUDA device"
        pytest.skip("torch sees no CUDA device")
    words = ("--device", "cuda", "--shape", kind, "--kv-len", "200,1000", "--seqs", "2")
    ran = chatkv(*SMALL[:2], *words, "--runs", "5", "--json", "--backend", "standard,sdpa,triton")
    assert ran.code == 0
    assert [row["captured"] for row in ran.json["rows"]] == [True] * 6
    assert all(row["copies"] > 1 for row in ran.json["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device(chatkv):
    assert chatkv(*SMALL, "--device", "cuda").code == 4


def test_what_fails_on_the_way(chatkv, spoil, monkeypatch):
    def fail(out):
        raise RuntimeError("no kernel.\nfor this")

    spoil("sdpa", fail)
    ran = chatkv(*SMALL, "--runs", "1", "--json")
    assert ran.code == 0
    gaps = [gap for gap in ran.json["missing"] if gap["backend"] == "sdpa"]
    assert [(gap["kv_len"], gap["reason"]) for gap in gaps] == [
        (48, "RuntimeError: no kernel"),
        (70, "RuntimeError: no kernel"),
    ]
    ran = chatkv(*SMALL, "--runs", "1", "--backend", "sdpa")
    assert (ran.code, "RuntimeError: no kernel" in ran.err) == (4, True)
    monkeypatch.setattr(request, "free_bytes", lambda device: 1 << 20)
    ran = chatkv(*SMALL, "--runs", "1", "--shape", "prefill", "--kv-len", "600", "--seqs", "1")
    assert (ran.code, "0.0 GiB are free" in ran.err) == (2, True)


def test_scores_that_do_not_fit_leave_standard_out(chatkv, monkeypatch):
    shape = Shape("prefill", 1, 48, 48, 4, 2, 32, "bf16", "cpu")
    free = int(shape.data_bytes / request.FREE_SHARE) + 1
    monkeypatch.setattr(attention, "free_bytes", lambda device: free)
    monkeypatch.setattr(request, "free_bytes", lambda device: free)
    words = (*SMALL[:2], "--shape", "prefill", "--kv-len", "48", *SMALL[4:], "--runs", "1")
    way = dataclasses.replace(ways.WAYS["standard"], scratch_bytes=lambda shape: 1 << 40)
    monkeypatch.setitem(ways.WAYS, "standard", way)
    ran = chatkv(*words)
    assert ran.code == 0
    assert "missing: standard: its scores need 1,024.0 GiB" in ran.out
    assert chatkv(*words, "--backend", "standard").code == 4


def test_turns_are_interleaved():
    ran = []
    works = {
        name: measure.Work(lambda name=name: ran.append(name), calls=1) for name in ("a", "b", "c")
    }
    timings = measure.interleaved(works, 2, "cpu")
    assert ran == ["a", "a", "b", "b", "c", "c", "c", "c", "b", "b", "a", "a"]
    assert set(timings) == {"a", "b", "c"}
    assert measure.Timing.of([5, 1, 2, 3, 4]) == measure.Timing(3, 1, 5)


def test_a_captured_graph_keeps_what_it_reads(monkeypatch):
    class Graph:
        def replay(self):
            pass

    class Stream(contextlib.nullcontext):
        def wait_stream(self, other):
            waited.append(other)

    waited = []
    for name in ("Stream", "stream", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: Stream())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    read = torch.ones(1)
    watch = weakref.ref(read)
    work = measure.work_of([lambda read=read: read + 1] * 3, "cuda")
    del read
    assert watch() is not None
    assert (work.calls, work.captured.item()) == (3, 2)
    assert len(waited) == 1  # on what is still being made for the first call


def test_memory_of_a_run_is_seen():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no such counter here")
    kept = []
    memory = measure.Peak("cpu").over(lambda: kept.append(torch.ones(8 << 20)))
    assert memory.rss_mib is None or 28 < memory.rss_mib < 64


def test_a_command_line_names_no_folder(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/a/b/chatkv", "bench", "--json", "/tmp/x y.json", "--csv=/c/d.csv", "a=b"]
    )
    assert about.command().endswith(" bench --json 'x y.json' --csv=d.csv a=b")


def test_help_loads_no_engine(tmp_path):
    code = (
        "import sys\nfrom tui import cli\n"
        "assert cli.run(['bench', 'attention', '--help']) == 0\n"
        "assert not {'torch', 'numba', 'numpy', 'textual'} & set(sys.modules)"
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--kv-len" in done.stdout
