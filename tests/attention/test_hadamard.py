"""The matrix that queries and keys of quantised pools are multiplied by: its law, and what for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.cases import chain, make_case, random_tree
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from chatkv.attention.call import FLOATS
from chatkv.attention.hadamard import hadamard
from chatkv.attention.reference import ReferenceBackend, dequantise
from chatkv.attention.simd_hadamard import multiply_head
from chatkv.attention.store import quantise

DIMS = (32, 40, 64, 80, 96, 128, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_symmetric_orthogonal_and_mixes_channels_in_equal_shares(dim: int):
    matrix = hadamard(torch.eye(dim))
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim))
    size = dim & -dim
    assert ((matrix != 0).sum(0) == size).all()
    torch.testing.assert_close(matrix.abs().amax(0), torch.full((dim,), size**-0.5))


@pytest.mark.parametrize("dim", [64, 128])
def test_it_is_sylvesters(dim: int):
    matrix = torch.ones(1, 1)
    for _ in range(dim.bit_length() - 1):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    torch.testing.assert_close(hadamard(torch.eye(dim)), matrix * dim**-0.5)


@given(st.data(), st.sampled_from(DIMS))
def test_the_vectors_have_its_bits_and_touch_one_head(data: st.DataObject, dim: int):
    values = st.floats(-(2.0**60), 2.0**60, width=32)
    rows = data.draw(npst.arrays(np.float32, 3 * dim, elements=values))
    expected = rows.copy()
    expected[dim : 2 * dim] = hadamard(torch.from_numpy(rows[dim : 2 * dim])).numpy()
    multiply_head(rows, dim, dim // 2)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_attention_over_multiplied_keys_is_attention(dim: int):
    """Where nothing is rounded."""
    case = make_case(
        [random_tree(7, 1), chain(1)], [90, 30], heads=(4, 2), head_dim=dim, dtype=torch.float64
    )
    assert case.pages.dtype in FLOATS
    plain = ReferenceBackend().attend(case.call, case.q, case.pages)
    pages = case.pages.clone()
    pages[:, 0] = hadamard(pages[:, 0])
    mixed = ReferenceBackend().attend(case.call, hadamard(case.q), pages)
    rows = case.call.num_rows
    for found, expected in zip(mixed, plain, strict=True):
        torch.testing.assert_close(found[:rows], expected[:rows])


@pytest.mark.parametrize(("kind", "gain"), [(torch.int8, 2.5), (torch.uint8, 1.3)], ids=str)
def test_large_channels_cost_less(kind: torch.dtype, gain: float):
    """Scores of keys in which two channels are thirty times as large as the others."""
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(500, 64, generator=generator) for _ in range(2))
    keys[:, [5, 40]] *= 30
    exact = (q.double() * keys.double()).sum(-1)

    def error(q: torch.Tensor, keys: torch.Tensor) -> float:
        read = dequantise(*quantise(keys, kind), torch.float32)
        return float(((q * read).sum(-1) - exact).square().mean().sqrt())

    assert error(q, keys) > gain * error(hadamard(q), hadamard(keys))
