"""Picking on a device against its definition. Run by test_interpreted.py."""

# Settings come as mappings, and loops run at least once.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import numpy as np
import pytest
import torch

from chatkv import sampling_triton
from chatkv.sampling import SamplingParams

VOCAB = 700
SETTINGS = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 50.0, "top_p": 1.0, "top_k": 1},
    {"temperature": 50.0, "top_p": 0.6, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.02},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
)


def lines(kind: str, draw: np.random.Generator) -> np.ndarray:
    x = draw.normal(size=VOCAB) * 3
    if kind == "rounded":
        return np.round(x)
    if kind == "flat":
        return x * 0
    if kind == "forbidden":
        return np.where(draw.random(VOCAB) < 0.9, -np.inf, x)
    if kind == "signed zeros":
        return np.where(draw.random(VOCAB) < 0.5, 0.0, -0.0)
    return x


KINDS = ("spread", "rounded", "flat", "forbidden", "signed zeros")


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_the_same_token_as_the_definition(monkeypatch: pytest.MonkeyPatch):
    # Several parts a row and several turns a part, on a small vocabulary.
    monkeypatch.setattr(sampling_triton, "SPLITS", 2)
    monkeypatch.setattr(sampling_triton, "BLOCK", 128)
    draw = np.random.default_rng(5)
    rows, logits = [], []
    for number, settings in enumerate(SETTINGS * 2):
        params = SamplingParams(seed=int(draw.integers(2**63)), **settings)
        rows.append((params, int(draw.integers(1 << 20))))
        logits.append(lines(KINDS[number % len(KINDS)], draw))
    for spoilt in (np.nan, np.inf):
        rows.append(rows[1])
        logits.append(lines("spread", draw))
        logits[-1][300] = spoilt
    found = torch.from_numpy(np.stack(logits).astype(np.float32))
    integers, floats = zip(*(sampling_triton.settings_of(one) for one, _ in rows), strict=True)
    room = sampling_triton.PickRoom.of(
        torch.tensor([len(rows)], dtype=torch.int32),
        torch.tensor([position - 1 for _, position in rows], dtype=torch.int32),
        torch.tensor(integers, dtype=torch.int64),
        torch.tensor(floats, dtype=torch.float64),
    )
    sampling_triton.pick_rows(found, room)
    picked = room.out.tolist()
    assert picked == sampling_triton.pick_rows_plain(found, rows)
    assert picked[-2:] == [-1, -1]
