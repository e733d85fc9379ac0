"""What a CPU step hands to the engine: rows, picks, copies."""

from __future__ import annotations

import numpy as np
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
