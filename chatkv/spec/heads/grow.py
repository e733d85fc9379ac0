"""Trees of guesses from a head, for a batch of rows, with static shapes and nothing read back.

Knows modules and tensors; no sequence and no `DraftTree`. The same operations run on a CPU, on a
device, and captured in a graph.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from chatkv.spec.heads.modules import (
    EagleHead,
    Head,
    ParallelHead,
    RecurrentHead,
    angles_of,
)

DEEPER = 1e-3
"""Taken from a node's rank a depth, so that no child ranks with its parent."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a head's numbers mean, in the target's own tensors."""

    draft_ids: Tensor
    """[K] int64."""
    draft_rows: Tensor
    """[K, H]: the target's head at these ids."""
    embedding: Tensor
    """[V, H]."""

    @classmethod
    def of(cls, draft_ids: Tensor, head: Tensor, embedding: Tensor) -> Vocabulary:
        """Cut from the target's head [V, H] and embedding [V, H]."""
        ids = draft_ids.to(head.device)
        return cls(ids, head[ids].contiguous(), embedding)


@dataclass(frozen=True, slots=True)
class Growth:
    """How large a tree is asked for."""

    rows: int = 16
    """Of the tree, root included."""
    depth: int = 4
    width: int = 4
    """Nodes of a depth that get children."""
    children: int = 8
    """Children of a node that are looked at."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """[N, R] each, parents first; row 0 is the root and its own parent."""

    tokens: Tensor
    parents: Tensor
    chance: Tensor
    """float32: product of the shares along the path."""


class Cell(Protocol):
    """States of a tree's nodes, one depth after another."""

    def begin(self, embedded: Tensor) -> Tensor:
        """[N, 1, H], behind the root with embedding [N, 1, H]."""
        ...

    def advance(self, parents: Tensor, embedded: Tensor) -> Tensor:
        """[N, W, H] behind nodes that stand below places `parents` [N, W] of the depth before."""
        ...


class RecurrentCell:
    """States of a recurrent head over rows with taps [N, taps, H]."""

    def __init__(self, head: RecurrentHead, taps: Tensor) -> None:
        self._head = head
        self._states = head.features(taps)[:, None]

    def begin(self, embedded: Tensor) -> Tensor:
        self._states = self._head.advance(self._states, embedded)
        return self._states

    def advance(self, parents: Tensor, embedded: Tensor) -> Tensor:
        self._states = self._head.advance(_below(self._states, parents), embedded)
        return self._states


class ParallelCell:
    """States of a parallel head: they depend on the depth only."""

    def __init__(self, head: ParallelHead, taps: Tensor) -> None:
        self._fan = head.fan(head.features(taps))
        self._depth = 0

    def begin(self, embedded: Tensor) -> Tensor:
        self._depth = 1
        return self._fan[:, :1]

    def advance(self, parents: Tensor, embedded: Tensor) -> Tensor:
        self._depth += 1
        return self._fan[:, self._depth - 1 : self._depth].expand(-1, parents.shape[1], -1)


Look = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""Rotated, scaled queries [N, W, HK, G, D] -> scores [N, W, HK, G, S] over the stored keys, hidden
ones at -inf, and a function that mixes the stored values by shares of that shape."""


class EagleCell:
    """States of an eagle head: nodes see the stored rows and their own ancestors.

    Args:
        features: [N, H] of the rows that chose the roots.
        positions: [N] of those rows.
        look: Attention to the stored rows, the one of the root included.
    """

    def __init__(self, head: EagleHead, features: Tensor, positions: Tensor, look: Look) -> None:
        self._head, self._positions, self._look = head, positions, look
        self._states = features[:, None]
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._depth = 0

    def begin(self, embedded: Tensor) -> Tensor:
        # The root's own key and value are among the stored ones.
        self._states = self._run(self._states, embedded)
        self._keys = self._values = None
        return self._states

    def advance(self, parents: Tensor, embedded: Tensor) -> Tensor:
        if self._keys is not None and self._values is not None:
            self._keys = _below(self._keys, parents)
            self._values = _below(self._values, parents)
        self._states = self._run(_below(self._states, parents), embedded)
        return self._states

    def _run(self, states: Tensor, embedded: Tensor) -> Tensor:
        positions = (self._positions + self._depth)[:, None].expand(states.shape[:2])
        self._depth += 1
        angles = angles_of(self._head.shape, positions)
        return self._head.advance(states, embedded, angles, self._attend)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        q = q.unflatten(2, (-1, group)) * q.shape[-1] ** -0.5
        scores, mix = self._look(q)
        if self._depth == 1:
            return mix(scores.softmax(-1)).flatten(2, 3)
        own_k, own_v = k[:, :, None].float(), v[:, :, None].float()
        if self._keys is not None and self._values is not None:
            own_k = torch.cat([self._keys, own_k], 2)
            own_v = torch.cat([self._values, own_v], 2)
        self._keys, self._values = own_k, own_v
        own = torch.einsum("nwhgd,nwmhd->nwhgm", q, own_k)
        shares = torch.cat([scores, own], -1).softmax(-1)
        stored, rest = shares.split([scores.shape[-1], own.shape[-1]], -1)
        mixed = mix(stored) + torch.einsum("nwhgm,nwmhd->nwhgd", rest, own_v)
        return mixed.flatten(2, 3)


@torch.no_grad()
def grow(
    head: Head,
    cell: Cell,
    vocabulary: Vocabulary,
    roots: Tensor,
    growth: Growth,
    *,
    inverse_t: Tensor,
    noise: Tensor | None = None,
) -> Guesses:
    """The most probable tree below each root.

    Args:
        roots: [N] tokens.
        inverse_t: [N] float32, 1 / temperature; 1 at temperature 0, where noise is 0.
        noise: [N, depth, K]: the target's own noise of the draft ids at the positions to come.
    """
    count = len(roots)
    embed, ids = vocabulary.embedding, vocabulary.draft_ids
    zero = torch.zeros(count, 1, device=roots.device)
    paths = zero
    places = zero.long()
    # Of all children looked at, a depth after another: token, rank, log chance, parent's place.
    tokens, ranks, logs, above = [], [], [], []
    seen = 1
    states = cell.begin(embed[roots.long()][:, None])
    for depth in range(growth.depth):
        scores = head.logits(states, vocabulary.draft_rows) * inverse_t[:, None, None]
        if noise is not None:
            scores = scores + noise[:, depth, None]
        best, which = scores.log_softmax(-1).topk(growth.children, -1)
        log = (paths[..., None] + best).flatten(1)
        token = ids[which].flatten(1)
        tokens.append(token)
        logs.append(log)
        ranks.append(log - DEEPER * depth)
        above.append(places.repeat_interleave(growth.children, 1))
        if depth + 1 == growth.depth:
            break
        paths, chosen = log.topk(growth.width if depth else min(growth.width, log.shape[1]), -1)
        states = cell.advance(chosen // growth.children, embed[token.gather(1, chosen)])
        places = seen + chosen
        seen += log.shape[1]
    token, rank, log, parent = (torch.cat(part, 1) for part in (tokens, ranks, logs, above))
    return _select(roots, token, rank, log, parent, growth)


def _select(
    roots: Tensor, tokens: Tensor, ranks: Tensor, logs: Tensor, above: Tensor, growth: Growth
) -> Guesses:
    """The best nodes with their parents' rows. Node j of all is known as j + 1, the root as 0."""
    kept = ranks.topk(growth.rows - 1, -1).indices.sort(-1).values
    row_of = torch.zeros(len(roots), ranks.shape[1] + 1, dtype=torch.int64, device=roots.device)
    rows = torch.arange(1, growth.rows, device=roots.device).expand_as(kept)
    row_of.scatter_(1, kept + 1, rows)
    first = torch.zeros_like(roots, dtype=torch.int64)[:, None]
    parents = row_of.gather(1, above.gather(1, kept))
    chance = logs.gather(1, kept).exp()
    return Guesses(
        torch.cat([roots.long()[:, None], tokens.gather(1, kept)], 1).int(),
        torch.cat([first, parents], 1).int(),
        torch.cat([torch.ones_like(chance[:, :1]), chance], 1),
    )


def _below(values: Tensor, parents: Tensor) -> Tensor:
    """values [N, W, ...] at places parents [N, W']."""
    index = parents.view(*parents.shape, *([1] * (values.dim() - 2)))
    return values.gather(1, index.expand(*parents.shape, *values.shape[2:]))
