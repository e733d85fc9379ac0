"""Linear layers over packed weights. Knows tiles and rows; no model and no attention.

A row is int16 codes with a float scale per 32 inputs (`layers.quantise_row`), which loses less than
bfloat16 would; sums of products are exact integers. Rows are an inner loop over a few tiles, each
with its own sums: any number of rows gives each row the same bits, and threads share out tiles.
"""

# pyright: reportCallIssue=false
# The checker takes numba's intrinsics for the functions that generate their code.

from __future__ import annotations

import numba
import numpy as np

from chatkv.attention.jit import njit, prange
from chatkv.models.lanes import TILES, call_address, tile_kernel
from chatkv.models.packing import Q4_GROUP_BYTES, Q8_GROUP_BYTES, group_bytes
from chatkv.models.weights import Matrix

NUMERICS = "int16-rows-1"
"""Part of the model's identity: another way to round rows or add sums needs another number."""

_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"
_q4_1, _q4_2, _q4_3, _q4_4, _q4_6, _q4_8 = (tile_kernel("q4", n, TILES) for n in (1, 2, 3, 4, 6, 8))
_q8_1, _q8_2, _q8_3, _q8_4, _q8_6, _q8_8 = (tile_kernel("q8", n, TILES) for n in (1, 2, 3, 4, 6, 8))
_q4_last, _q8_last = tile_kernel("q4", 1), tile_kernel("q8", 1)


@njit(inline="always")
def _skip(count, rows, groups, codes, scales, out, width):
    """Behind `count` rows: int16 codes, two float32 scales a group, float32 outputs."""
    codes += count * groups * 64
    scales += count * groups * 8
    return rows - count, codes, scales, out + count * width * 4


@njit
def _some_q4(weights, groups, codes, scales, rows, out, width, add):
    """TILES tiles for any number of rows. Arguments as in `lanes.tile_kernel`."""
    while rows >= 8:
        _q4_8(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(8, rows, groups, codes, scales, out, width)
    if rows >= 6:
        _q4_6(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(6, rows, groups, codes, scales, out, width)
    elif rows >= 4:
        _q4_4(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(4, rows, groups, codes, scales, out, width)
    if rows == 3:
        _q4_3(weights, groups, codes, scales, out, width, add)
    elif rows == 2:
        _q4_2(weights, groups, codes, scales, out, width, add)
    elif rows == 1:
        _q4_1(weights, groups, codes, scales, out, width, add)


@numba.cfunc(_SIGNATURE, cache=True)
def _tiles_q4(weights, tiles, groups, codes, scales, rows, out, width, add):
    """The same for any number of tiles side by side."""
    size = groups * Q4_GROUP_BYTES
    while tiles >= TILES:
        _some_q4(weights, groups, codes, scales, rows, out, width, add)
        tiles, weights, out = tiles - TILES, weights + TILES * size, out + TILES * 64
    while tiles and rows:
        _q4_last(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(1, rows, groups, codes, scales, out, width)


@njit
def _some_q8(weights, groups, codes, scales, rows, out, width, add):
    while rows >= 8:
        _q8_8(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(8, rows, groups, codes, scales, out, width)
    if rows >= 6:
        _q8_6(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(6, rows, groups, codes, scales, out, width)
    elif rows >= 4:
        _q8_4(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(4, rows, groups, codes, scales, out, width)
    if rows == 3:
        _q8_3(weights, groups, codes, scales, out, width, add)
    elif rows == 2:
        _q8_2(weights, groups, codes, scales, out, width, add)
    elif rows == 1:
        _q8_1(weights, groups, codes, scales, out, width, add)


@numba.cfunc(_SIGNATURE, cache=True)
def _tiles_q8(weights, tiles, groups, codes, scales, rows, out, width, add):
    size = groups * Q8_GROUP_BYTES
    while tiles >= TILES:
        _some_q8(weights, groups, codes, scales, rows, out, width, add)
        tiles, weights, out = tiles - TILES, weights + TILES * size, out + TILES * 64
    while tiles and rows:
        _q8_last(weights, groups, codes, scales, out, width, add)
        rows, codes, scales, out = _skip(1, rows, groups, codes, scales, out, width)


def describe(matrix: Matrix) -> list[int]:
    """What the kernels read of a matrix: kernel address, offset, tiles, groups, bytes of a tile."""
    address = {"q4": _tiles_q4, "q8": _tiles_q8}[matrix.kind].address
    assert address is not None, "cfunc compiles when it is defined"
    groups = matrix.inputs // 32
    size = groups * group_bytes(matrix.kind)
    return [address, matrix.offset, matrix.outputs // 16, groups, size]


@njit
def tile_rows(weights, matrix, start, stop, codes, scales, first, rows, out, add):
    """Tiles start..stop of outputs for rows first..first + rows: out[r, 16 start : 16 stop].

    Args:
        weights: uint8 [bytes], 64-byte aligned.
        matrix: int64 [5] of `describe`.
        codes: [T, K] int16. scales: [T, K / 32, 2] float32 (scale, scale * sum of codes).
        out: [T, N] float32. add: 1 adds to what is there, 0 replaces it.
    """
    groups, width = matrix[3], out.shape[1]
    call_address(
        matrix[0], weights.ctypes.data + matrix[1] + start * matrix[4], stop - start, groups,
        codes.ctypes.data + first * groups * 64, scales.ctypes.data + first * groups * 8,
        rows, out.ctypes.data + (first * width + 16 * start) * 4, width, add,
    )  # fmt: skip


@njit
def share_rows(weights, matrix, worker, workers, codes, scales, rows, out, add):
    """All rows 0..rows for the tiles that fall to one worker, an even number but for the last."""
    start, stop = share((matrix[2] + 1) // 2, worker, workers)
    stop = min(2 * stop, matrix[2])
    tile_rows(weights, matrix, 2 * start, stop, codes, scales, 0, rows, out, add)


@njit(inline="always")
def share(count, worker, workers):
    """[start, stop) of `count` things that fall to this worker."""
    return count * worker // workers, count * (worker + 1) // workers


@njit(
    "void(uint8[::1], int64[::1], int64, int16[:,::1], float32[:,:,::1], int64, float32[:,::1])",
    parallel=True,
)
def linear(weights, matrix, workers, codes, scales, rows, out):
    """out[:rows] = rows of codes times the matrix, [T, N] float32. Arguments as in `tile_rows`."""
    for worker in prange(workers):
        share_rows(weights, matrix, worker, workers, codes, scales, rows, out, 0)


def linear_plain(dense: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same from exact weights [N, K] float32, in float64: [T, N]."""
    rows = codes.reshape(*scales.shape[:2], 32) * scales[:, :, :1].astype(np.float64)
    return rows.reshape(codes.shape) @ dense.T.astype(np.float64)
