"""One forward pass from page tables and trees. Knows shapes; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.kv.table import PageTable
from chatkv.models.model import ForwardBatch
from chatkv.models.tree_rows import TreeRows
from chatkv.spec.proposal import GrownTree, Proposal
from chatkv.spec.tree import DraftTree

Slots = npt.NDArray[np.int64]


def tree_batch(tables: Seq[PageTable], trees: Seq[Proposal], slots: Seq[Slots]) -> ForwardBatch:
    """The rows of one tree a sequence, all their logits wanted.

    A tree that is still being grown comes alone, maybe with rows of others behind its own.

    Args:
        tables: With a reservation open for the rows of each tree.
        trees: Row 0 is the id right behind what the table holds.
        slots: [R] physical slots of each reservation.
    """
    seen = [tree for tree in trees if isinstance(tree, DraftTree)]
    if len(seen) < len(trees):
        (grown,) = trees
        assert isinstance(grown, GrownTree), "what is no tree yet"
        tokens = positions = _zeros(len(grown))
        ancestors = None
        if (others := grown.others) is not None:
            nothing, depths = _zeros(grown.size), np.array(others.depths[1:], np.int32)
            tokens = np.concatenate([nothing, others.tokens[1:]])
            positions = np.concatenate([nothing, depths + np.int32(tables[0].position)])
            ancestors = others.ancestors(grown.size - 1)
        return _batch(
            tables, tokens, positions, slots, ancestors=ancestors, logit_rows=None, grown=grown.rows
        )
    trees = seen
    depths = [np.array(tree.depths, np.int32) for tree in trees]
    chains = all(tree.depths[-1] == len(tree) - 1 for tree in trees)
    return _batch(
        tables,
        np.concatenate([tree.tokens for tree in trees]),
        _joined([d + t.position for t, d in zip(tables, depths, strict=True)]),
        slots,
        ancestors=None if chains else _joined([tree.ancestors() for tree in trees]),
        logit_rows=None,
    )


def run_on_batch(table: PageTable, rows: TreeRows, reach: Slots) -> ForwardBatch:
    """The step of a tree that grows behind the step that runs, as if that one kept no row.

    Args:
        table: With the reservation of the step that runs open.
        reach: Physical slots of the tree's rows, and of as many more as that step may keep.
    """
    zeros = _zeros(len(rows.tokens))
    slots = reach[: len(zeros)]
    batch = _batch([table], zeros, zeros, [slots], ancestors=None, logit_rows=None, grown=rows)
    return replace(batch, slots=reach)


def chain_batch(
    table: PageTable, ids: Seq[int], slots: Slots, *, want_logits: bool, tapped: int = 0
) -> ForwardBatch:
    """Ids right behind what the table holds, one after another; logits of the last or none.

    Args:
        tapped: Last ids whose tapped residuals are wanted.
    """
    positions = table.position + np.arange(len(ids), dtype=np.int32)
    rows = np.array([len(ids) - 1] if want_logits else [], np.int32)
    tokens = np.array(ids, np.int32)
    batch = _batch([table], tokens, positions, [slots], ancestors=None, logit_rows=rows)
    return replace(batch, tapped=tapped)


def chains_batch(tables: Seq[PageTable], parts: Seq[Seq[int]], slots: Seq[Slots]) -> ForwardBatch:
    """Ids right behind what each table holds, one after another; logits of all."""
    counts = zip(tables, parts, strict=True)
    positions = [table.position + np.arange(len(ids), dtype=np.int32) for table, ids in counts]
    tokens = np.concatenate([np.array(ids, np.int32) for ids in parts])
    return _batch(tables, tokens, np.concatenate(positions), slots, ancestors=None, logit_rows=None)


def _batch(
    tables: Seq[PageTable],
    tokens: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    slots: Seq[Slots],
    *,
    ancestors: npt.NDArray[np.int64] | None,
    logit_rows: npt.NDArray[np.int32] | None,
    grown: TreeRows | None = None,
) -> ForwardBatch:
    entries = [table.entries() for table in tables]
    width = max([len(row) for row in entries])
    page_table = entries[0][None]
    if len(tables) > 1:
        page_table = np.zeros((len(tables), width), np.int32)
        for row, pages in zip(page_table, entries, strict=True):
            row[: len(pages)] = pages
    rows = [len(own) for own in slots]
    positions = positions.astype(np.int32, copy=False)
    valid, page_pos = _holes(tables, width)
    call = AttentionCall.of(
        torch.from_numpy(page_table),
        rows,
        [table.length + count for table, count in zip(tables, rows, strict=True)],
        ancestors=None if ancestors is None else torch.from_numpy(ancestors[:, None]),
        valid=valid,
        page_pos=page_pos,
    )
    return ForwardBatch(
        tokens=tokens,
        positions=positions,
        slots=_joined(slots),
        call=call,
        logit_rows=logit_rows,
        grown=grown,
    )


@lru_cache(maxsize=64)
def _zeros(count: int) -> npt.NDArray[np.int32]:
    """Read only."""
    zeros = np.zeros(count, np.int32)
    zeros.setflags(write=False)
    return zeros


def _holes(tables: Seq[PageTable], width: int) -> tuple[Tensor | None, Tensor | None]:
    """`valid` and `page_pos` of an attention call; None where nothing was forgotten by anyone."""
    holes = [table.holes() for table in tables]
    if not any(holes):
        return None, None
    size = tables[0].pool.page_size
    valid = np.zeros((len(tables), width, 2), np.int32)
    valid[:, :, 1] = size
    page_pos = np.tile(size * np.arange(width, dtype=np.int32), (len(tables), 1))
    for row, found in enumerate(holes):
        if found is not None:
            valid[row, : len(found.valid)] = found.valid
            page_pos[row, : len(found.page_pos)] = found.page_pos
    return torch.from_numpy(valid), torch.from_numpy(page_pos)


def _joined(parts: Seq[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One behind another; the only one as it is, since most steps have one sequence."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
