"""The test that decides: a node of a tree has the bits of plain decoding of its path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention.cases import bits_equal, chain, comb, make_case, random_tree, star

from chatkv.attention import cpu_plan
from chatkv.attention.cpu import CpuBackend
from chatkv.attention.cpu_math import SPLIT, TILE
from chatkv.attention.reference import ReferenceBackend

BF16, F32 = torch.bfloat16, torch.float32


class ShapeDependentBackend(CpuBackend):
    """Right, but not exact: with several rows it takes the stored pages in another order.

    So it cuts and adds keys differently, as a kernel does that picks splits by the call's shape.
    """

    def attend(self, call, q, pages, *, scales=None):
        rows, whole = call.num_rows, (call.kv_len_host[0] - call.num_rows) // pages.shape[3]
        if rows > 1:
            table = call.page_table.clone()
            table[:, :whole] = table[:, :whole].roll(rows, dims=1)
            call = replace(call, page_table=table)
        return super().attend(call, q, pages, scales=scales)


@pytest.fixture
def cpu() -> CpuBackend:
    return CpuBackend()


TREES = [
    chain(16),
    star(12),
    comb(17),
    *(random_tree(rows, rows) for rows in (2, 3, 5, 8, 24)),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{len(tree)}")
@pytest.mark.parametrize("stored", [0, 9, TILE - 1, SPLIT - 8, SPLIT, 2 * SPLIT - 1, 777])
def test_nodes_have_the_bits_of_plain_decoding(cpu, tree, stored):
    assert make_case([tree], [stored], seed=stored).differing_nodes(cpu) == 0


def test_every_start_within_a_tile(cpu):
    for stored in range(SPLIT - 20, SPLIT + TILE):
        case = make_case([random_tree(4, stored)], [stored], heads=(3, 1), seed=stored)
        assert case.differing_nodes(cpu) == 0, stored


@pytest.mark.parametrize("rows", [64, 65, 130])
def test_large_trees(cpu, rows):
    tree = random_tree(rows, 1, max_depth=rows)
    assert make_case([tree], [SPLIT - 30], heads=(3, 1)).differing_nodes(cpu) == 0


def test_neighbours_of_other_lengths(cpu):
    trees = [chain(3), random_tree(9, 1), [], star(4), random_tree(6, 2), chain(1)]
    assert make_case(trees, [300, 40, 10, 0, SPLIT, 1000]).differing_nodes(cpu) == 0


@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("window", [None, 4, 20, 400])
@pytest.mark.parametrize("stored", [5, SPLIT - 6, 600])
def test_holes_and_windows(cpu, holes, window, stored):
    trees = [random_tree(9, stored), chain(4)]
    case = make_case(trees, [stored, 33], holes=holes, window=window, seed=stored)
    assert case.differing_nodes(cpu) == 0


@pytest.mark.parametrize("heads", [(4, 1), (8, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("kind", [(80, 16, BF16), (128, 64, BF16), (64, 16, F32)], ids=str)
def test_other_models(cpu, heads, kind):
    head_dim, page_size, dtype = kind
    case = make_case(
        [random_tree(7, 3)], [310], heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype
    )
    assert case.differing_nodes(cpu) == 0


def test_siblings_in_another_order(cpu):
    case = make_case([star(6)], [100])
    order = torch.tensor([0, 4, 2, 5, 1, 3])
    slots = 100 + torch.arange(6)
    pages, table = case.pages.clone(), case.call.page_table[0].long()
    pages[table[slots // 16], :, :, slots % 16] = case.pages[
        table[slots[order] // 16], :, :, slots[order] % 16
    ]
    turned = replace(case, q=case.q[order], pages=pages)
    expected, actual = case.serve(cpu), turned.serve(cpu)
    assert bits_equal(expected[0][order], actual[0])
    assert bits_equal(expected[1][order], actual[1])


@pytest.mark.parametrize("stored", [30, 700])
def test_threads_change_nothing(monkeypatch, stored):
    trees = [random_tree(9, 1), chain(2)]
    case = make_case(trees, [stored, 3 * stored])
    alone = case.serve(CpuBackend(threads=1))
    monkeypatch.setattr(cpu_plan, "SERIAL_COST", -1)
    for threads in (2, 3, 7):
        backend = CpuBackend(threads)
        assert backend.plan(case.call, 9, 3, 64, 16).num_workers == threads
        together = case.serve(backend)
        assert all(bits_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_reference_is_exact_too():
    case = make_case([random_tree(7, 3), chain(2)], [40, 5], holes=True)
    assert case.differing_nodes(ReferenceBackend()) == 0


def test_a_split_that_depends_on_the_shape_is_noticed():
    backend = ShapeDependentBackend()
    case = make_case([random_tree(8, 1)], [700])
    case.check(backend)
    assert case.differing_nodes(backend) > 0


@pytest.mark.slow
def test_sweep(cpu):
    differing = nodes = 0
    for seed in range(150):
        trees = [random_tree(1 + seed % 40, seed), random_tree(1 + seed % 7, -seed), chain(3)]
        stored = [seed * 11 % 1100, seed, SPLIT - seed % 40]
        holes, window = seed % 3 == 0, [None, None, 30, 300][seed % 4]
        case = make_case(trees, stored, holes=holes, window=window, seed=seed)
        differing += case.differing_nodes(cpu)
        nodes += case.call.num_rows
    assert nodes > 3000
    assert differing == 0


def test_lanes_without_a_key_begin_as_zeros():
    """Tiny numbers left in memory made a step in a short context six times slower."""
    sizes = (60, 120, 200)
    for junk in [np.full(size, 1e-40, np.float32) for size in sizes]:
        del junk  # small arrays come back as they were left
    planner = cpu_plan.Planner()
    assert not any(planner._floats(str(size), size).any() for size in sizes)
