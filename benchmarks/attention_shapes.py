"""Shapes of the attention benchmark: those the launch rule was tuned on, and others held out."""

from __future__ import annotations

from dataclasses import dataclass

HEADS = {
    "llama-3-8b": (32, 8, 128),
    "llama-2-70b": (64, 8, 128),
    "smollm2-135m": (9, 3, 64),
    "qwen3-1.7b": (16, 8, 128),
    "llama-2-7b": (32, 32, 128),
    "qwen2.5-0.5b": (14, 2, 64),
}
"""Query heads, kv heads, head size."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Some sequences of one model with a tree of `rows` each."""

    model: str
    lengths: tuple[int, ...]
    rows: int

    @property
    def name(self) -> str:
        """As in the tables of the design."""
        longest = max(self.lengths)
        mixed = "" if len(set(self.lengths)) == 1 else " mixed"
        return f"{self.model} B{len(self.lengths)} {longest} T{self.rows}{mixed}"

    @property
    def group_rows(self) -> int:
        """Rows times query heads of one kv head."""
        heads, kv_heads, _ = HEADS[self.model]
        return self.rows * heads // kv_heads

    @property
    def num_bytes(self) -> int:
        """Of keys and values in bfloat16."""
        _, kv_heads, dim = HEADS[self.model]
        return sum(self.lengths) * kv_heads * dim * 4


def _even(model: str, batch: int, length: int, rows: int) -> Shape:
    return Shape(model, (length,) * batch, rows)


TUNED = [
    _even(model, batch, length, rows)
    for model, batch, length, rows in [
        ("llama-3-8b", 1, 1024, 16),
        ("llama-3-8b", 1, 4096, 1),
        ("llama-3-8b", 1, 4096, 16),
        ("llama-3-8b", 1, 16384, 16),
        ("llama-3-8b", 1, 65536, 16),
        ("llama-3-8b", 8, 4096, 16),
        ("llama-3-8b", 8, 16384, 1),
        ("llama-3-8b", 8, 16384, 16),
        ("llama-3-8b", 8, 65536, 16),
        ("llama-3-8b", 8, 16384, 64),
        ("llama-2-70b", 8, 16384, 16),
        ("smollm2-135m", 1, 4096, 16),
    ]
]
HELD_OUT = [
    _even("llama-3-8b", 1, 3001, 5),
    _even("llama-3-8b", 1, 10007, 12),
    _even("llama-3-8b", 1, 30011, 16),
    _even("llama-3-8b", 1, 6007, 1),
    Shape("llama-3-8b", (5003, 1301, 3307, 7001, 2111), 12),
    Shape("llama-3-8b", (2003, 8009, 14009, 4001, 9001, 20011, 6007, 12007), 16),
    _even("llama-3-8b", 8, 6007, 5),
    _even("llama-3-8b", 8, 5003, 1),
    _even("llama-3-8b", 3, 24007, 12),
    _even("llama-3-8b", 16, 9001, 12),
    _even("llama-2-70b", 1, 7001, 5),
    _even("llama-2-70b", 4, 6007, 8),
    _even("qwen3-1.7b", 1, 5003, 24),
    _even("qwen3-1.7b", 4, 9001, 24),
    _even("qwen3-1.7b", 1, 20011, 12),
    _even("llama-2-7b", 1, 4001, 24),
    _even("llama-2-7b", 2, 2999, 12),
    _even("smollm2-135m", 1, 1501, 5),
    _even("smollm2-135m", 1, 7001, 12),
    _even("smollm2-135m", 8, 3001, 12),
    _even("qwen2.5-0.5b", 1, 6007, 5),
    _even("llama-3-8b", 1, 12007, 48),
    _even("llama-3-8b", 4, 7001, 32),
    _even("llama-2-70b", 2, 9001, 12),
]

SLOW = [
    *(shape for shape in TUNED if shape.rows > 1),
    *(shape for shape in HELD_OUT if shape.rows > 1 and max(shape.lengths) < 13000),
]
"""Measured against peers that must be compiled."""

# One H200, bfloat16, microseconds: a one-call tree kernel; a history kernel with LSE, a tree
# part and their merge, as measured before this code was written, on pages of 16.
QUOTED = {
    "llama-3-8b B1 4096 T16": {"FlashInfer tree": 22.4, "FA3 two-call": 25.0, "FA3 chain": 16.1},
    "llama-3-8b B1 16384 T16": {"FlashInfer tree": 54.8, "FA3 two-call": 40.0, "FA3 chain": 29.6},
    "llama-3-8b B1 65536 T16": {"FlashInfer tree": 176.8, "FA3 two-call": 88.7, "FA3 chain": 76.6},
    "llama-3-8b B8 4096 T16": {"FlashInfer tree": 108.5, "FA3 two-call": 60.4, "FA3 chain": 45.4},
    "llama-3-8b B8 16384 T16": {
        "FlashInfer tree": 352.2,
        "FA3 two-call": 151.8,
        "FA3 chain": 136.5,
    },
    "llama-3-8b B8 65536 T16": {
        "FlashInfer tree": 1315.9,
        "FA3 two-call": 517.3,
        "FA3 chain": 494.8,
    },
    "llama-3-8b B8 16384 T64": {
        "FlashInfer tree": 1211.1,
        "FA3 two-call": 276.8,
        "FA3 chain": 232.6,
    },
    "llama-2-70b B8 16384 T16": {
        "FlashInfer tree": 630.1,
        "FA3 two-call": 173.8,
        "FA3 chain": 144.5,
    },
    "smollm2-135m B1 4096 T16": {"FlashInfer tree": 15.6, "FA3 two-call": 20.2, "FA3 chain": 13.9},
}
