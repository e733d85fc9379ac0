"""The tile format of the linear layers: GGUF blocks in, bytes the kernels stream out, and back.

Knows quantised blocks of 32 weights. Knows no file and no model; numpy only.

A matrix [N, K] becomes N / 16 tiles one after another; a tile is K / 32 groups one after another; a
group holds the codes of 16 outputs x 32 inputs, then their scales, 16 of float16 each:

    q4   4 x [16 lanes, 4 bytes] codes 0..15, then d, then m: weight = d * code + m        320 bytes
         Lane o of quarter c is a little-endian uint32 of 8 nibbles; nibble i is input 8 c + 2 i,
         nibble i + 4 is input 8 c + 2 i + 1.
    q8   16 x [16 lanes, 2 bytes] codes -128..127, then d: weight = d * code               544 bytes
         Lane o of pair p is inputs 2 p and 2 p + 1.

Codes and scales are those of the file, moved and never changed. (Q4_0 is d * (code - 8), so m is
-8 d, which is exact in float16.)
"""

from __future__ import annotations

import numpy as np

Q4_GROUP_BYTES = 320
Q8_GROUP_BYTES = 544
KINDS = {"Q4_0": "q4", "Q4_1": "q4", "Q8_0": "q8"}
"""Which kernel runs a GGUF tensor type."""


def group_bytes(kind: str) -> int:
    """Bytes of one group of a tile."""
    return Q4_GROUP_BYTES if kind == "q4" else Q8_GROUP_BYTES


def packed_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of a packed matrix [outputs, inputs]."""
    return outputs // 16 * (inputs // 32) * group_bytes(kind)


def pack(tensor_type: str, raw: np.ndarray) -> np.ndarray:
    """Pack GGUF blocks.

    Args:
        tensor_type: `Q4_0`, `Q4_1` or `Q8_0`.
        raw: [N, bytes of K / 32 blocks] uint8. N is a multiple of 16.

    Returns:
        [N / 16, K / 32, bytes of a group] uint8.

    Raises:
        ValueError: A shape the tiles cannot hold, or a scale that is not finite.
    """
    if raw.shape[0] % 16:
        raise ValueError(f"{raw.shape[0]} outputs are not a multiple of 16")
    codes, scales = _split(tensor_type, raw)
    if not all(np.isfinite(s).all() for s in scales):
        raise ValueError("a scale is not finite")
    tiles, blocks = raw.shape[0] // 16, codes.shape[1]
    out = np.empty((tiles, blocks, group_bytes(KINDS[tensor_type])), np.uint8)
    lanes = codes.reshape(tiles, 16, blocks, 32).transpose(0, 2, 3, 1)  # [tiles, blocks, 32, 16]
    if KINDS[tensor_type] == "q4":
        nibbles = lanes.reshape(tiles, blocks, 4, 4, 2, 16).astype(np.uint32)
        packed = np.zeros((tiles, blocks, 4, 16), np.uint32)
        for i in range(4):
            packed |= nibbles[:, :, :, i, 0] << np.uint32(4 * i)
            packed |= nibbles[:, :, :, i, 1] << np.uint32(4 * i + 16)
        body = packed.astype("<u4").view(np.uint8).reshape(tiles, blocks, 256)
    else:
        pairs = lanes.reshape(tiles, blocks, 16, 2, 16).swapaxes(3, 4)
        body = np.ascontiguousarray(pairs).view(np.uint8).reshape(tiles, blocks, 512)
    out[:, :, : body.shape[-1]] = body
    for i, scale in enumerate(scales):
        at = body.shape[-1] + 32 * i
        lanes = scale.reshape(tiles, 16, blocks).swapaxes(1, 2)
        out[:, :, at : at + 32] = np.ascontiguousarray(lanes.astype("<f2")).view(np.uint8)
    return out


def unpack(kind: str, packed: np.ndarray) -> np.ndarray:
    """The exact weights [N, K], float32, of `pack`'s bytes [N / 16, K / 32, bytes of a group]."""
    tiles, blocks, _ = packed.shape
    if kind == "q4":
        lanes = np.ascontiguousarray(packed[:, :, :256]).view("<u4").reshape(tiles, blocks, 4, 16)
        shifts = np.array([[4 * i, 4 * i + 16] for i in range(4)], np.uint32).reshape(8)
        codes = lanes[:, :, :, None] >> shifts[None, None, None, :, None] & np.uint32(15)
        codes, scales_at = codes.reshape(tiles, blocks, 32, 16), 256
    else:
        pairs = np.ascontiguousarray(packed[:, :, :512]).view(np.int8)
        codes = pairs.reshape(tiles, blocks, 16, 16, 2).swapaxes(3, 4)
        codes, scales_at = codes.reshape(tiles, blocks, 32, 16), 512
    scale = _lane_scales(packed, scales_at)
    weights = codes.astype(np.float32) * scale
    if kind == "q4":
        weights += _lane_scales(packed, 288)
    return weights.transpose(0, 3, 1, 2).reshape(tiles * 16, blocks * 32)


def _lane_scales(packed: np.ndarray, at: int) -> np.ndarray:
    halves = np.ascontiguousarray(packed[:, :, at : at + 32]).view("<f2")
    return halves.astype(np.float32)[:, :, None, :]


def _split(tensor_type: str, raw: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Codes [N, K / 32, 32] and scales, each [N, K / 32] float16, of GGUF blocks."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    if raw.shape[1] % sizes[tensor_type]:
        raise ValueError(f"{raw.shape[1]} bytes are no whole {tensor_type} blocks")
    blocks = raw.reshape(raw.shape[0], -1, sizes[tensor_type])
    d = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[..., 0]
    if tensor_type == "Q8_0":
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8), [d]
    nibbles = blocks[:, :, -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    if tensor_type == "Q4_1":
        return codes, [d, np.ascontiguousarray(blocks[:, :, 2:4]).view("<f2")[..., 0]]
    return codes, [d, d * np.float16(-8)]
