"""What the target writes for heads to learn from, and how it is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from taught import HEAD, PROMPTS, alone, config_for, some_conversations

from chatkv import noise
from chatkv.errors import ModelError, UsageError
from chatkv.models.random_model import byte_tokenizer
from chatkv.spec.train import distill as distill_module
from chatkv.spec.train import shards as shards_module
from chatkv.spec.train import vocabulary
from chatkv.spec.train.distill import distill
from chatkv.spec.train.prompts import Frame, Novelty, read_prompts
from chatkv.spec.train.shards import Conversation, read_shard, shard_paths, write_shard
from chatkv.spec.train.writer import BatchWriter, Brief


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


def test_a_stint_that_writes_nothing_is_told(talker, prompts, tmp_path):
    config = replace(config_for(prompts, tmp_path / "out"), seconds=0.0)
    with pytest.raises(UsageError, match="No answer was written in 0 seconds"):
        distill(config, talker, byte_tokenizer(), print)
    assert not shard_paths(tmp_path / "out")


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
