"""Guesses with a smaller model that has the same tokenizer. Knows that model and pages of its own.

Speculative decoding with two models (Leviathan et al. 2023, Chen et al. 2023), but for how a guess
is checked: the small model picks with the reply's own settings and noise, and the large one picks
the same token or another. A chain for each sequence, as long as the small model is sure of itself.

Rollback invariant: whenever no guess is being made, the pages of a sequence hold the K/V of a
prefix of its chosen ids, and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from chatkv.attention.call import AttentionCall
from chatkv.errors import ModelError, OutOfPages
from chatkv.kv.keys import fingerprint, page_keys, root_key
from chatkv.kv.prefix import PrefixCache
from chatkv.kv.table import PageTable
from chatkv.models.model import ForwardBatch, Model
from chatkv.spec.drafter import DraftContext
from chatkv.spec.tree import MAX_DEPTH, DraftTree
from chatkv.spec.verify import Accepted
from chatkv.tokenizer import Tokenizer

LEAST_CHANCE = 0.15
"""A chain ends where its whole path is less likely than this to be right."""
MEASURED = 3
"""Steps that tell at load what one takes."""
PADDING = re.compile(r"\[PAD\d+\]")
"""What GGUF files call rows of the vocabulary that no token belongs to."""
MARGINS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
"""Upper edges of the score bins: the best score above the second, noise included."""


@dataclass(slots=True)
class Held:
    """What the small model knows of one sequence."""

    table: PageTable
    ids: list[int] = field(default_factory=list[int])
    """The ids whose K/V the table holds."""
    chosen: list[int] = field(default_factory=list[int])
    """All ids of the sequence so far."""

    def rewind(self) -> None:
        """Drop the K/V of ids that were not chosen, and of the last one chosen: the next root."""
        keep, most = 0, min(len(self.ids), len(self.chosen) - 1)
        if self.ids[:most] == self.chosen[:most]:
            keep = most
        else:
            while self.ids[keep] == self.chosen[keep]:
                keep += 1
        self.table.truncate(keep)
        del self.ids[keep:]


class DraftModelDrafter:
    """A chain of the small model's own picks.

    Args:
        model: The small model. Nobody else may use the object: its steps are captured for one pool.
        context_limit: Tokens of the longest sequence.
    """

    name = "draft_model"

    def __init__(self, model: Model, context_limit: int) -> None:
        self.model = model
        self.limit = min(context_limit, model.spec.context_limit)
        """Behind so many tokens nothing is proposed."""
        self.pool = model.new_pool(model.pool_tokens(self.limit))
        self.prefix = PrefixCache(self.pool)
        self.pool.reclaim = self.prefix.reclaim
        self.held: dict[int, Held] = {}
        self._root = root_key(fingerprint(model.identity(self.pool.page_size)), b"draft")
        self.guess_ms = self._measure()
        """What a guess takes: one step of the small model."""

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Take up a sequence, with the pages that earlier ones left."""
        held = self.held.get(seq_id)
        if held is None:
            held = self.held[seq_id] = Held(PageTable(self.pool))
            whole = (len(tokens) - 1) // self.pool.page_size * self.pool.page_size
            pages = self.prefix.match(self._keys(tokens[:whole]))
            held.ids = list(tokens[: len(pages) * self.pool.page_size])
            held.table.adopt(pages, len(held.ids))
        held.chosen = list(tokens)
        held.rewind()

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One chain for each context."""
        return [
            self._chain(context, rows) for context, rows in zip(contexts, max_rows, strict=True)
        ]

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """Keep the K/V of what was chosen, drop the rest."""
        if (held := self.held.get(seq_id)) is not None:
            held.chosen.extend(accepted.tokens)
            held.rewind()

    def drop(self, seq_id: int) -> None:
        """Leave whole pages to whoever begins with the same ids."""
        if (held := self.held.pop(seq_id, None)) is None:
            return
        size = self.pool.page_size
        whole = len(held.ids) // size
        keys = [self._root, *self._keys(held.ids[: whole * size])]
        for index, page in enumerate(held.table.pages[:whole]):
            ids = held.ids[index * size : (index + 1) * size]
            self.prefix.insert(keys[index + 1], keys[index], page, ids, [False] * size)
        held.table.release()

    def _measure(self) -> float:
        held, times = Held(PageTable(self.pool), chosen=[0]), list[float]()
        for _ in range(1 + MEASURED):
            begun = perf_counter()
            self._logits(held, [0])
            times.append(1000 * (perf_counter() - begun))
            held.rewind()
        held.table.release()
        return median(times[1:])

    def _keys(self, ids: Sequence[int]) -> list[bytes]:
        return page_keys(self._root, ids, [False] * len(ids), self.pool.page_size)

    def _chain(self, context: DraftContext, max_rows: int) -> DraftTree:
        tokens, root = context.tokens, int(context.tokens[-1])
        most = min(max_rows - 1, MAX_DEPTH, self.limit - len(tokens))
        if most < 1:
            return DraftTree.root(root)
        held = self.held.get(context.seq_id)
        if held is None or held.chosen[-1] != root or len(held.chosen) != len(tokens):
            self.follow(context.seq_id, tokens)
            held = self.held[context.seq_id]
        ids, chance, bins = [root], [1.0], [0]
        try:
            self._catch_up(held)
            while len(ids) <= most and chance[-1] >= LEAST_CHANCE:
                logits = self._logits(held, [*held.chosen, *ids[1:]][len(held.ids) :])
                history = [*held.chosen, *ids[1:]] if context.sampler.edits_rows else ()
                choice = context.sampler.pick(logits, history, len(held.ids))
                ids.append(choice.token)
                chance.append(chance[-1] * (1.0 - 0.6 * math.exp(-choice.margin)))
                bins.append(1 + sum(choice.margin >= edge for edge in MARGINS))
        except OutOfPages:
            pass  # what was guessed so far stands
        parents = [0, *range(len(ids) - 1)]
        return DraftTree.of(ids, parents, chance, bins, self.name)

    def _catch_up(self, held: Held) -> None:
        """Put chosen ids in place until the rest fits one step, which also makes the first guess.

        In chunks, with whatever bits they have: a guess is checked, not believed.
        """
        while len(held.chosen) - len(held.ids) > self.model.max_step_rows:
            start = len(held.ids)
            first, size = self.model.chunk(start)
            stop = min(first + size, len(held.chosen) - 1)
            with held.table.reserve(stop - start) as rows:
                self.model.prefill(
                    held.chosen[start:stop],
                    first,
                    start,
                    rows.slots,
                    held.table.entries(),
                    self.pool,
                    chunk_rows=size,
                    want_logits=False,
                )
                rows.keep(range(stop - start))
            held.ids += held.chosen[start:stop]

    def _logits(self, held: Held, new: list[int]) -> npt.NDArray[np.float32]:
        """[V] behind the last of the ids that come next."""
        count, length = len(new), held.table.length
        with held.table.reserve(count) as rows:
            table = torch.tensor(held.table.pages, dtype=torch.int32)
            batch = ForwardBatch(
                tokens=np.array(new, np.int32),
                positions=np.arange(length, length + count, dtype=np.int32),
                slots=rows.slots,
                call=AttentionCall.of(table[None], [count], [length + count]),
                logit_rows=np.array([count - 1], np.int32),
            )
            logits = self.model.step(batch, self.pool).row(0)
            rows.keep(range(count))
        held.ids += new
        return logits


def expect_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise unless both give an id the same meaning. Rows behind the last real token do not count.

    Raises:
        ModelError: Names the first id that differs, and both texts.
    """
    if draft.tok_fp() == target.tok_fp():
        return
    for token in range(max(_real_ids(target), _real_ids(draft))):
        ours, theirs = target.token_text(token), draft.token_text(token)
        if ours != theirs:
            raise ModelError(
                f"The draft model has another tokenizer: id {token} is {_told(theirs)} there "
                f"and {_told(ours)} in the model.",
                hint="Choose a draft model of the same family with --draft-model.",
            )


def _real_ids(tokenizer: Tokenizer) -> int:
    """Ids up to the last one that is no padding: sizes of a family are padded differently."""
    count = tokenizer.vocab_size
    while count and PADDING.fullmatch(tokenizer.token_text(count - 1) or "[PAD0]"):
        count -= 1
    return count


def _told(text: str | None) -> str:
    return "missing" if text is None else repr(text)
