"""Random weights as a CPU runs them: tiles of Q8_0, in the place of a converted file.

Knows a shape and a seed. Only models that take the tokenizer of another are made: that is what a
draft model for tests needs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import numpy as np

from chatkv.models.packing import pack
from chatkv.models.random_model import lender, random_spec
from chatkv.models.weights import Matrix, Weights


def random_packed(name: str) -> Weights | None:
    """Weights of spread 1 / sqrt(inputs), norms around 1; None for a name of another kind.

    Raises:
        UnknownModel: No such model.
        BadWeights: The one whose tokenizer is taken cannot be read.
    """
    spec, seed = random_spec(name)
    if (model := lender(name)) is None:
        return None
    random = np.random.default_rng(seed)
    parts: list[np.ndarray] = []

    def matrix(outputs: int, inputs: int, spread: float = 1.0) -> Matrix:
        values = random.standard_normal((outputs, inputs), np.float32)
        values *= spread / math.sqrt(inputs)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        start = sum(map(len, parts))
        parts.append(pack("Q8_0", raw).reshape(-1))
        return Matrix("q8", start, outputs, inputs)

    hidden, wide = spec.hidden_size, spec.num_heads * spec.head_dim
    layers = tuple(
        {
            "qkv": matrix(wide + 2 * spec.num_kv_heads * spec.head_dim, hidden),
            "o": matrix(hidden, wide),
            "gate_up": matrix(2 * spec.intermediate_size, hidden),
            "down": matrix(hidden, spec.intermediate_size),
        }
        for _ in range(spec.num_layers)
    )
    vocabulary = matrix(spec.vocab_size, hidden, 3.0)
    norms = 1 + 0.1 * random.standard_normal((2 * spec.num_layers + 1, hidden), np.float32)
    room = np.empty(sum(map(len, parts)) + 64, np.uint8)
    data = room[-room.ctypes.data % 64 :][: len(room) - 64]
    np.concatenate(parts, out=data)
    spec = replace(spec, weights_digest=f"{spec.name} packed 1")
    return Weights(spec, data, layers, vocabulary, vocabulary, norms, model.folder)
