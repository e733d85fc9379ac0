"""`chatkv bench spec` on the tiny model. Nothing here looks at how fast anything is."""

from __future__ import annotations

import csv
import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
from fakes import TinyModel

from chatkv.errors import ChatKVError
from chatkv.models.catalog import ModelFile
from chatkv.sampling import Sampler
from chatkv.spec.drafters.ngram import NgramDrafter
from sessions.bench import spec, spec_play, spec_tax
from sessions.bench.spec_row import Row, Sums
from sessions.bench.spec_tax import Tax
from tui.commands import bench_spec

FILE = ModelFile("tiny", Path("tiny"), "random")


SMALL = ("bench", "spec", "--max-tokens", "12", "--drafters", "ngram,random", "--spec", "tree:4")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The tiny model wherever one is loaded; how often one was."""
    loaded = []

    def load_model(file, device="auto", *, threads=None):
        loaded.append(device)
        return TinyModel(), ""

    monkeypatch.setattr(spec, "load_model", load_model)
    monkeypatch.setattr("chatkv.models.catalog.find", lambda name: FILE)
    return loaded


@pytest.fixture(autouse=True)
def one_thread():
    """A waiting team only spins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prompts(tmp_path):
    """Two conversations, one of a category."""
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "category": "copy", "turns": ["abcabcabcabc", "abcabc"]},
        {"id": "b", "turns": ["hello"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def broken(monkeypatch):
    """A step that keeps the first guess whatever the model chose."""
    from chatkv.spec import proposal

    def verify(tree, pick):
        below = tree.children(0)
        gained = real(tree, pick)
        if not below:
            return gained
        return dataclasses.replace(gained, tokens=(int(tree.tokens[below[0]]),), rows=(0,))

    real = proposal.verify
    monkeypatch.setattr(proposal, "verify", verify)


def test_what_it_prints(chatkv, prompts, tiny):
    ran = chatkv(*SMALL, "--prompts", prompts, "--temperature", "0.7")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("identity: 2 prompts, ")
    assert lines[0].endswith(" tokens, 0 different")
    assert "temperature 0.7, tree:4" in lines
    table = lines[lines.index("temperature 0.7, tree:4") + 2 :]
    assert table[0].startswith("all ")
    assert any(line.startswith("copy ") for line in table)
    assert "exactness tax: not measured, the kernels of a cpu are our own, all exact" in lines
    for part in ("below 1.00x", "a step: draft", "expected ", "probes", "first token", "random: "):
        assert part in ran.out, part
    assert table[-1].startswith(("Drafting (tree:4): ", "Plain"))
    assert tiny == ["auto"], "one model on a CPU"


def test_json_and_csv(chatkv, prompts, tmp_path):
    sheet, target = tmp_path / "a.csv", tmp_path / "a.json"
    words = (*SMALL[:-1], "tree:4,auto", "--prompts", prompts, "--temperature", "0,1")
    data = chatkv(*words, "--json", "--csv", str(sheet)).json
    assert set(data) == {
        "v", "bench", "about", "device", "kv_dtype", "drafters", "identity", "rows", "plain_memory",
        "drafted_memory", "failures", "tax",
    }  # fmt: skip
    assert data["identity"]["prompts"] == 8
    assert (data["identity"]["different"], data["identity"]["differences"]) == (0, [])
    places = [(row["temperature"], row["mode"]) for row in data["rows"]]
    assert places == [(0, "tree:4"), (0, "auto"), (1, "tree:4"), (1, "auto")]
    for row in data["rows"]:
        assert set(row) == {field.name for field in dataclasses.fields(Row)}
        assert set(row["all"]) == {field.name for field in dataclasses.fields(Sums)}
        assert set(row["categories"]) == {"copy"}
        assert row["all"]["replies"] == 3
        assert row["categories"]["copy"]["replies"] == 2
        assert row["speedup_p10"] <= row["speedup_median"] <= row["speedup_p90"]
        assert 0 <= row["share_below_1"] <= 1
        assert 0 < row["overhead_share"] < 1
        assert set(row["shares"]) == {"draft", "verify", "accept", "host"}
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["overhead_share"] == pytest.approx(1 - row["shares"]["verify"])
        assert row["plain_steps"] <= row["steps"]
        assert sum(row["plain_reasons"].values()) == row["plain_steps"]
    drafted = data["rows"][0]
    for sums in (drafted["all"], drafted["categories"]["copy"]):
        assert {source["name"] for source in sums["sources"]} >= {"ngram", "random"}
    with sheet.open() as file:
        table = list(csv.DictReader(file))
    assert [row["mode"] for row in table] == [mode for _, mode in places]
    assert float(table[0]["all.speedup"]) == drafted["all"]["speedup"]
    ran = chatkv(*SMALL, "--prompts", prompts, "--temperature", "0", "--json", str(target))
    assert ran.out.startswith("identity: ")
    assert len(json.loads(target.read_text())["rows"]) == 1


def test_a_run_that_is_stopped_leaves_the_rows_that_were_done(
    chatkv, prompts, tmp_path, monkeypatch
):
    """Each row is in the file, and told, before the next one begins."""
    target, real = tmp_path / "a.json", spec._Bench.run

    def run(self, temperature, *rest):
        if temperature == 1:
            assert [row["temperature"] for row in json.loads(target.read_text())["rows"]] == [0]
            raise ChatKVError("Stopped.")
        real(self, temperature, *rest)

    monkeypatch.setattr(spec._Bench, "run", run)
    words = (*SMALL, "--prompts", prompts, "--temperature", "0,1", "--json", str(target))
    ran = chatkv(*words)
    assert "1 of 2 rows: temperature 0, tree:4: " in ran.err
    assert "Stopped." in ran.out
    assert json.loads(target.read_text())["identity"]["prompts"] == 2
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".json"] == ["a.json"]


def test_what_exactness_costs(prompts, monkeypatch):
    """Both play the same prompts in turns; a speed-up is told over the faster of the two."""
    real, ran = spec_tax.play, []

    def play(engine, prompt, params):
        replies = real(engine, prompt, params)
        ran.append((prompt.id, engine.model is free))
        ms = 1.0 if engine.model is free else 1.5
        return [dataclasses.replace(r, decode_ms=ms * (len(r.ids) - 1)) for r in replies]

    free = TinyModel(seed=1)
    monkeypatch.setattr(spec_tax, "play", play)
    monkeypatch.setattr(spec, "load_free", lambda *_: free)
    report = spec.measure(FILE, request(prompts))
    assert report.tax.tax == pytest.approx(1.5)
    assert report.tax.free_tokens_per_s == pytest.approx(1000)
    turns = [False, True, False, True, True, False]
    assert ran == [(name, is_free) for name in "ab" for is_free in turns]
    lines = bench_spec.table(report)
    assert "exactness tax 1.500: plain 666.7 tok/s, with products of the library 1,000.0" in lines
    (row,) = report.rows
    over = f"speed-up over the fastest plain steps {row.all.speedup / 1.5:.2f}x"
    assert over in lines
    assert Tax(tax=0.9).slower == 1

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(spec, "load_free", full)
    assert "a third time" in spec.measure(FILE, request(prompts)).tax.missing


def test_the_overhead_of_a_device_has_a_bar(prompts):
    report = spec.measure(FILE, request(prompts))
    bar = "draft, accept and host are {} the bar of 15% of a step"
    assert not any("the bar" in line for line in bench_spec.table(report))
    report.device = "cuda:0"
    for share, word in ((0.14, "within"), (0.16, "over")):
        report.rows[0] = dataclasses.replace(report.rows[0], overhead_share=share)
        assert bar.format(word) in bench_spec.table(report)


def test_a_reply_that_differs_ends_with_7_and_no_speed(chatkv, prompts, broken):
    words = (*SMALL, "--prompts", prompts, "--temperature", "0.7")
    ran = chatkv(*words)
    assert ran.code == 7
    assert "0 different" not in ran.out
    assert "different: prompt a, temperature 0.7, mode tree:4, turn 1, token " in ran.out
    assert "tok/s" not in ran.out
    assert "drafting changed the text" in ran.err
    ran = chatkv(*words, "--json")
    assert (ran.code, ran.json["rows"]) == (7, [])
    assert ran.json["identity"]["different"] > 0


def test_a_sampler_that_depends_on_its_company_is_noticed(prompts, monkeypatch):
    """Only the second drafted run goes wrong: every run is compared, not the first alone."""
    real, runs = spec_play.play, []

    def play(engine, prompt, params):
        replies = real(engine, prompt, params)
        if engine.config.spec != "none":
            runs.append(prompt.id)
            if runs.count(prompt.id) == 3:  # the warm-up, and two
                replies[-1] = dataclasses.replace(replies[-1], ids=(*replies[-1].ids[:-1], 1))
        return replies

    monkeypatch.setattr(spec_play, "play", play)
    report = spec.measure(FILE, request(prompts))
    assert report.identity.different == 1
    assert [place["turn"] for place in report.identity.differences] == [2]
    assert report.rows == []


def test_a_drafter_that_raises_is_named(prompts, monkeypatch):
    def propose(self, contexts, max_rows):
        raise RuntimeError("no guess today")

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    report = spec.measure(FILE, request(prompts))
    assert report.identity.different == 0
    assert len(report.failures) == 1
    assert "ngram" in report.failures[0]


def test_runs_are_interleaved_and_warm(prompts, monkeypatch):
    real, ran = spec_play.play, []

    def play(engine, prompt, params):
        ran.append((prompt.id, engine.config.spec == "none"))
        return real(engine, prompt, params)

    monkeypatch.setattr(spec_play, "play", play)
    report = spec.measure(FILE, dataclasses.replace(request(prompts), rounds=2))
    assert ran[:2] == [("a", True), ("a", False)]
    abba = [True, False, False, True]
    assert ran[2:] == [(name, plain) for name in "ab" for plain in [*abba, *abba]]
    (row,) = report.rows
    assert row.all.tokens_per_step == pytest.approx(4 * row.all.tokens / row.steps)


def test_two_models_and_all_prompts_first_on_a_device(prompts, monkeypatch):
    """Captured steps belong to one pool, and a step is captured when its size first comes up."""

    class Device(TinyModel):
        device = "cuda:0"

    made = []
    monkeypatch.setattr(
        spec, "load_model", lambda *_, **__: made.append(Device()) or (made[-1], "")
    )
    monkeypatch.setattr(spec, "load_free", lambda *_: None)
    monkeypatch.setattr(spec, "about", lambda *_, **__: {})
    monkeypatch.setattr(
        spec, "Peak", lambda device: types.SimpleNamespace(over=lambda run: run() or spec.Memory())
    )
    real, ran = spec_play.play, []

    def play(engine, prompt, params):
        ran.append((made.index(engine.model), prompt.id))
        return real(engine, prompt, params)

    monkeypatch.setattr(spec_play, "play", play)
    report = spec.measure(FILE, request(prompts))
    assert (len(made), report.identity.different, len(report.rows)) == (2, 0, 1)
    turns = [1, 0, 0, 1]
    assert ran[-8:] == [(place, name) for name in "ab" for place in turns]
    assert {(0, "b"), (1, "b")} <= set(ran[:-8])


def test_a_draft_model(chatkv, prompts, monkeypatch):
    asked = []
    monkeypatch.setattr(spec, "load_draft", lambda name, *_: asked.append(name) or TinyModel())
    words = (*SMALL, "--prompts", prompts, "--temperature", "0", "--draft-model", "small", "--json")
    data = chatkv(*words).json
    assert asked == ["small"]
    assert data["drafters"] == ["ngram", "random", "draft_model"]
    assert data["identity"]["different"] == 0
    assert "draft_model" in {source["name"] for source in data["rows"][0]["all"]["sources"]}


def test_no_run_finds_the_pages_of_another(prompts):
    model = TinyModel()
    engine = spec.Engine(model, spec.EngineConfig(spec="none", drafters=()), costs={1: 1.0})
    prompt, _ = spec.read_prompts([Path(prompts)])
    params = spec.SamplingParams(max_tokens=24, seed=1)
    first, again = spec_play.play(engine, prompt, params), spec_play.play(engine, prompt, params)
    assert [reply.ids for reply in first] == [reply.ids for reply in again]
    assert [reply.computed for reply in first] == [reply.computed for reply in again]
    assert first[1].computed < 60, "the second turn goes on from the pages of the first"


def test_history_never_sees_the_prompt_that_is_played(prompts, monkeypatch):
    seen = []
    real = spec_play.play

    def play(engine, prompt, params):
        if engine.config.spec != "none":
            seen.append((prompt.id, len(logs[-1])))
        return real(engine, prompt, params)

    logs = []
    made = spec.TokenIndex
    monkeypatch.setattr(spec, "TokenIndex", lambda: logs.append(made()) or logs[-1])
    monkeypatch.setattr(spec_play, "play", play)
    spec.measure(FILE, dataclasses.replace(request(prompts), drafters=("history",)))
    assert {words for name, words in seen if name == "a"} == {0}
    assert len({words for name, words in seen if name == "b"}) == 1
    assert seen[-1][1] > 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--prompts", "missing.jsonl"], 2, "cannot be read"),
        (["--drafters", "ngramm"], 2, "Unknown drafter 'ngramm'"),
        (["--drafters", "draft_model"], 2, "has no model"),
        (["--spec", "none"], 2, "always measured"),
        (["--spec", "tree:99"], 2, "Unknown drafting mode 'tree:99'"),
        (["--spec", ""], 2, "Unknown drafting mode ''"),
        (["--temperature", "hot"], 2, "no list of temperatures"),
        (["--max-tokens", "1"], 2, "--max-tokens"),
        (["--limit", "0"], 2, "--limit"),
        (["--csv", "/nowhere/a.csv"], 2, "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(chatkv, words, code, said):
    ran = chatkv("bench", "spec", "--limit", "1", "--max-tokens", "4", "--temperature", "0", *words)
    assert ran.code == code
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_an_empty_file_and_replies_without_a_step(tmp_path, prompts, monkeypatch):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ChatKVError, match="no prompt to play"):
        spec.measure(FILE, request(str(empty)))
    monkeypatch.setattr(Sampler, "pick", lambda *_: types.SimpleNamespace(token=256))
    with pytest.raises(ChatKVError, match="ended with its first token"):
        spec.measure(FILE, request(prompts))


def request(prompts):
    return spec.Request(
        prompts=(Path(prompts),),
        max_tokens=12,
        temperatures=(0.7,),
        modes=("tree:4",),
        drafters=("ngram", "random"),
    )
