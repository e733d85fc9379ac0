"""An eagle head's kernels against its modules: rows stored, trees grown. Run by
test_interpreted.py."""

# Settings come as mappings, and loops run at least once.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from chatkv.models.random_model import random_spec
from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.noise import gumbel
from chatkv.spec.heads.fused import Launch, Launches
from chatkv.spec.heads.fused_eagle import (
    EagleMemory,
    EagleWeights,
    FusedEagleGrower,
    NewRows,
    token_table,
)
from chatkv.spec.heads.grow import EagleCell, Growth, Vocabulary, grow
from chatkv.spec.heads.modules import EagleHead, angles_of, product, rms
from chatkv.spec.heads.shape import HeadShape, shape_for
from chatkv.spec.tree import DraftTree

SPEC = replace(
    random_spec("random:tiny")[0], hidden_size=16, head_dim=8, num_heads=3, num_kv_heads=1
)
WINDOW, COUNT = 12, 40
CPU = torch.device("cpu")
OURS = replace(shape_for("eagle", SPEC, draft_ids=COUNT), inner=8)
IMPORTED = replace(
    OURS, source="eagle3", norms_residual=True, eps=1e-2, head_dim=12,
    rope_factors=(2.0, 1.5) * 3,
)  # fmt: skip
SMALL = Launches(pairs=2, lines=2, score=Launch(32, 32), attend=Launch(2))
OTHER = Launches(pairs=1, attend=Launch(4))


class Text:
    """Rows of one sequence, of which some are stored, and what the modules say of them."""

    def __init__(self, shape: HeadShape, growth: Growth, rows: int, launches: Launches) -> None:
        torch.manual_seed(rows)
        self.head = EagleHead(shape).requires_grad_(False)
        for norm in (self.head.gamma, *(getattr(self.head, f"{n}_norm") for n in NORMS)):
            norm.uniform_(0.5, 1.5)
        table = torch.randn(SPEC.vocab_size, SPEC.hidden_size)
        self.words = Vocabulary.of(torch.randperm(SPEC.vocab_size)[:COUNT], 0.3 * table, table)
        self.growth = growth
        self.grower = FusedEagleGrower(self.head, self.words, growth, WINDOW, launches=launches)
        self.memory = EagleMemory.empty(shape, WINDOW, table)
        self.taps = torch.randn(rows, len(shape.taps), SPEC.hidden_size)
        self.ids = torch.randint(0, SPEC.vocab_size, (rows + 1,))

    def new(self, start: int, stop: int, room: int) -> NewRows:
        """Rows from start to stop, scattered over those of a step."""
        path = torch.randperm(room)[: max(1, stop - start)]
        tapped = torch.randn(self.taps.shape[1], room, SPEC.hidden_size)
        behind = torch.randint(0, SPEC.vocab_size, (room,))
        behind[path[0]] = self.ids[stop]  # with no new row it is the root
        tapped[:, path[: stop - start]] = self.taps[start:stop].transpose(0, 1)
        behind[path[: stop - start]] = self.ids[start + 1 : stop + 1]
        return NewRows(
            tapped, path.int(), behind.int(), *(torch.tensor(n).int() for n in
            ([stop - start], [max(0, start - WINDOW), start])),
        )  # fmt: skip

    def stored(self, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, keys and values of all rows, by the modules."""
        states = self.head.features(self.taps[:stop])
        angles = angles_of(self.head.shape, torch.arange(stop))
        embedded = self.words.embedding[self.ids[1 : stop + 1]]
        return states, *self.head.stored(states, embedded, angles)

    def expected(self, stop: int, heat: float, seed: int):
        states, keys, values = self.stored(stop)
        keys, values = keys[None, max(0, stop - WINDOW) :], values[None, max(0, stop - WINDOW) :]

        def look(q):
            scores = torch.einsum("nwhgd,nshd->nwhgs", q, keys)
            return scores, lambda shares: torch.einsum("nwhgs,nshd->nwhgd", shares, values)

        ids = self.words.draft_ids.numpy()
        noise = [gumbel(seed, stop + 1 + depth, ids) for depth in range(self.growth.depth)]
        return grow(
            self.head,
            EagleCell(self.head, states[-1:], torch.tensor([stop - 1]), look),
            self.words,
            self.ids[stop : stop + 1],
            self.growth,
            inverse_t=torch.tensor([1 / heat if heat else 1.0]),
            noise=torch.from_numpy(np.stack(noise))[None] if heat else None,
        )


NORMS = ("token", "state", "feed")


def test_what_a_draft_id_adds_is_in_a_table() -> None:
    text = Text(OURS, Growth(), 1, SMALL)
    head, words = text.head, text.words
    embedded = words.embedding[words.draft_ids]
    tokens = rms(embedded, head.token_norm, OURS.eps)
    expected = product(torch.cat([tokens, torch.zeros_like(tokens)], -1), head.qkv)
    weights = EagleWeights.of(head, torch.float32)
    torch.testing.assert_close(token_table(weights, words, OURS.eps), expected)


@pytest.mark.parametrize(
    ("shape", "growth", "launches", "steps", "heat"),
    [
        (OURS, Growth(rows=16, depth=4, width=4, children=8), OTHER, (9, 3), 0.7),
        (IMPORTED, Growth(rows=9, depth=3, width=3, children=4), SMALL, (5, 0, 9), 0.0),
        (OURS, Growth(rows=12, depth=2, width=8, children=8), SMALL, (16, 13), 0.7),
    ],
    ids=("ours", "imported", "wide"),
)
def test_rows_and_trees_are_those_of_the_modules(shape, growth, launches, steps, heat) -> None:
    text = Text(shape, growth, sum(steps), launches)
    start = Carried(0, SPEC.hidden_size, CPU)
    out = torch.zeros(3, growth.rows, dtype=torch.int32)
    rows, stop = TreeRows.empty(growth.rows, CPU), 0
    for count in steps:
        stop += count
        start.send(None, int(text.ids[stop]), stop + 1, temperature=heat, seed=7)
        text.grower.grow(start, text.memory, text.new(stop - count, stop, 16), out, rows)
        slots = torch.arange(stop)[-len(text.memory.states) :] % len(text.memory.states)
        for mine, theirs in zip(
            (text.memory.states, text.memory.keys, text.memory.values), text.stored(stop),
            strict=True,
        ):  # fmt: skip
            theirs = theirs[-len(slots) :]
            torch.testing.assert_close(mine[slots], theirs, rtol=1e-4, atol=1e-5)
        tree = text.expected(stop, heat, 7)
        assert out[0].tolist() == tree.tokens[0].tolist()
        assert out[1].tolist() == tree.parents[0].tolist()
        chance = out[2].view(torch.float32)
        np.testing.assert_allclose(chance, tree.chance[0], rtol=1e-3)
        made = DraftTree.of(out[0].tolist(), out[1].tolist(), chance.tolist())
        assert max(made.depths) > 1
        assert rows.tokens.tolist() == made.tokens.tolist()
        assert rows.positions.tolist() == [stop + depth for depth in made.depths]
