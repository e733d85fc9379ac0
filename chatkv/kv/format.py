"""How keys and values are stored in the pool: plain, or as codes with scales.

Knows names and sizes; no tensor. A code belongs to one row: what a row is stored as depends on that
row alone, so drafting, batching and resuming cannot change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chatkv.errors import ConfigError

CODE_BITS = {"int8": 8, "fp8": 8, "int4": 4}
"""Of a value in each quantised format."""
NAMES = ("bf16", *CODE_BITS)
GROUP = 32
"""Channels that share a scale in int4; in the others the whole head does."""
SCALE_BYTES = 2
CODED_KEYS = "hadamard-1"
"""How keys are changed before they are rounded: `attention/hadamard.py`. Part of the bits."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The format of a pool.

    Raises:
        ConfigError: An unknown name, or layers that cannot be kept.
    """

    name: str = "bf16"
    """`bf16` is the model's own dtype; `int8` and `fp8` have a float16 scale a token and head,
    `int4` one for 32 channels of it."""
    keep_layers: tuple[int, ...] = ()
    """Layers, counted from 1, that stay plain in a quantised pool."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(
                f"Unknown K/V format {self.name!r}.", hint=f"Use one of {', '.join(NAMES)}."
            )
        if any(layer < 1 for layer in self.keep_layers):
            raise ConfigError(
                f"keep_layers is {list(self.keep_layers)}.", hint="Layers are counted from 1."
            )
        if self.keep_layers and not self.is_quantised:
            raise ConfigError(
                "keep_layers means nothing with bf16 pages.", hint="Choose another kv.dtype too."
            )

    @property
    def is_quantised(self) -> bool:
        """Whether any layer has codes."""
        return self.name in CODE_BITS

    def plain_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers, counted from 0, that are stored plain.

        Raises:
            ConfigError: `keep_layers` names one that the model lacks, or leaves none to quantise.
        """
        if not self.is_quantised:
            return tuple(range(num_layers))
        kept = tuple(sorted({layer - 1 for layer in self.keep_layers}))
        if kept and kept[-1] >= num_layers:
            raise ConfigError(
                f"keep_layers names layer {kept[-1] + 1} of {num_layers}.",
                hint=f"Use numbers from 1 to {num_layers}.",
            )
        if len(kept) == num_layers:
            raise ConfigError("keep_layers names every layer.", hint="Use kv.dtype bf16.")
        return kept

    def code_columns(self, head_dim: int) -> int:
        """Columns of a row of codes."""
        return head_dim * CODE_BITS[self.name] // 8

    def scale_columns(self, head_dim: int) -> int:
        """Scales of a row."""
        return head_dim // GROUP if self.name == "int4" else 1

    def token_bytes(
        self, num_layers: int, num_kv_heads: int, head_dim: int, plain_bytes: int
    ) -> int:
        """What the rows of one token take, all layers, keys and values.

        Args:
            plain_bytes: Of a value in a layer that is stored plain.
        """
        plain = len(self.plain_layers(num_layers))
        row = head_dim * plain_bytes
        total = plain * row
        if self.is_quantised:
            coded = self.code_columns(head_dim) + SCALE_BYTES * self.scale_columns(head_dim)
            total += (num_layers - plain) * coded
        return 2 * num_kv_heads * total

    def identity(self, about: Mapping[str, object], plain_bytes: int) -> dict[str, object]:
        """`about`, the identity of a model with plain pages, with this format in it."""
        if not self.is_quantised:
            return {**about}
        layers, heads, dim = (int(str(about[key])) for key in ("layers", "kv_heads", "head_dim"))
        return {
            **about,
            "pool_dtype": self.name,
            "token_bytes": self.token_bytes(layers, heads, dim, plain_bytes),
            "coded_keys": CODED_KEYS,
            "keep_layers": [layer + 1 for layer in self.plain_layers(layers)],
        }


PLAIN = KVFormat()
