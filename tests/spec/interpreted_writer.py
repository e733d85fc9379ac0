"""The writer's kernels against their plain versions. Run by test_train.py."""

from __future__ import annotations

import torch

from chatkv.spec.heads.noise_triton import draft_noise, draft_noise_plain
from chatkv.spec.train import loss_triton as losses
from chatkv.spec.train import writer_triton as kernels


def test_attention():
    torch.manual_seed(0)
    rows, heads, kv_heads, length, dim = 5, 6, 2, 200, 32
    q = torch.randn(rows, heads, dim)
    pages = torch.randn(rows, 2, kv_heads, length, dim)
    positions = torch.tensor([0, 63, 64, 130, 199], dtype=torch.int32)
    for row, last in enumerate(positions.tolist()):
        pages[row, :, :, last + 1 :] = torch.nan
    actual, expected = torch.zeros_like(q), torch.zeros_like(q)
    kernels.attend(q, pages, positions, actual, dim**-0.5)
    kernels.attend_plain(q, pages, positions, expected, dim**-0.5)
    assert (actual - expected).abs().max() < 1e-5


def test_picks():
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 5000)
    logits[3, 77] = logits[3, 4100] = 50.0
    inverse_t = torch.tensor([1.0, 1 / 0.7, 0.0, 0.0])
    seeds = torch.tensor([1, 2**40 + 5, 3, 4])
    positions = torch.tensor([7, 100000, 3, 9], dtype=torch.int32)
    actual, expected = (torch.zeros(4, dtype=torch.int32) for _ in range(2))
    kernels.pick(logits, inverse_t, seeds, positions, actual)
    kernels.pick_plain(logits, inverse_t, seeds, positions, expected)
    assert torch.equal(actual, expected)
    assert actual[3] == 77


def test_loss():
    torch.manual_seed(0)
    rows, width = 6, 100
    guess, target = 2 * torch.randn(rows, width), 2 * torch.randn(rows, width)
    log_total = target.logsumexp(-1) + 0.3
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.0])
    found = []
    for compare in (losses.compare, losses.compare_plain):
        slope, out = guess.clone(), torch.zeros(rows, 2)
        best = torch.zeros(rows, dtype=torch.int32)
        compare(slope, target, log_total, weight, out, best, 1)
        found.append((slope, out, best[weight > 0]))
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).abs().max() < 1e-5


def test_totals_of_logits():
    torch.manual_seed(0)
    logits = 5 * torch.randn(3, 9000)
    actual, expected = torch.zeros(3), torch.zeros(3)
    losses.log_totals(logits, actual)
    losses.log_totals_plain(logits, expected)
    assert (actual - expected).abs().max() < 1e-5


def test_noise_of_draft_ids():
    seeds = torch.tensor([5, -1, 2**62 + 3])
    positions = torch.tensor([7, 8, 100], dtype=torch.int32)
    ids = torch.tensor([3, 0, 49151, 12])
    actual, expected = torch.ones(3, 2, 4), torch.ones(3, 2, 4)
    draft_noise(seeds, positions, ids, actual)
    draft_noise_plain(seeds, positions, ids, expected)
    assert torch.equal(actual, expected)
    assert bool((actual[1] == 0).all())
