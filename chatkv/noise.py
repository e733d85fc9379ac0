"""Counter noise in numpy: the definition. Knows seeds, positions and token ids; no logits.

The noise of a token is a pure function of (seed, position, token, stream): Philox4x32-10
(Salmon et al. 2011) gives two words, polynomials turn them into one standard Gumbel number. Only
integers and single IEEE float32 operations are used, so every device gives the same bits; library
logarithms do not. `sampling_cpu.py` holds the compiled twin.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

WordArray: TypeAlias = npt.NDArray[np.uint32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

STREAM_TOKEN = 0
"""The choice of a token. Streams never feed each other."""
STREAM_DRAFT = 2
"""A drafter's own coins."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def float32_of(bits: tuple[int, ...]) -> FloatArray:
    """float32 numbers from their bits."""
    return np.array(bits, dtype=np.uint32).view(np.float32)


LN2 = float32_of((0x3F317218,))[0]
# fmt: off
# -ln(1 - t) / t on (0, 0.5], and ln(1 + r) / r around 0; constant term first.
A = float32_of((
    0x3F800000, 0x3EFFFFF7, 0x3EAAAD59, 0x3E7F5EC7, 0x3E5670E9, 0x3DAB0082,
    0x3F17FD27, 0xBFB414D2, 0x405482C4, 0xC0703A7B, 0x400D9542,
))
B = float32_of((
    0x3F800000, 0xBEFFFFFC, 0x3EAAAAA8, 0xBE800214, 0x3E4CD23C,
    0xBE2A13D1, 0x3E11342E, 0xBE079626, 0x3E043E11, 0xBD9C70B4,
))
# fmt: on
SQRT_HALF_BITS = 0x3F3504F3

GUMBEL_MAX = np.float32(18.05)
"""No noise is above this (the largest is 18.03)."""
GUMBEL_MIN = np.float32(-2.87)
"""No noise is below this (the smallest is -2.86)."""


def philox(counter: npt.NDArray[np.uint64], seed: int) -> WordArray:
    """[4, K] words of Philox4x32-10.

    Args:
        counter: [4, K] uint64, each below 2**32.
        seed: 64 bits; the low half is the first key word.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = seed & WORD, seed >> 32
    for _ in range(ROUNDS):
        low, high = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (high >> np.uint64(32)) ^ c1 ^ np.uint64(key0),
            high & np.uint64(WORD),
            (low >> np.uint64(32)) ^ c3 ^ np.uint64(key1),
            low & np.uint64(WORD),
        )
        key0, key1 = (key0 + WEYL[0]) & WORD, (key1 + WEYL[1]) & WORD
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def horner(x: FloatArray, coefficients: FloatArray) -> FloatArray:
    """Polynomial in float32, every multiply and add rounded on its own."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def gumbel_of(r0: WordArray, r1: WordArray) -> FloatArray:
    """Two random words -> one standard Gumbel number between -2.86 and 18.03."""
    top = (r0 >> np.uint32(8)).astype(np.float32)
    k = np.minimum(24, 23 - ((top.view(np.int32) >> 23) - 127)).astype(np.float32)
    t = ((r1 >> np.uint32(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-25)
    e = k * LN2 + t * horner(t, A)
    bits = e.view(np.int32)
    n = (bits - SQRT_HALF_BITS) >> 23
    r = (bits - (n << 23)).astype(np.int32).view(np.float32) - np.float32(1)
    return -(n.astype(np.float32) * LN2 + r * horner(r, B))


def gumbel(
    seed: int, position: int, token_ids: npt.ArrayLike, stream: int = STREAM_TOKEN
) -> FloatArray:
    """Noise of some tokens at one position.

    Args:
        seed: 64 bits.
        position: Absolute index of the token being chosen.
        token_ids: [K] integers.

    Returns:
        [K] float32.
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    counter = np.zeros((4, ids.size), dtype=np.uint64)
    counter[0], counter[1], counter[2] = ids, position, stream
    words = philox(counter, seed)
    return gumbel_of(words[0], words[1])
