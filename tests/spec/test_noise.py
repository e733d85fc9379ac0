"""The counter noise: published vectors, law, independence, and the compiled twin."""

from __future__ import annotations

import numpy as np
import pytest

from chatkv.noise import gumbel, gumbel_of, philox
from chatkv.sampling import Sampler, SamplingParams
from chatkv.sampling_cpu import noise_fast

VECTORS = [
    (1, 7, 0, 0x1A905C0F, 0xCCD69DCA, 0xBF73A9C6),
    (1, 7, 1, 0x49163204, 0x337C123B, 0x3E659E67),
    (1, 8, 1, 0x60C1E748, 0x7BAD6476, 0x3CFC9A98),
    (2**40 + 5, 100_000, 49_151, 0x28170207, 0x24989929, 0xBEC1EB32),
]


def test_philox_published_vector():
    words = philox(np.zeros((4, 1), dtype=np.uint64), 0)[:, 0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(("seed", "position", "token", "r0", "r1", "bits"), VECTORS)
def test_vectors(seed, position, token, r0, r1, bits):
    counter = np.array([[token], [position], [0], [0]], dtype=np.uint64)
    assert philox(counter, seed)[:2, 0].tolist() == [r0, r1]
    assert gumbel(seed, position, [token]).view(np.uint32).tolist() == [bits]
    assert noise_fast(seed, position, [token]).view(np.uint32).tolist() == [bits]


def test_compiled_noise_has_the_same_bits():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 2**31, 50_000)
        seed, position = int(rng.integers(0, 2**63)), int(rng.integers(0, 2**31))
        plain, fast = gumbel(seed, position, ids), noise_fast(seed, position, ids)
        assert np.array_equal(plain.view(np.uint32), fast.view(np.uint32))


def test_extremes_and_precision():
    ends = np.array([0, 255, 256, 2**31, 2**32 - 1], dtype=np.uint32)
    r0, r1 = (grid.ravel() for grid in np.meshgrid(ends, ends))
    noise = gumbel_of(r0, r1)
    assert np.isfinite(noise).all()
    assert noise.min() >= -2.87
    assert noise.max() <= 18.05
    rng = np.random.default_rng(1)
    r0, r1 = rng.integers(0, 2**32, (2, 200_000), dtype=np.uint32)
    k = np.array([24 - int(x >> 8).bit_length() for x in r0.tolist()], dtype=np.float64)
    t = ((r1 >> 8).astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-25
    exact = -np.log(k * np.log(2) - np.log1p(-t))
    assert np.abs(gumbel_of(r0, r1) - exact).max() < 1.1e-6


def test_law():
    noise = gumbel(3, 11, np.arange(1_000_000))
    assert noise.mean() == pytest.approx(0.57722, abs=0.004)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.01)
    logits = np.linspace(-1, 1, 8).astype(np.float32)
    draws = (noise.reshape(-1, 8) + logits).argmax(axis=1)
    expected = np.exp(logits) / np.exp(logits).sum() * len(draws)
    assert ((np.bincount(draws, minlength=8) - expected) ** 2 / expected).sum() < 29.9  # p = 1e-4


@pytest.mark.parametrize("change", ["token", "position", "seed", "stream"])
def test_neighbours_are_independent(change):
    ids = np.arange(100_000)
    one = gumbel(5, 9, ids)
    other = {
        "token": lambda: gumbel(5, 9, ids + 100_000),
        "position": lambda: gumbel(5, 10, ids),
        "seed": lambda: gumbel(6, 9, ids),
        "stream": lambda: gumbel(5, 9, ids, stream=2),
    }[change]()
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(ids))
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 4 / np.sqrt(len(ids))


def test_sampler_noise():
    ids = np.array([5, 6, 7])
    assert np.array_equal(Sampler(SamplingParams(seed=4)).noise(3, ids), gumbel(4, 3, ids))
    assert not Sampler(SamplingParams(temperature=0)).noise(3, ids).any()
