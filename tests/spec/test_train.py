"""Training heads: what the target writes, how it is stored, and that heads learn from it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chatkv import noise
from chatkv.errors import ModelError, UsageError
from chatkv.models.random_model import byte_tokenizer, random_weights
from chatkv.spec.heads.file import HeadFile, load, save, target_of
from chatkv.spec.heads.grow import EagleCell, Guesses, RecurrentCell
from chatkv.spec.heads.modules import angles_of, new_head
from chatkv.spec.heads.shape import KINDS, shape_for
from chatkv.spec.train import distill as distill_module
from chatkv.spec.train import loss_triton as losses
from chatkv.spec.train import shards as shards_module
from chatkv.spec.train import vocabulary
from chatkv.spec.train.base import Base, Rows, last_rows
from chatkv.spec.train.distill import DistillConfig, distill
from chatkv.spec.train.export import export
from chatkv.spec.train.heads import TrainConfig, checkpoint, rate_at, train
from chatkv.spec.train.lessons import LessonStore
from chatkv.spec.train.measure import (
    FORMS,
    Walk,
    answer_prompts,
    causal_look,
    has_repeats,
    matched,
    summary,
    walks,
)
from chatkv.spec.train.packed_attention import PackedAttention
from chatkv.spec.train.packing import pack
from chatkv.spec.train.prompts import Frame, Novelty, read_prompts
from chatkv.spec.train.pupil import Pupil
from chatkv.spec.train.shards import Conversation, read_shard, shard_paths, write_shard
from chatkv.spec.train.unroll import judge, unroll, weights_by_depth
from chatkv.spec.train.writer import BatchWriter, Brief

HEAD = [60, 117, 62]
PROMPTS = [["one", "two"], ["three"], ["four, a longer one"]]


@pytest.fixture(scope="module")
def weights():
    return random_weights("random:tiny", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def talker(weights):
    """The same model, but it stops more often: so it makes up whole prompts."""
    head = weights.head.clone()
    head[256] *= 2
    return replace(weights, head=head)


@pytest.fixture
def prompts(tmp_path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    lines = [f'{{"turns": {turns}}}'.replace("'", '"') for turns in PROMPTS]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def alone(weights, ids) -> torch.Tensor:
    """[T, V]: the target's logits over one conversation."""
    own = torch.tensor([ids], dtype=torch.int32)
    rows = Rows(own, torch.ones_like(own), torch.arange(len(ids))[None].int(), own > -1)
    states = Base(weights).run(rows).states
    return last_rows(weights, states[0, :, -1]) @ weights.head.T


def some_conversations(count: int = 7, seed: int = 0) -> list[Conversation]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = rng.integers(0, 250, rng.integers(20, 60)).astype(np.int32)
        found.append(Conversation(ids, ((8, len(ids)),), 0.7, 3, 11))
    return found


def store_of(weights, conversations, width=96, draft=64) -> LessonStore:
    return LessonStore.build(weights, pack(conversations, width), np.arange(draft))


def test_a_seat_writes_what_the_target_says(weights):
    writer = BatchWriter(weights, HEAD, seats=3, length=64, eos_ids=(256,))
    given = [[*HEAD, *range(5, 12)], [*HEAD, 9], HEAD]
    writer.assign(
        {seat: Brief(ids, 30 + seat, (0.0, 0.7, 1.0)[seat], 77) for seat, ids in enumerate(given)}
    )
    writer.run(10)
    assert {seat: len(ids) for seat, ids in writer.unfinished().items()} == {0: 13, 1: 13, 2: 13}
    writer.run(40)
    done = writer.finished()
    assert {seat: len(ids) for seat, ids in done.items()} == {0: 30, 1: 31, 2: 32}
    for seat, heat in enumerate((0.0, 0.7, 1.0)):
        ids = done[seat]
        assert ids[: len(given[seat])] == given[seat]
        logits = alone(weights, ids)
        for at in range(len(given[seat]), len(ids)):
            scores = logits[at - 1]
            if heat:
                scores = scores / heat + torch.from_numpy(noise.gumbel(77, at, range(320)))
            assert ids[at] == int(scores.argmax())


def test_a_seat_goes_on_behind_its_stop_id(weights):
    writer = BatchWriter(weights, HEAD, seats=2, length=64, eos_ids=(256,))
    writer.assign({1: Brief([*HEAD, 1], 10, 0.0, 1)})
    writer.run(12)
    first = writer.finished()[1]
    longer = [*first, 256, 10, 11]
    writer.assign({1: Brief(longer, 24, 0.0, 1, is_new=False)})
    writer.run(20)
    ids = writer.finished()[1]
    assert ids[: len(longer)] == longer
    logits = alone(weights, ids)
    assert len(ids) == 24
    assert all(ids[at] == int(logits[at - 1].argmax()) for at in range(len(longer), 24))
    with pytest.raises(ValueError, match="room for 64"):
        writer.assign({0: Brief([*HEAD, 1], 65, 0.0, 1)})


def test_packed_conversations_do_not_see_each_other(weights):
    conversations = some_conversations()
    packed = pack(conversations, 96)
    assert packed.ids.shape[0] < len(conversations)
    store = store_of(weights, conversations)
    for row in range(len(packed.ids)):
        for number in range(1, packed.documents[row].max() + 1):
            at = np.flatnonzero(packed.documents[row] == number)
            ids = packed.ids[row, at].tolist()
            assert any(ids == c.ids.tolist() for c in conversations)
            assert packed.positions[row, at].tolist() == list(range(len(ids)))
            assert packed.written[row, at].tolist() == [p >= 8 for p in range(len(ids))]
            own = last_rows(weights, store.states[row, at, -1]) @ weights.head.T
            expected = alone(weights, ids)
            assert torch.allclose(own, expected, atol=1e-3)
            assert torch.allclose(store.log_total[row, at], expected.logsumexp(-1), atol=1e-3)


def test_guesses_are_judged_inside_one_answer():
    documents = torch.tensor([[1] * 9 + [2] * 5])
    written = torch.tensor([[False] * 4 + [True] * 5 + [False] * 2 + [True] * 3])
    rows = Rows(documents, documents, documents, written)
    first, second = weights_by_depth(rows, 2)
    assert first[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 10, 11]
    assert second[0].nonzero()[:, 0].tolist() == [3, 4, 5, 10]


@pytest.mark.parametrize("kind", ["recurrent", "eagle"])
def test_one_at_a_time_equals_the_unrolled_form(weights, kind):
    torch.manual_seed(1)
    store = store_of(weights, some_conversations(1))
    lesson = store.lesson(torch.tensor([0]))
    head = new_head(shape_for(kind, weights.spec, draft_ids=64)).requires_grad_(False)
    states = unroll(head, lesson)
    width = int((lesson.rows.documents > 0).sum())
    taps, embedded = lesson.states[0, :width], lesson.embedded[0].roll(-1, 0)
    numbers = torch.arange(width)
    if kind == "recurrent":
        cell = RecurrentCell(head, taps)
    else:
        keys, values = head.stored(
            head.features(taps), embedded[:width], angles_of(head.shape, numbers)
        )
        cell = EagleCell(head, head.features(taps), numbers, causal_look(keys[None], values[None]))
    found = cell.begin(embedded[:width, None])
    for depth in range(3):
        usable = width - depth - 1
        assert torch.allclose(found[:usable, 0], states[depth][0, :usable], atol=1e-4)
        later = lesson.embedded[0].roll(-(depth + 2), 0)[:width, None]
        # Two nodes of the same parent: neither sees the other.
        found = cell.advance(torch.zeros(width, 2, dtype=torch.int64), later.expand(-1, 2, -1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_over_packed_rows_and_its_gradient(device):
    torch.manual_seed(0)
    documents = torch.tensor([[1] * 5 + [2] * 7 + [0] * 4, [1] * 16], device=device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tolerance = 1e-4 if device == "cpu" else 2e-2
    shapes = [(2, 16, heads, 64) for heads in (4, 2, 2)]
    parts = [torch.randn(size, device=device) for _ in range(3) for size in shapes]
    found = []
    for attend in (PackedAttention(documents, dtype), DenseAttention(documents)):
        own = [part.to(dtype).float().requires_grad_() for part in parts]
        outs = [attend(*own[at : at + 3]) for at in (0, 3, 6)]
        sum(((i + 1) * out.sin()).sum() for i, out in enumerate(outs)).backward()
        found.append([*(out.detach() for out in outs), *(part.grad for part in own)])
    for actual, expected in zip(*found, strict=True):
        error = (actual - expected).norm() / expected.norm()
        assert error < tolerance, error


class DenseAttention:
    """`PackedAttention` as one softmax over a matrix of scores, for autograd."""

    def __init__(self, documents):
        own = documents[:, :, None] == documents[:, None, :]
        self.hidden = ~(own & torch.ones_like(own).tril())[:, None, None]
        self.keys, self.values = [], []

    def __call__(self, q, k, v):
        self.keys.append(k)
        self.values.append(v)
        q = q.unflatten(2, (k.shape[2], -1)) / q.shape[-1] ** 0.5
        scores = torch.einsum("bthgd,bshd->bhgts", q, self.keys[0])
        every = [scores.masked_fill(self.hidden, -torch.inf)]
        every += [torch.einsum("bthgd,bthd->bhgt", q, k)[..., None] for k in self.keys[1:]]
        shares = torch.cat(every, -1).softmax(-1)
        out = torch.einsum("bhgts,bshd->bthgd", shares[..., : scores.shape[-1]], self.values[0])
        for i, v in enumerate(self.values[1:]):
            own = shares[..., scores.shape[-1] + i]
            out = out + torch.einsum("bhgt,bthd->bthgd", own, v)
        return out.flatten(2, 3)


def test_the_gradient_is_that_of_the_loss():
    torch.manual_seed(0)
    guess = (2 * torch.randn(6, 40)).requires_grad_()
    target = 2 * torch.randn(6, 40)
    totals, weight = target.logsumexp(-1) + 0.2, torch.tensor([1.0, 2, 0.5, 0, 1, 1])
    p = (target - totals[:, None]).exp()
    p, q = torch.cat([p[2:], p[-1:], p[-1:]]), guess.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    each = losses.CROSS * -(p * guess.log_softmax(-1)).sum(-1) + losses.SHIFT * (1 - overlap)
    (each * weight).sum().backward()
    slope, out = guess.detach().clone(), torch.zeros(6, 2)
    losses.compare_plain(slope, target, totals, weight, out, torch.zeros(6).int(), 2)
    assert torch.allclose(slope, guess.grad, atol=1e-6)
    used = weight > 0
    assert torch.allclose(out[used], torch.stack([each, overlap], -1).detach()[used], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_lower_the_loss(weights, kind):
    torch.manual_seed(0)
    lesson = store_of(weights, some_conversations(4)).lesson(torch.tensor([0, 1]))
    head = new_head(shape_for(kind, weights.spec, draft_ids=64, depth=3))
    pupil = Pupil(head, torch.device("cpu"))
    before, numbers = judge(pupil.average, lesson)
    for _ in range(8):
        pupil.learn(lesson, 1e-3)
    after, averaged = (judge(h, lesson)[0].detach() for h in (pupil.head, pupil.average))
    assert float(after) < float(before) - 0.02
    assert float(averaged) < float(before)
    assert bool((numbers[:, 0] > 0).all())


def test_training_leaves_files_and_goes_on_from_them(weights, tmp_path):
    lines: list[str] = []
    store = store_of(weights, some_conversations(4))
    config = TrainConfig(tmp_path, 0.3, ("recurrent", "parallel"), rows=1)
    tokenizer = byte_tokenizer()
    for stint in (1, 2):
        train(config, weights, tokenizer, store, store, lines.append)
        found = load(checkpoint(tmp_path, "recurrent"), weights.spec, tokenizer.tok_fp())
        assert found.training["stints"] == stint
        assert len(found.training["held_out"]["right"]) == 5
    assert found.training["steps"] >= 2
    assert rate_at(0, config) < rate_at(0.03, config) == config.rate
    assert rate_at(1, config) == pytest.approx(config.last_rate)


def test_shards_come_back_and_are_cut_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "MAX_TOKENS", 100)
    conversations = some_conversations()
    writer = shards_module.ShardWriter(tmp_path, 3, {"weights": "w"}, 320)
    writer.add(conversations)
    writer.flush()
    writer.flush()
    paths = shard_paths(tmp_path)
    assert len(paths) > 1
    assert shards_module.next_stint(tmp_path) == 4
    found = [c for path in paths for c in read_shard(path)[0]]
    for done, expected in zip(found, conversations, strict=True):
        assert done.ids.tolist() == expected.ids.tolist()
        assert (done.answers, done.prompt, done.seed) == (expected.answers, 3, 11)
        assert done.temperature == pytest.approx(0.7)
    assert not list(tmp_path.glob(".*"))
    paths[0].write_bytes(paths[0].read_bytes()[:200])
    with pytest.raises(ModelError, match=paths[0].name):
        read_shard(paths[0])


def test_an_empty_shard(tmp_path):
    write_shard(tmp_path / "distill-00-00.npz", [], {}, 320)
    assert read_shard(tmp_path / "distill-00-00.npz")[0] == []


def config_for(prompts: Path, out: Path, **more) -> DistillConfig:
    settings = {"seats": 4, "length": 64, "answer_tokens": 20, "max_tokens": 200, **more}
    return DistillConfig((prompts,), out, 60.0, **settings)


def test_stints_go_on_with_other_prompts(talker, prompts, tmp_path):
    lines: list[str] = []
    out, tokenizer = tmp_path / "out", byte_tokenizer()
    for _ in range(2):
        found = distill(config_for(prompts, out), talker, tokenizer, lines.append)
        assert found["tokens"] >= 200
    stints = [read_shard(path) for path in shard_paths(out)]
    assert [about["stint"] for _, about in stints] == [0, 1]
    every = [c for conversations, _ in stints for c in conversations]
    frame = Frame.of(tokenizer)
    greedy = [c.prompt for c in every if c.temperature == 0 and c.prompt >= 0]
    assert len(greedy) == len(set(greedy))
    assert len({(c.seed, c.prompt) for c in every}) == len(every)
    for done in every:
        assert done.ids[: len(frame.head)].tolist() == list(frame.head)
        assert all(
            frame.footer == tuple(done.ids[a - len(frame.footer) : a]) for a, _ in done.answers
        )
        if done.prompt >= 0:
            text = tokenizer.decode(done.ids[len(frame.head) : done.answers[0][0]])
            assert text.startswith(PROMPTS[done.prompt][0])
    assert {c.prompt for c in every} >= {-1, 0}


def test_a_killed_stint_leaves_what_it_had_written(talker, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(distill_module, "FLUSH_S", 0.0)
    out, flushed = tmp_path / "out", []

    def stop(line: str) -> None:
        if "tokens in" in line and shard_paths(out):
            flushed.append(line)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(config_for(prompts, out), talker, byte_tokenizer(), stop)
    conversations = read_shard(shard_paths(out)[0])[0]
    assert conversations
    assert all(c.answers for c in conversations)


def test_the_frame_is_what_the_template_renders():
    tokenizer = byte_tokenizer()
    frame = Frame.of(tokenizer)
    assert [*frame.head, *b"hi", *frame.footer] == tokenizer.encode("<user>hi<|end|><assistant>")
    assert [*frame.between, *b"hi"] == tokenizer.encode("<user>hi")


def test_prompts_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["a\u2028b"]}\n{"turn": 1}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl"):
        read_prompts([path])
    path.write_text('{"turns": ["a\u2028b"]}\n')
    assert read_prompts([tmp_path]) == [["a\u2028b"]]


def test_made_up_prompts_must_be_new():
    novelty = Novelty()
    assert not novelty.accepts(range(7))
    assert not novelty.accepts(range(401))
    assert novelty.accepts(range(20))
    assert not novelty.accepts([*range(18), 90, 91])
    assert novelty.accepts([*range(8), *range(50, 70)])
    assert (novelty.kept, novelty.dropped) == (2, 3)


def test_draft_ids_are_the_most_frequent_and_all_stop_ids(tmp_path):
    counts = np.array([0, 5, 9, 0, 7, 1])
    assert vocabulary.choose(counts, 3, (3,)).tolist() == [2, 4, 3]
    done = Conversation(np.array([1, 1, 1, 2, 2, 4], np.int32), ((3, 6),), 0.0)
    ids, facts = vocabulary.make([done], 6, 2, ())
    assert ids.tolist() == [2, 4]
    assert facts["written"] == 3
    vocabulary.write(tmp_path, ids, facts)
    assert vocabulary.read(tmp_path).tolist() == [2, 4]
    with pytest.raises(UsageError, match="no conversations"):
        vocabulary.read_all(tmp_path, "w")
    write_shard(tmp_path / "distill-00-00.npz", [done], {"weights": "v", "model": "m"}, 6)
    with pytest.raises(UsageError, match="written by m"):
        vocabulary.read_all(tmp_path, "w")


def test_answers_are_walked_as_an_engine_would():
    guesses = Guesses(
        torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[0, 0, 0, 2, 3]]), torch.ones(1, 5)
    )
    found = [
        int(matched(guesses, torch.tensor([later]))[0])
        for later in ([2, 3, 4], [2, 3, 9], [1, 3, 4], [9, 9, 9], [3, 4, 1])
    ]
    assert found == [3, 2, 1, 0, 0]
    walk = Walk(0.0, False, np.array([1, 0, 0, 2, 1, 0]))
    assert walk.steps() == 3
    line = summary([walk, Walk(0.0, True, np.array([0, 0]))])
    assert (line["tau"], line["tau_without_repeats"]) == (8 / 5, 2.0)
    assert line["a"] == [0.375, 0.333]


def test_long_repeats_are_found():
    ids = np.arange(60, dtype=np.int32)
    assert not has_repeats(ids, 10, 60)
    ids[40:57] = ids[5:22]
    assert has_repeats(ids, 30, 60)
    assert not has_repeats(ids, 30, 56)


def test_kernels_in_the_interpreter():
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    done = subprocess.run(
        [*command, here / "interpreted_writer.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_measured_heads_are_exported_with_a_card(weights, prompts, tmp_path):
    tokenizer = byte_tokenizer()
    config = config_for(prompts, tmp_path, length=64, answer_tokens=12)
    rows = [[list(turn.encode()) for turn in turns] for turns in PROMPTS]
    frame = Frame.of(tokenizer)
    done = answer_prompts(config, weights, frame, rows, (0.0, 1.0))
    assert sorted((c.prompt, c.temperature) for c in done) == [
        (p, t) for p in range(3) for t in (0, 1)
    ]
    assert all(len(c.ids) <= 64 for c in done)
    files = {}
    for kind in KINDS:
        head = new_head(shape_for(kind, weights.spec, draft_ids=64)).requires_grad_(False)
        target = target_of(weights.spec, tokenizer.tok_fp())
        files[kind] = HeadFile(head, torch.arange(64), target, {"steps": 1})
    found = walks(files, weights, done)
    for by_form in found.values():
        answers = sum(len(c.answers) for c in done)
        assert {form: len(some) for form, some in by_form.items()} == dict.fromkeys(FORMS, answers)
        right = {form: sum(int(w.right.sum()) for w in some) for form, some in by_form.items()}
        assert right["chain of 1"] <= right["chain of 4"] <= right["tree of 16"]
    path = checkpoint(tmp_path, "eagle")
    save(path, files["eagle"])
    measured = {form: {"0": summary(some)} for form, some in found["eagle"].items()}
    written = export(
        path, weights.spec, tokenizer.tok_fp(), tmp_path / "to", {"device": "none"}, measured
    )
    assert load(written, weights.spec, tokenizer.tok_fp()).measured == measured
    text = written.with_suffix(".md").read_text()
    line = measured["tree of 16"]["0"]
    row = f"| tree of 16 | 0 | {line['answers']} ({line['without_repeats']}) | {line['tau']} ("
    assert row in text
    assert weights.spec.weights_digest in text


@pytest.mark.slow
def test_all_stages_by_command(prompts, tmp_path):
    def run(stage: str, *more: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chatkv.spec.train", stage, "--model", "random:tiny"]
        command += ["--device", "cpu", "--out", tmp_path / "out", *more]
        return subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=300, check=False
        )

    short = ("--length", 128, "--answer-tokens", 20)
    stages = [
        ("distill", "--minutes", 0.2, "--seats", 8, "--prompts", prompts, *short),
        ("vocabulary", "--draft-ids", 64),
        ("train", "--minutes", 0.3, "--rows", 1, "--length", 128, "--kinds", "recurrent"),
        ("measure", "--prompts", prompts, "--limit", 2, "--temperatures", 0, *short),
        ("export", "--kind", "recurrent", "--to", tmp_path / "final"),
    ]
    for stage in stages:
        done = run(*stage)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "final").iterdir())) == 2
    done = run("distill", "--minutes", 0.1, "--prompts", tmp_path / "nothing.jsonl")
    assert done.returncode == 2
    assert "nothing.jsonl holds no prompts" in done.stderr
