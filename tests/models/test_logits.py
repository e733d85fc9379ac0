"""What a CPU step hands to the engine: rows, picks, copies."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chatkv.attention.call import AttentionCall
from chatkv.models.logits import HostLogits
from chatkv.models.model import ForwardBatch
from chatkv.sampling import Sampler, SamplingParams


def batch(logit_rows: list[int] | None) -> ForwardBatch:
    """Two sequences: three rows behind 10 ids, two behind 4."""
    return ForwardBatch(
        tokens=np.arange(5, dtype=np.int32),
        positions=np.array([10, 11, 11, 4, 5], np.int32),
        slots=np.arange(5, dtype=np.int64),
        call=AttentionCall.of(torch.zeros(2, 1, dtype=torch.int32), [3, 2], [13, 6]),
        logit_rows=None if logit_rows is None else np.array(logit_rows, np.int32),
    )


def test_each_row_is_picked_by_its_own_sampler_at_its_own_position():
    logits = np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32)
    samplers = [Sampler(SamplingParams(seed=3)), Sampler(SamplingParams(temperature=0))]
    result = HostLogits(logits, batch(None))
    result.sample(samplers)
    picked = [result.pick(row) for row in range(5)]
    places = [(0, 11), (0, 12), (0, 12), (1, 5), (1, 6)]
    expected = [
        samplers[owner].pick(logits[row], [], place).token
        for row, (owner, place) in enumerate(places)
    ]
    assert picked == expected
    assert picked[3:] == logits[3:].argmax(1).tolist()


def test_rows_count_over_the_wanted_ones():
    logits = np.random.default_rng(1).normal(size=(2, 300)).astype(np.float32)
    result = HostLogits(logits, batch([1, 4]))
    sampler = Sampler(SamplingParams(seed=7))
    result.sample([sampler, sampler])
    assert len(result) == 2
    assert result.pick(0) == sampler.pick(logits[0], [], 12).token
    assert result.pick(1) == sampler.pick(logits[1], [], 6).token


def test_what_is_kept_outlives_the_step():
    logits = np.ones((5, 300), np.float32)
    result = HostLogits(logits, batch(None))
    kept, row = result.keep(2), result.row(2)
    logits[:] = 0
    assert np.asarray(kept).all()
    assert row.all()


def test_a_sampler_that_edits_reads_the_history():
    logits = np.zeros((5, 300), np.float32)
    logits[:, 7], logits[:, 9] = 2, 1
    penalty = SamplingParams(temperature=0, frequency_penalty=2.0)
    samplers = [Sampler(penalty, [0] * 11), Sampler(SamplingParams(temperature=0))]
    result = HostLogits(logits, batch(None))
    result.sample(samplers)
    history = [0] * 11
    assert [result.pick(0, history), result.pick(1, [*history, 7]), result.pick(3)] == [7, 9, 7]


class FakeStep:
    """A captured step as `DeviceLogits` sees it, in host memory; its fused pick says 100 + row."""

    def __init__(self, logits: np.ndarray) -> None:
        self.generation = 1
        self.room = SimpleNamespace(logits=torch.from_numpy(logits))
        self.inputs = SimpleNamespace(wait=lambda: self.done.append("wait"))
        self.done: list[str] = []

    def set(self, starts: tuple[int, ...], params: tuple[SamplingParams | None, ...]) -> None:
        self.settings = starts, params

    def pick(self, behind: Callable[[], None] | None) -> list[int]:
        self.done.append("pick")
        if behind is not None:
            behind()
        return [100, 101, 102, 103, 104]


def test_on_a_device_only_edited_rows_come_to_the_host():
    pytest.importorskip("triton")
    from chatkv.models.cuda_logits import DeviceLogits

    logits = np.random.default_rng(2).normal(size=(5, 300)).astype(np.float32)
    edited = Sampler(SamplingParams(seed=4, repetition_penalty=1.5), [1, 2, 3])
    plain = Sampler(SamplingParams(seed=9))
    step = FakeStep(logits)
    result = DeviceLogits(step, batch(None))  # type: ignore[arg-type]
    result.sample([plain, edited], lambda: step.done.append("behind"))
    assert step.done == ["pick", "behind"]
    assert step.settings == ((0, 3, 5), (plain.params, None))
    assert [result.has_moved(sequence) for sequence in (0, 1)] == [True, False]
    assert [result.pick(row) for row in range(3)] == [100, 101, 102]
    history = [1, 2, 3, 4, 5]
    assert result.pick(3, history) == edited.pick(logits[3], history, 5).token
    assert result.pick(4, [*history, 8]) == edited.pick(logits[4], [*history, 8], 6).token
    alone = FakeStep(logits)
    result = DeviceLogits(alone, batch(None))  # type: ignore[arg-type]
    result.sample([edited, edited], lambda: alone.done.append("behind"))
    assert alone.done == ["behind", "wait"]
    assert not result.has_moved(0)
    assert result.pick(0, history) == edited.pick(logits[0], history, 11).token
