"""`hadamard.hadamard` of one head in a flat array: the same sums in the same order, the same bits.

Knows float32 arrays and places. Blocks of 16 channels or more are LLVM vectors, others a loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from chatkv.attention.jit import intrinsic, njit
from chatkv.attention.simd import FLOATS, LANES, WORDS, data_of, place_of


@intrinsic
def mix_vectors(_context: Any, x: Any, at: Any, other: Any) -> Any:
    """Sixteen floats at x[at:] and at x[other:] become their sums and their differences."""
    n = types.int64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = data_of(context, builder, signature, args, 0)
        places = [place_of(builder, base, place, FLOATS) for place in args[1:]]
        a, b = (builder.load(place, align=4) for place in places)
        builder.store(builder.fadd(a, b), places[0], align=4)
        builder.store(builder.fsub(a, b), places[1], align=4)
        return context.get_dummy_value()

    return types.void(x, n, n), codegen


@intrinsic
def mix_lanes(_context: Any, x: Any, at: Any) -> Any:
    """The same within sixteen floats at x[at:], for those 1, 2, 4 and 8 apart in turn."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = place_of(builder, data_of(context, builder, signature, args, 0), args[1], FLOATS)
        value = builder.load(place, align=4)
        for step in (1, 2, 4, 8):
            other = WORDS([lane ^ step for lane in range(LANES)])
            swapped = builder.shuffle_vector(value, value, other)
            sums, differences = builder.fadd(value, swapped), builder.fsub(swapped, value)
            lanes = WORDS([lane + (LANES if lane & step else 0) for lane in range(LANES)])
            value = builder.shuffle_vector(sums, differences, lanes)
        builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64), codegen


@njit
def _mix_by_vectors(x, at, half, block):
    stop = at + 2 * half
    for i in range(at, at + half, LANES):
        mix_vectors(x, i, half + i)
    for i in range(at, stop, LANES):
        mix_lanes(x, i)
    step = LANES
    while step < block:
        for first in range(at, stop, 2 * step):
            for i in range(first, first + step, LANES):
                mix_vectors(x, i, step + i)
        step *= 2


@njit
def _mix_by_ones(x, at, half, block):
    for i in range(at, at + half):
        x[i], x[half + i] = x[i] + x[half + i], x[i] - x[half + i]
    step = 1
    while step < block:
        for first in range(at, at + 2 * half, 2 * step):
            for i in range(first, first + step):
                x[i], x[step + i] = x[i] + x[step + i], x[i] - x[step + i]
        step *= 2


@njit
def multiply_head(x, at, half):
    """Multiply the head x[at:][:2 half], float32, in place."""
    block = half & -half
    if block < LANES:
        _mix_by_ones(x, at, half, block)
    else:
        _mix_by_vectors(x, at, half, block)
    norm = np.float32((2.0 * block) ** -0.5)
    for i in range(at, at + 2 * half):
        x[i] *= norm
