"""What changes a row of logits before a token is chosen: bias, penalties, grammar.

Single float32 operations in a fixed order on a copy, so that equal rows and equal ids give equal
bits, wherever the row was computed and however the ids were guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chatkv.noise import FloatArray
from chatkv.sampling import Constraint, SamplingParams
from chatkv.sampling_plain import check

FORBIDDEN = np.float32(-np.inf)


class RowEdits:
    """The edits of one reply. Pure: nothing is counted from one row to the next.

    Args:
        params: Settings of the reply.
        prompt: All ids before the reply.
        grammar: `params.grammar`, compiled.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], grammar: Constraint | None
    ) -> None:
        self._grammar = grammar
        self._prompt = np.unique(np.array(prompt, np.int64))
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)

    def apply(self, logits: FloatArray, reply: Sequence[int]) -> FloatArray:
        """A copy of a row with all edits.

        Args:
            logits: [V] float32. Not modified.
            reply: Ids of the reply before the token that is being chosen.

        Raises:
            ModelError: A logit is NaN, or the best one is infinite.
        """
        check(float(logits.max()))  # a NaN must not hide behind the grammar
        row = logits.copy()
        row[self._biased] += self._bias
        tokens, counts = np.unique(np.array(reply, np.int64), return_counts=True)
        if self._repetition != 1:
            seen = np.concatenate([self._prompt, tokens])
            was = row[seen]
            row[seen] = np.where(was < 0, was * self._repetition, was / self._repetition)
        if self._frequency:
            row[tokens] -= self._frequency * counts.astype(np.float32)
        if self._presence:
            row[tokens] -= self._presence
        allowed = None if self._grammar is None else self._grammar.mask(reply)
        if allowed is not None:
            row[: len(allowed)][~allowed[: len(row)]] = FORBIDDEN
            row[len(allowed) :] = FORBIDDEN
        return row
