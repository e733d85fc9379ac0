"""Choosing a token, in plain numpy: the definition that `sampling_cpu.py` must equal.

Everything the choice depends on is either an integer or a single float32 operation. Top-p adds up
integer weights, so the order of the sum cannot matter.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from chatkv.errors import ModelError
from chatkv.noise import FloatArray, gumbel, horner

WEIGHT_BITS = 30
"""The most probable token weighs 2**30; a token of less than 2**-30 of that weighs nothing."""
FAR = np.float32(-30.0)
"""Distance from the best logit (over T) at which the weight is surely 0."""
LOG2_E = np.float32(math.log2(math.e))
EXP2 = np.array([math.log(2) ** k / math.factorial(k) for k in range(7)], dtype=np.float32)
"""2**f on [-0.5, 0.5], constant term first; relative error 2e-7."""


def weights(distance: FloatArray) -> npt.NDArray[np.int64]:
    """floor(exp(distance) * 2**30), up to a relative 1e-6.

    Args:
        distance: [K] float32, not above 0: logit over T minus the best one.
    """
    y = np.maximum(distance, FAR) * LOG2_E
    n = (y - np.float32(0.5)).astype(np.int32)
    power = horner(y - n.astype(np.float32), EXP2)
    scale = ((n + (WEIGHT_BITS + 127)) << 23).astype(np.int32).view(np.float32)
    return (power * scale).astype(np.int64)


def check(best: float) -> None:
    """Raise unless the best logit is a number."""
    if not math.isfinite(best):
        raise ModelError(
            f"The model's logits are not numbers: the best one is {best}.",
            hint="The weights may be damaged: run `chatkv models pull` again, or report a bug.",
        )


def pick_plain(
    logits: FloatArray,
    position: int,
    *,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[int, float]:
    """The token with the highest score, the lowest id among equals, and its margin.

    Filters in this order: temperature, top-k, top-p, min-p. Rank is by logit, then by lower id.
    Top-p keeps a token while the weight of those ranked before it is below `top_p` of the total
    of the tokens that top-k left.

    Args:
        logits: [V] float32. -inf forbids a token.
        position: Absolute index of the token being chosen.

    Returns:
        (token, best score minus second best; inf when one token is left).

    Raises:
        ModelError: A logit is NaN, or the best one is infinite.
    """
    best = float("nan") if np.isnan(logits).any() else float(logits.max())
    check(best)
    kept = np.arange(len(logits))
    if temperature == 0:
        scores = logits
    else:
        inv_t = np.float32(1.0 / temperature)
        with np.errstate(over="ignore"):
            scaled = logits * inv_t
        best = scaled.max()
        check(best)
        kept = np.argsort(-logits, kind="stable")
        if top_k:
            kept = kept[:top_k]
        distance = scaled[kept] - best
        keep = np.ones(len(kept), dtype=bool)
        if top_p < 1:
            weight = weights(distance)
            keep &= np.cumsum(weight) - weight < top_p * float(weight.sum())
        if min_p > 0:
            keep &= distance >= np.float32(math.log(min_p))
        kept = kept[keep]
        scores = scaled[kept] + gumbel(seed, position, kept)
    top = scores.max()
    token = int(kept[scores == top].min())
    others = scores[kept != token]
    margin = float(top - others.max()) if others.size else math.inf
    return token, margin
