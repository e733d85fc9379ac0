"""The Triton kernels in Triton's interpreter: run by test_triton.py in a process of its own.

Small float16 and float32 shapes: the interpreter is slow, and has no bfloat16 dot.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import triton

from chatkv.attention import store, triton_store
from chatkv.attention.triton_check import (
    QUANTISED,
    TOLERANCES,
    Shape,
    differing_rows,
    errors,
    make_case,
    random_tree,
)
from chatkv.attention.triton_launch import Launch, Partition
from chatkv.attention.triton_tree import TritonBackend
from chatkv.errors import BackendUnavailable

PARTITION = Partition(32, 2, 2)
LEAF, GROUP, EITHER = (Launch(16, owner) for owner in ("leaf", "group", "either"))
SMALL = Shape(num_heads=2, num_kv_heads=1, head_dim=32)
CHAIN = tuple(range(-1, 22))


def backend(launch: Launch = LEAF) -> TritonBackend:
    return TritonBackend(PARTITION, launch)


def expect_right(launch: Launch, case) -> None:
    served = backend(launch)
    out_error, lse_error = errors(served, case)
    limit = TOLERANCES[case.shape.dtype]
    assert out_error <= limit
    assert lse_error <= limit
    assert served.calls == 1
    assert served.kernel.startswith("attend_past-")


def test_runs_interpreted():
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("launch", [LEAF, replace(GROUP, nodes=2), EITHER])
@pytest.mark.parametrize(
    "options", [{}, {"holes": True}, {"window": 40}, {"holes": True, "window": 70}]
)
def test_values_of_trees(launch: Launch, options: dict):
    rng = random.Random(3)
    trees = [random_tree(5, 16, rng), (), (-1,)]
    expect_right(launch, make_case(SMALL, trees, [130, 9, 31], seed=5, **options))


@pytest.mark.parametrize("poison", [torch.nan, 6e4])
@pytest.mark.parametrize("stored", [0, 16, 17])
def test_poison_is_never_used(poison: float, stored: int):
    expect_right(GROUP, make_case(SMALL, [(-1, 0, 0)], [stored], poison=poison, padding=3))


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_quantised_pages(dtype: torch.dtype):
    shape = Shape(3, 1, 64, 32, page_dtype=dtype)
    expect_right(LEAF, make_case(shape, [(-1, 0, 1, 0)], [70]))


@pytest.mark.parametrize("head_dim", [48, 128])
def test_float32_and_other_head_sizes(head_dim: int):
    shape = Shape(2, 2, head_dim, 64, dtype=torch.float32)
    expect_right(GROUP, make_case(shape, [(-1, 0)], [100]))


@pytest.mark.parametrize("options", [{}, {"as_chain": True, "window": 30, "holes": True}])
def test_chain_longer_than_the_deepest_tree(options: dict):
    expect_right(replace(GROUP, block_m=64), make_case(SMALL, [CHAIN], [21], **options))


@pytest.mark.parametrize("options", [{}, {"holes": True, "window": 70}])
def test_tree_rows_are_as_plain_decoding(options: dict):
    """Bits here are numpy's: this holds the construction. For a device see test_triton_gpu.py."""
    # Its rows sit at 125 to 130, and from 128 on a row's own keys begin one unit later.
    case = make_case(SMALL, [(-1, 0, 1, 2, 1, 3, 5)], [125], seed=2, **options)
    tree = backend(replace(GROUP, block_m=32, nodes=2))
    assert differing_rows(tree, backend(), case) == 0


def test_leaves_of_long_sequences_are_shared():
    case = make_case(SMALL, [(-1,), (-1, 0, 0), (-1, 0)], [9, 697, 31])
    plan = backend(EITHER).plan(case.call, 2, 1, 32, 16)
    # The longest first, and leaves are cheap at this size.
    assert plan.sequences[:, 6:].tolist() == [[3, 1], [3, 2], [3, 0]]
    assert plan.by_leaf.tolist() == [1] * 6
    expect_right(EITHER, case)
    assert differing_rows(backend(EITHER), backend(), case) == 0


def test_other_groups_give_other_bits():
    """The negative control: the test above sees a partition that follows the shape."""
    case = make_case(SMALL, [(-1, 0, 0)], [300])
    assert differing_rows(TritonBackend(Partition(32, 3, 1), LEAF), backend(), case) > 0


def test_bfloat16_and_odd_heads_are_refused():
    for shape in (replace(SMALL, dtype=torch.bfloat16), replace(SMALL, head_dim=24)):
        case = make_case(shape, [(-1,)], [3])
        with pytest.raises(BackendUnavailable):
            backend().attend(case.call, case.q, case.pages)


@pytest.mark.parametrize("dtype", [torch.float16, *QUANTISED], ids=str)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_write_rows_is_as_plain(dtype: torch.dtype, head_dim: int):
    k, v = torch.randn(2, 5, 2, head_dim, dtype=torch.float16)
    k[1], v[2] = 0, v[2] * 1000
    k[3] = -6e-8
    k[3, :, 0] = 1
    width, per_slot = (head_dim // 2, head_dim // 32) if dtype == torch.uint8 else (head_dim, 1)
    pages = [torch.zeros(3, 2, 2, 16, width, dtype=dtype) for _ in range(2)]
    quantised = dtype in QUANTISED
    scales = [torch.zeros(3, 2, 2, 16, per_slot).half() if quantised else None for _ in range(2)]
    slots = torch.tensor([40, 7, -1, 8, 47])
    store.write_rows_plain(k, v, pages[0], scales[0], slots)
    triton_store.write_rows(k, v, pages[1], scales[1], slots)
    assert torch.equal(pages[0].view(torch.uint8), pages[1].view(torch.uint8))
    assert scales[0] is None or torch.equal(scales[0], scales[1])


@pytest.mark.parametrize("scaled", [False, True])
def test_compact_is_as_plain(scaled: bool):
    pages = torch.randint(-100, 100, (2, 4, 2, 2, 16, 32), dtype=torch.int8)
    scales = torch.randn(2, 4, 2, 2, 16, 1).half() if scaled else None
    # Logical slots 14 to 32 of the pages 2, 0, 3; the path keeps rows 0, 2, 3, 7, ... of the step.
    order = torch.tensor([2, 0, 3]).repeat_interleave(16) * 16 + torch.arange(16).repeat(3)
    src, dst = order[[14, 16, 17, 21, *range(22, 33)]], order[14:29]
    want = pages.clone(), None if scales is None else scales.clone()
    store.compact_plain(*want, src, dst)
    triton_store.compact(pages, scales, src, dst)
    assert torch.equal(want[0], pages)
    assert scales is None or torch.equal(want[1], scales)
