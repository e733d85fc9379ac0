"""Trees from a head in few kernels against those of its modules. Run by test_interpreted.py."""

# Settings come as mappings, and loops run at least once.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from chatkv.models.random_model import random_spec
from chatkv.models.tree_rows import Carried, TreeRows
from chatkv.noise import gumbel
from chatkv.spec.heads.fused import FusedGrower, Launch, Launches
from chatkv.spec.heads.grow import Growth, RecurrentCell, Vocabulary, grow
from chatkv.spec.heads.modules import new_head
from chatkv.spec.heads.shape import shape_for
from chatkv.spec.tree import DraftTree

SPEC = replace(random_spec("random:tiny")[0], hidden_size=32)


def made(count: int, seed: int):
    torch.manual_seed(seed)
    # The interpreter takes a while for each program.
    shape = replace(shape_for("recurrent", SPEC, draft_ids=count), inner=16)
    head = new_head(shape).requires_grad_(False)
    head.gamma.uniform_(0.5, 1.5)
    table = torch.randn(SPEC.vocab_size, SPEC.hidden_size)
    ids = torch.randperm(SPEC.vocab_size)[:count]
    return head, Vocabulary.of(ids, 0.3 * table, table)


@pytest.mark.parametrize(
    ("growth", "count", "block", "heat"),
    [
        (Growth(rows=16, depth=4, width=4, children=8), 70, 64, 0.7),
        (Growth(rows=8, depth=3, width=3, children=4), 100, 16, 0.0),
        (Growth(rows=12, depth=1, width=4, children=16), 40, 32, 0.7),
        (Growth(rows=33, depth=3, width=8, children=8), 100, 32, 0.0),
    ],
    ids=str,
)
def test_the_tree_of_the_modules(growth: Growth, count: int, block: int, heat: float) -> None:
    head, words = made(count, seed=growth.rows)
    launches = replace(Launches(), score=Launch(block, 64))
    grower = FusedGrower(head, words, growth, launches=launches)  # type: ignore[arg-type]
    for turn in range(2 if growth.rows == 8 else 1):
        taps = torch.randn(len(head.shape.taps), SPEC.hidden_size)
        root, seed, position = 5 + turn, 77 + turn, 30
        start = Carried(*taps.shape, torch.device("cpu"))
        start.send(taps, root, position, temperature=heat, seed=seed)
        out = torch.zeros(3, growth.rows, dtype=torch.int32)
        rows = TreeRows.empty(growth.rows, torch.device("cpu"))
        grower.grow(start, out, rows)
        ids = words.draft_ids.numpy()
        noise = np.stack([gumbel(seed, position + depth, ids) for depth in range(growth.depth)])
        expected = grow(
            head,
            RecurrentCell(head, taps[None]),  # type: ignore[arg-type]
            words,
            torch.tensor([root]),
            growth,
            inverse_t=torch.tensor([1 / heat if heat else 1.0]),
            noise=torch.from_numpy(noise)[None] if heat else None,
        )
        assert out[0].tolist() == expected.tokens[0].tolist()
        assert out[1].tolist() == expected.parents[0].tolist()
        chance = out[2].view(torch.float32)
        np.testing.assert_allclose(chance, expected.chance[0], rtol=1e-4)
        # And the rows are those of that tree.
        tree = DraftTree.of(out[0].tolist(), out[1].tolist(), chance.tolist())
        assert rows.tokens.tolist() == tree.tokens.tolist()
        assert rows.positions.tolist() == [position - 1 + depth for depth in tree.depths]
        assert rows.ancestors[:, 0].tolist() == tree.ancestors().tolist()
