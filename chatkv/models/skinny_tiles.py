"""How products of a step are cut into programs: rules from shapes. Knows numbers, no tensors.

Read off `python -m benchmarks.gpu_linear` on an H200: enough programs for all multiprocessors, and
per program as many bytes in flight as the latency of memory asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE_WEIGHTS = 64
"""16-bit weights of one line of the cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is put on the device. `k` and `split` are part of the bits."""

    n: int
    """Weight rows of a program (of each of the two halves where there are two)."""
    k: int
    """Inner dimension of a turn."""
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    """Inner dimension that is asked for before the rows are there; a power of two of lines."""
    split: int = 1
    """Parts of the inner dimension, each a program's; their results are added in order."""


def residual_columns(width: int) -> int:
    """Weight rows of a program that adds to a residual of that width."""
    return 16 if width <= 2048 else 32


def residual_blocks(width: int) -> int:
    """P of `Scaled.squares`: how many programs write a residual of that width."""
    return -(-width // residual_columns(width))


def residual_tile(outputs: int, inputs: int) -> Tile:
    """The rule of `add_project`."""
    return Tile(
        residual_columns(outputs),
        _turn(inputs, 256 if inputs >= 1024 else 64),
        warps=2,
        stages=7,
        ahead=_ahead(inputs, 1024),
    )


def split_tile(outputs: int, inputs: int) -> Tile:
    """The rule of `project_parts`: rows are read by every program, so programs are few and wide."""
    k = _turn(inputs, 128)
    split = 1
    while split < 8 and outputs // 64 * split < 120 and inputs % (2 * split * k) == 0:
        split *= 2
    return Tile(64, k, stages=8, ahead=_ahead(inputs // split, 512), split=split)


def pair_tile(outputs: int, inputs: int) -> Tile:
    """The rule of products with two halves, of so many weight rows each."""
    if inputs <= 1024:
        return Tile(32, _turn(inputs, 64), stages=10, ahead=_ahead(inputs, 512))
    if outputs // 64 >= 90:
        return Tile(64, _turn(inputs, 64), stages=8, ahead=_ahead(inputs, 512))
    n = 32 if outputs // 32 >= 90 else 16
    return Tile(n, _turn(inputs, 128), stages=8, ahead=_ahead(inputs, 512))


def single_tile(outputs: int, inputs: int) -> Tile:
    """The rule of `project`."""
    n = next((n for n in (64, 32) if outputs // n >= 90), 16)
    k = _turn(inputs, 64 if inputs <= 1024 else 128)
    return Tile(n, k, stages=7 if k < 128 else 4, ahead=_ahead(inputs, 512))


def _turn(inputs: int, most: int) -> int:
    """The longest turn up to `most` that divides the inner dimension."""
    return next(k for k in (256, 128, 64, 32, 16) if k <= most and inputs % k == 0)


def _ahead(inputs: int, most: int) -> int:
    """A power of two of lines up to `most`, and no more than there are."""
    ahead = min(most, 1 << (inputs.bit_length() - 1))
    return ahead if ahead >= LINE_WEIGHTS else 0
