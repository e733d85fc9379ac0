"""What a model is, in numbers. Knows no file format and no tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and numerics of a decoder of the Llama family."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_limit: int
    """Tokens the model was trained for."""
    rope_theta: float
    norm_eps: float
    eos_ids: tuple[int, ...]
    weights_digest: str
    """SHA-256 over the quantised content of all tensors, hex."""
    rope_factors: tuple[float, ...] = ()
    """Divisors of the rotary frequencies, [head_dim / 2]; empty when there are none."""
    windows: tuple[int | None, ...] = ()
    """Of each layer: a row sees keys whose position is above its own less this, or all where it is
    None. Empty when every layer sees all."""
    numerics: str = ""
    """Name and version of the linear kernels and formats: a change is a change of bits."""

    @property
    def rope_frequencies(self) -> npt.NDArray[np.float64]:
        """[head_dim / 2] radians a position turns channel pairs (i, i + head_dim / 2) by."""
        steps = np.arange(0, self.head_dim, 2, dtype=np.float64)
        frequencies = self.rope_theta ** (-steps / self.head_dim)
        return frequencies / np.array(self.rope_factors or 1.0, np.float64)

    @property
    def widest_window(self) -> int | None:
        """Positions behind which no layer sees anything; None where some layer sees all."""
        known = [window for window in self.windows if window is not None]
        return max(known) if known and len(known) == len(self.windows) else None

    def window(self, layer: int) -> int | None:
        """Of one layer, counted from 0."""
        return self.windows[layer] if self.windows else None

    @property
    def no_rebase(self) -> str:
        """What forbids to move the positions of stored keys; empty if nothing does."""
        return "sliding-window layers" if self.windows else ""

    @property
    def parameters(self) -> int:
        """Weights, about: its matrices."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = self.hidden_size * (heads + self.num_heads * self.head_dim)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def identity(self, page_tokens: int, backend: str) -> dict[str, object]:
        """What a stored page depends on, for the fingerprint. Floats as hex strings.

        Args:
            page_tokens: Tokens a page holds.
            backend: The attention backend with mode and numerics version.
        """
        windows = {"windows": list(self.windows)} if self.windows else {}
        return {
            **windows,
            "architecture": self.architecture,
            "weights": self.weights_digest,
            "layers": self.num_layers,
            "hidden": self.hidden_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "norm_eps": float(self.norm_eps).hex(),
            "rope": "half-split",
            "rope_theta": float(self.rope_theta).hex(),
            "rope_factors": [float(f).hex() for f in self.rope_factors],
            "linear": self.numerics,
            "pool_dtype": "bfloat16",
            "page_tokens": page_tokens,
            "layout": 1,
            "backend": backend,
        }
