"""Packed tiles hold the very weights of the file."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from chatkv.models.packing import KINDS, pack, packed_bytes, unpack


def blocks(tensor_type: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    return gguf.quantize(values, getattr(gguf.GGMLQuantizationType, tensor_type))


@pytest.mark.parametrize("tensor_type", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (960, 576)])
def test_unpacking_gives_the_weights_of_the_file(tensor_type, outputs, inputs):
    raw = blocks(tensor_type, outputs, inputs)
    packed = pack(tensor_type, raw)
    expected = gguf.dequantize(raw, getattr(gguf.GGMLQuantizationType, tensor_type))
    assert packed.nbytes == packed_bytes(KINDS[tensor_type], outputs, inputs)
    np.testing.assert_array_equal(unpack(KINDS[tensor_type], packed), expected)


def test_what_tiles_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        pack("Q4_1", blocks("Q4_1", 24, 64))
    with pytest.raises(ValueError, match="whole"):
        pack("Q8_0", blocks("Q8_0", 16, 64)[:, :-3])
    broken = blocks("Q8_0", 16, 64)
    broken[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not finite"):
        pack("Q8_0", broken)
