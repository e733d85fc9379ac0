"""The walk on the device against the only acceptance rule, and rows moved. Run by
test_interpreted.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from chatkv.attention.store import compact_plain
from chatkv.models.tree_rows import Carried, TreeRows, row_fields
from chatkv.models.walk_triton import LONGEST_PATH, WalkRoom, move_rows, shift_rows, walk_rows
from chatkv.sampling_triton import PickRoom
from chatkv.spec.proposal import GrownTree, walked
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import verify

ROWS, TAPS, HIDDEN = 16, 2, 24
CPU = torch.device("cpu")


def grown(draw: random.Random, rows: int) -> DraftTree:
    """Any tree over four tokens."""
    tokens, parents, taken = [draw.randrange(4)], [0], set[tuple[int, int]]()
    while len(tokens) < rows:
        parent, token = draw.randrange(len(tokens)), draw.randrange(4)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return DraftTree.of(tokens, parents)


def run(sizes: list[int], seed: int, *, walks: list[int] | None = None) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    trees = [grown(draw, rows) for rows in sizes]
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    there = {name: torch.zeros(shape, dtype=t) for name, (t, shape) in row_fields(ROWS).items()}
    there["slots"] = torch.full((ROWS,), -1)
    # One sequence more than there are, as in a bucket.
    there["q_start"] = torch.tensor([*starts, starts[-1]], dtype=torch.int32)
    there["split"] = torch.tensor([64], dtype=torch.int32)
    for tree, start in zip(trees, starts, strict=False):
        for row in range(len(tree)):
            there["tokens"][start + row] = int(tree.tokens[row])
            there["positions"][start + row] = 30 + tree.depths[row]
            there["ancestors"][start + row, 0] = int(tree.ancestors()[row])
    slots = draw.sample(range(5 * 16), starts[-1])
    there["slots"][: starts[-1]] = torch.tensor(slots)
    picks = PickRoom.of(
        torch.tensor([ROWS], dtype=torch.int32),
        there["positions"],
        torch.tensor([[7 + seed, 0]] * ROWS),
        torch.tensor([[1.0, seed % 2 / 2, 0.0]] * ROWS, dtype=torch.float64),
    )
    picks.out.copy_(torch.tensor([draw.randrange(4) for _ in range(ROWS)]))
    walking = [1] * len(sizes) if walks is None else walks
    room = WalkRoom.of(there, torch.tensor([*walking, 1], dtype=torch.int32))
    tapped = torch.randn(TAPS, ROWS, HIDDEN)
    carried = Carried(TAPS, HIDDEN, CPU) if len(sizes) == 1 else None
    pages = torch.randn(2, 5, 2, 3, 16, 8)
    expected = pages.clone()

    walk_rows(picks, room, tapped, carried)
    move_rows(pages, None, room)

    for n, (tree, start) in enumerate(zip(trees, starts, strict=False)):
        if not walking[n]:
            assert int(room.counts[n]) == 0
            continue
        found = verify(tree, lambda row, path, start=start: int(picks.out[start + row]))
        assert room.path[n, : int(room.counts[n])].tolist() == list(found.rows)
        own = torch.tensor(slots[start : start + len(tree)])
        compact_plain(expected, None, own[list(found.rows)], own[: len(found.rows)])
        if carried is not None:
            last = start + found.rows[-1]
            assert torch.equal(carried.taps, tapped[:, last])
            assert int(carried.root) == found.tokens[-1]
            assert int(carried.position) == int(there["positions"][last]) + 2
            greedy = seed % 2 == 0
            assert int(carried.seed) == (-1 if greedy else 7 + seed)
            assert float(carried.inverse_t) == (1.0 if greedy else 0.5)
    assert int(room.counts[-1]) == 0
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("seed", range(6))
def test_one_tree(seed: int) -> None:
    run([draw + 1 for draw in random.Random(seed).sample(range(ROWS), 1)], seed)


@pytest.mark.parametrize("seed", range(4))
def test_several_trees_side_by_side(seed: int) -> None:
    run([5, 1, 9], seed)
    run([7, 8], seed, walks=[0, 1])


def test_a_chain_that_is_right_to_its_end() -> None:
    for rows in (2, 16):
        tree = DraftTree.of(range(rows), [max(0, row - 1) for row in range(rows)])
        there = {name: torch.zeros(shape, dtype=t) for name, (t, shape) in row_fields(16).items()}
        there["tokens"][:rows] = torch.from_numpy(tree.tokens.copy())
        there["ancestors"][:rows, 0] = torch.from_numpy(tree.ancestors())
        there["slots"], there["q_start"] = torch.arange(16), torch.tensor([0, rows]).int()
        one = torch.ones(1, dtype=torch.int32)
        there["split"] = 64 * one
        picks = PickRoom.of(one, there["positions"], torch.zeros(16, 2).long(), torch.ones(16, 3))
        picks.out.copy_(torch.arange(1, 17))
        room = WalkRoom.of(there, one)
        walk_rows(picks, room, torch.zeros(0, 16, 8), None)
        assert int(room.counts) == rows


def test_of_two_trees_below_one_root_the_longer_path_counts() -> None:
    """As the host has it."""
    assert set.union(*map(went_beside, range(8))) == {True, False}


def went_beside(seed: int) -> set[bool]:
    """Whether paths went down the second tree, each as the host has it."""
    draw = random.Random(seed)
    own, others = grown(draw, 9), grown(draw, 1 + draw.randrange(2, 8))
    others = DraftTree.of(
        [int(own.tokens[0]), *others.tokens[1:].tolist()], others.parents.tolist()
    )
    rows = TreeRows.empty(9, CPU)
    tree = GrownTree(int(own.tokens[0]), 8, rows, lambda: own)
    tree.beside, tree.runs_beside = others, True
    count = len(tree)
    there = {name: torch.zeros(shape, dtype=t) for name, (t, shape) in row_fields(ROWS).items()}
    there["tokens"][:count] = torch.from_numpy(np.concatenate([own.tokens, others.tokens[1:]]))
    there["ancestors"][:count, 0] = torch.from_numpy(others.ancestors(8))
    there["ancestors"][:9, 0] = torch.from_numpy(own.ancestors())
    there["slots"], there["q_start"] = torch.arange(16), torch.tensor([0, count]).int()
    there["split"] = torch.tensor([9], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    picks = PickRoom.of(one, there["positions"], torch.zeros(16, 2).long(), torch.ones(16, 3))
    longer: set[bool] = set()
    for _ in range(10):
        picks.out.copy_(torch.tensor([draw.randrange(4) for _ in range(ROWS)]))
        room = WalkRoom.of(there, one)
        walk_rows(picks, room, torch.zeros(0, 16, 8), None)
        found = walked(tree, lambda row, path: int(picks.out[row]))
        assert room.path[0, : int(room.counts[0])].tolist() == list(found.rows)
        longer.add(found.rows[-1] >= 9)
    return longer


@pytest.mark.parametrize("kept", [1, 3, 5])
def test_rows_go_behind_those_that_are_kept(kept: int) -> None:
    reach = torch.arange(100, 100 + ROWS + LONGEST_PATH)
    inputs = {"reach": reach, "slots": torch.zeros(ROWS, dtype=torch.int64)}
    inputs["kv_len"] = torch.tensor([40], dtype=torch.int32)
    shift_rows(inputs, torch.tensor([kept], dtype=torch.int32))
    assert inputs["slots"].tolist() == list(range(100 + kept, 100 + kept + ROWS))
    assert inputs["kv_len"].tolist() == [40 + kept]
