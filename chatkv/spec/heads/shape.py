"""What a draft head is, in numbers. Knows no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from chatkv.models.spec import ModelSpec

Kind = Literal["parallel", "recurrent", "eagle"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Source = Literal["chatkv", "eagle3"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Kind, widths and the target it was made for."""

    kind: Kind
    hidden: int
    """Width of the target's residual, and of the head's state."""
    taps: tuple[int, ...]
    """Layers whose outputs are read, counted from 1."""
    inner: int
    """Width inside the feed-forward part."""
    depth: int
    """Guesses it is trained for: the first is that of the token behind the root."""
    draft_ids: int
    """Ids it can guess."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    source: Source = "chatkv"
    """`eagle3` reads taps as they are and guesses with output rows of its own."""
    eps: float = 1e-6
    """Of the head's own norms."""
    norms_residual: bool = False
    """Whether an eagle layer adds to the normed state; else to the state."""
    rope_factors: tuple[float, ...] = ()
    """Divisors of an eagle layer's rotary frequencies; none divides nothing."""

    @property
    def features(self) -> int:
        """Numbers of one row of taps."""
        return len(self.taps) * self.hidden


def taps_of(num_layers: int) -> tuple[int, ...]:
    """The layers that are tapped: a third, two thirds, all of them."""
    return tuple(max(1, round(num_layers * part / 3)) for part in (1, 2, 3))


def shape_for(
    kind: Kind, spec: ModelSpec, *, draft_ids: int = 8192, depth: int | None = None
) -> HeadShape:
    """The shape of a head of this kind for a target."""
    inner = {
        "parallel": spec.hidden_size,
        # A multiple of what a packed block holds.
        "recurrent": -(-4 * spec.hidden_size // 96) * 32,
        "eagle": spec.intermediate_size,
    }[kind]
    return HeadShape(
        kind=kind,
        hidden=spec.hidden_size,
        taps=taps_of(spec.num_layers),
        inner=inner,
        depth=depth or (4 if kind == "parallel" else 5),
        draft_ids=min(draft_ids, spec.vocab_size),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope_theta=spec.rope_theta,
        norm_eps=spec.norm_eps,
    )
