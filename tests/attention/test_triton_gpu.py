"""The Triton kernels on a CUDA device: values, poison, and above all bits.

`CHATKV_REQUIRE=gpu` turns a missing device into a failure.
"""

# What needs triton is imported once it is known to be here.
# ruff: noqa: E402

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    if os.environ.get("CHATKV_REQUIRE") == "gpu":
        pytest.fail("CHATKV_REQUIRE=gpu, and torch sees no CUDA device", pytrace=False)
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from chatkv.attention import store, triton_store
from chatkv.attention.triton_check import (
    QUANTISED,
    TOLERANCES,
    Case,
    Shape,
    differing_rows,
    errors,
    make_case,
    problem,
    random_tree,
)
from chatkv.attention.triton_launch import Launch, Partition
from chatkv.attention.triton_tree import TritonBackend

LLAMA = Shape(32, 8, 128, 64, torch.bfloat16, device="cuda")
SMOL = Shape(9, 3, 64, 64, torch.bfloat16, device="cuda")
CHAIN = tuple(range(-1, 15))
STAR = (-1,) + (0,) * 15
COMB = (-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13)
PLAIN = Launch(16, "leaf")
LAUNCHES = [
    PLAIN,
    Launch(16, "group", num_stages=2, nodes=2),
    Launch(32, "leaf", pdl=True),
    Launch(64, "leaf", num_stages=2, nodes=2, pdl=True),
    Launch(64, "group", pdl=True),
    Launch(64, "either", pdl=True),
    Launch(128, "group", num_warps=8, pdl=True),
]
WIDE = [
    Launch(64, "leaf", wide=True, nodes=2, pdl=True),
    Launch(64, "group", wide=True),
    Launch(64, "either", wide=True, nodes=4, pdl=True),
]
IS_HOPPER = torch.cuda.get_device_capability() == (9, 0)


def backend(shape: Shape, launch: Launch | None = None) -> TritonBackend:
    return TritonBackend(Partition.of(shape.num_kv_heads), launch)


def expect_right(case: Case, launch: Launch | None = None) -> None:
    served = backend(case.shape, launch)
    out_error, lse_error = errors(served, case)
    limit = TOLERANCES[case.shape.dtype]
    assert out_error <= limit
    assert lse_error <= limit
    assert served.calls == 1
    assert served.kernel.startswith("attend_past-")


@pytest.mark.parametrize("shape", [LLAMA, SMOL, replace(LLAMA, dtype=torch.float16)], ids=str)
@pytest.mark.parametrize("tree", [CHAIN, STAR, COMB], ids=["chain", "star", "comb"])
def test_nodes_have_the_bits_of_plain_decoding(shape: Shape, tree: tuple[int, ...]):
    histories = [0, 1, 15, 16, 17, 63, 64, 65, 511, 1024 + 15, 4096, 4096 + 16]
    case = make_case(shape, [tree] * len(histories), histories)
    assert differing_rows(backend(shape), backend(shape), case) == 0


@pytest.mark.parametrize("shape", [LLAMA, SMOL, replace(LLAMA, num_heads=64)], ids=str)
@pytest.mark.parametrize("rows", [2, 5, 16, 17, 64, 65])
def test_random_trees_under_every_launch(shape: Shape, rows: int):
    rng = random.Random(rows)
    histories = [rng.randrange(20000), rng.randrange(3000), rng.randrange(64)]
    case = make_case(shape, [random_tree(rows, 16, rng) for _ in histories], histories, seed=rows)
    plain = backend(shape, PLAIN)
    for launch in LAUNCHES + (WIDE if IS_HOPPER else []):
        assert differing_rows(backend(shape, launch), plain, case) == 0, launch


@pytest.mark.skipif(not IS_HOPPER, reason="for Hopper alone")
@pytest.mark.parametrize("launch", WIDE, ids=lambda launch: launch.owner)
@pytest.mark.parametrize("poison", [torch.nan, 3e38])
def test_many_rows(launch: Launch, poison: float):
    """Where leaves end, tiles are cut, and row blocks are half empty."""
    rng = random.Random(4)
    for shape, rows in (
        (replace(LLAMA, page_size=128), 33),
        (replace(LLAMA, num_heads=64, dtype=torch.float16), 17),
        (SMOL, 64),
    ):
        histories = [0, 1, 63, 64, 65, 127, 1024 + 16, 9000, 4096 - 16]
        trees = [*(random_tree(rows, 16, rng) for _ in histories), ()]
        case = make_case(shape, trees, [*histories, 40], seed=rows, poison=poison)
        expect_right(case, launch)
        assert differing_rows(backend(shape, launch), backend(shape, PLAIN), case) == 0, shape


@pytest.mark.skipif(not IS_HOPPER, reason="for Hopper alone")
def test_many_rows_of_sequences_of_very_different_lengths():
    """Programs share the leaves of the long ones."""
    trees = [random_tree(20, 16, random.Random(i)) for i in range(6)]
    case = make_case(LLAMA, trees, [300, 12000, 50, 9000, 0, 700])
    plan = backend(LLAMA).plan(case.call, 32, 8, 128, 64)
    assert 0 < plan.by_leaf.sum() < case.call.num_rows
    for launch in (WIDE[2], LAUNCHES[5]):
        expect_right(case, launch)
        assert differing_rows(backend(LLAMA, launch), backend(LLAMA, PLAIN), case) == 0, launch


def test_one_sequence_alone_has_the_same_bits():
    case = make_case(LLAMA, [random_tree(16, 16, random.Random(1))], [3333])
    for node in (0, 7, 15):
        assert differing_rows(backend(LLAMA), backend(LLAMA), case, [node]) == 0


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize(
    "options", [{"holes": True}, {"window": 1000}, {"holes": True, "window": 64}]
)
def test_holes_and_windows(page_size: int, options: dict):
    rng = random.Random(page_size)
    shape = replace(LLAMA, page_size=page_size)
    trees = [random_tree(16, 16, rng), (), random_tree(3, 16, rng), CHAIN]
    case = make_case(shape, trees, [2500, 40, 700, 64], **options)
    expect_right(case)
    for launch in (LAUNCHES[1], LAUNCHES[4]):
        assert differing_rows(backend(shape, launch), backend(shape, PLAIN), case) == 0


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantised_pages(dtype: torch.dtype, q_dtype: torch.dtype):
    shape = replace(LLAMA, dtype=q_dtype, page_dtype=dtype)
    trees = [random_tree(16, 16, random.Random(i)) for i in range(2)]
    case = make_case(shape, trees, [1500, 77])
    expect_right(case)
    # The rows of a program decide bits here, so the rule keeps them.
    plain = backend(shape, Launch(64, "leaf"))
    for launch in (None, Launch(64, "leaf", num_stages=2, pdl=True), LAUNCHES[4]):
        assert differing_rows(backend(shape, launch), plain, case) == 0, launch


@pytest.mark.parametrize("poison", [torch.nan, 3e38])
@pytest.mark.parametrize("stored", [0, 1, 63, 64, 65, 1000])
def test_poison_is_never_used(poison: float, stored: int):
    expect_right(make_case(LLAMA, [COMB, (-1,)], [stored, 5], poison=poison, padding=5))


@pytest.mark.parametrize("head_dim", [80, 96, 256])
@pytest.mark.parametrize("heads", [(4, 1), (5, 5), (16, 2)])
def test_other_heads(head_dim: int, heads: tuple[int, int]):
    shape = Shape(*heads, head_dim, 16, torch.bfloat16, device="cuda")
    case = make_case(shape, [random_tree(9, 16, random.Random(3)), (-1,)], [300, 20])
    expect_right(case)
    assert differing_rows(backend(shape), backend(shape), case) == 0


@pytest.mark.parametrize(
    "options", [{"as_chain": True}, {}, {"as_chain": True, "window": 100, "holes": True}]
)
def test_long_chains(options: dict):
    case = make_case(LLAMA, [tuple(range(-1, 199)), tuple(range(-1, 99))], [21, 500], **options)
    expect_right(case)
    assert differing_rows(backend(LLAMA), backend(LLAMA), case) == 0


def test_a_partition_that_follows_the_shape_is_caught():
    case = make_case(LLAMA, [CHAIN], [4000])
    wrong = TritonBackend(Partition(64, 8, 2), PLAIN)
    assert differing_rows(wrong, backend(LLAMA, PLAIN), case) > 0


def test_replay_with_other_lengths_recompiles_nothing():
    """One captured step serves every length and tree: only device tensors change."""
    from chatkv.attention.triton_kernels import attend_past

    rng = random.Random(5)
    cases = [
        make_case(LLAMA, [random_tree(16, 16, rng) for _ in range(2)], lengths, seed=i)
        for i, lengths in enumerate([(3000, 4000), (17, 2222), (4000, 0)])
    ]
    served = backend(LLAMA)
    static, call = cases[0], cases[0].call
    pages = torch.cat([static.pages, torch.zeros_like(static.pages[:8])])
    want = [served.attend(case.call, case.q, case.pages) for case in cases]
    compiled = len(attend_past.device_caches[0][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = served.plan(call, 32, 8, 128, 64)
        out, lse = served.attend(call, static.q, pages, plan=plan)
    for case, (want_out, want_lse) in zip(cases, want, strict=True):
        pages[: len(case.pages)] = case.pages
        static.q.copy_(case.q)
        call.page_table[:, : case.call.page_table.shape[1]] = case.call.page_table[
            :, : call.page_table.shape[1]
        ]
        call.kv_len.copy_(case.call.kv_len)
        assert call.ancestors is not None
        assert case.call.ancestors is not None
        call.ancestors.copy_(case.call.ancestors)
        graph.replay()
        assert torch.equal(out[:32], want_out[:32])
        assert torch.equal(lse[:32], want_lse[:32])
    assert len(attend_past.device_caches[0][0]) == compiled


def test_offsets_beyond_31_bits():
    """A pool of more than 2**31 elements; the pages in use are its last ones."""
    case = make_case(LLAMA, [CHAIN], [500])
    far = 2**31 // case.pages[0].numel()
    pages = torch.empty(
        far + len(case.pages), *case.pages.shape[1:], dtype=torch.bfloat16, device="cuda"
    )
    pages[far:] = case.pages
    table = case.call.page_table
    call = replace(case.call, page_table=torch.where(table < len(case.pages), table + far, table))
    want, _ = backend(LLAMA).attend(case.call, case.q, case.pages)
    out, _ = backend(LLAMA).attend(call, case.q, pages)
    assert torch.equal(out[:16], want[:16])


@pytest.mark.parametrize("shape", [LLAMA, SMOL], ids=str)
def test_the_check_at_load_finds_nothing(shape: Shape):
    assert problem(TritonBackend(), shape) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, *QUANTISED], ids=str)
def test_write_and_compact_are_as_plain(dtype: torch.dtype):
    quantised = dtype in QUANTISED
    width, per_slot = (64, 4) if dtype == torch.uint8 else (128, 1)
    k, v = torch.randn(2, 40, 8, 128, dtype=torch.bfloat16, device="cuda")
    k[3], v[4] = 0, -1e-7
    v[4, :, 0] = 1
    slots = torch.randperm(6 * 64, device="cuda")[:40]
    slots[5] = -1
    pools, scales = [], []
    for _ in range(2):
        pools.append(torch.zeros(3, 6, 2, 8, 64, width, device="cuda").to(dtype))
        scales.append(
            torch.zeros(3, 6, 2, 8, 64, per_slot, device="cuda").half() if quantised else None
        )
    for layer in range(3):
        store.write_rows_plain(
            k, v, pools[0][layer], scales[0] if not quantised else scales[0][layer], slots
        )
        triton_store.write_rows(
            k, v, pools[1][layer], scales[1] if not quantised else scales[1][layer], slots
        )
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
    src = torch.tensor([130, 131, 133, 134, 150, 151, 64, 70], device="cuda")
    dst = torch.tensor([130, 131, 132, 133, 134, 135, 136, 137], device="cuda")
    raw = pools[0].view(torch.uint8)
    store.compact_plain(raw, scales[0], src, dst)
    triton_store.compact(pools[1], scales[1], src, dst)
    assert torch.equal(raw, pools[1].view(torch.uint8))
    assert scales[0] is None or torch.equal(scales[0], scales[1])
