"""Heads learn from what the target wrote, and are measured and exported."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from taught import PROMPTS, alone, config_for, some_conversations

from chatkv.errors import UsageError
from chatkv.models.random_model import byte_tokenizer
from chatkv.spec.heads.file import HeadFile, load, save, target_of
from chatkv.spec.heads.grow import EagleCell, Guesses, RecurrentCell
from chatkv.spec.heads.modules import angles_of, new_head
from chatkv.spec.heads.shape import KINDS, shape_for
from chatkv.spec.train import loss_triton as losses
from chatkv.spec.train.base import Rows, last_rows
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
from chatkv.spec.train.prompts import Frame
from chatkv.spec.train.pupil import Pupil
from chatkv.spec.train.unroll import judge, unroll, weights_by_depth


def store_of(weights, conversations, width=96, draft=64) -> LessonStore:
    return LessonStore.build(weights, pack(conversations, width), np.arange(draft))


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


def test_too_little_to_train_with_is_told(weights, tmp_path):
    store = store_of(weights, some_conversations(1))
    config = TrainConfig(tmp_path, -1.0, ("recurrent",), rows=1)
    with pytest.raises(UsageError, match="all the time") as raised:
        train(config, weights, byte_tokenizer(), store, store, print)
    assert "--minutes" in raised.value.hint
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="no row of text"):
        LessonStore.build(weights, pack(some_conversations(1), 96).part(1, 1), np.arange(64))


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
