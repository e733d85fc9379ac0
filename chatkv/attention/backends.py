"""Which backend serves attention here, and why another does not; loads one only when asked."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from chatkv.attention.call import AttentionCall
from chatkv.errors import BackendUnavailable


class Backend(Protocol):
    """One way to run the attention operation of `reference.paged_attention`."""

    name: str
    max_depth: int
    """Rows from root to leaf of the deepest tree."""
    calls: int
    """How many calls this backend has served."""

    @property
    def mode(self) -> Literal["exact", "guarded"]:
        """`exact`: a row has the bits of plain decoding whatever runs beside it."""
        ...

    @property
    def numerics(self) -> str:
        """Names the bits: stored pages of another value cannot be mixed with these."""
        ...

    def attend(
        self, call: AttentionCall, q: Tensor, pages: Tensor, *, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Serve one call; returns out and lse."""
        ...


NAMES = ("triton", "cpu", "reference")


def backend(name: str = "auto", device: str = "cpu") -> Backend:
    """The backend of that name, or the fastest that runs on the device.

    Args:
        name: `auto`, `triton`, `cpu` or `reference`. A named backend is never replaced by another.
        device: Where the pages live, as torch spells it.

    Raises:
        BackendUnavailable: With the reason of each backend that was looked at.
    """
    kind = device.partition(":")[0]
    wanted = NAMES if name == "auto" else (name,)
    reasons: list[str] = []
    for candidate in wanted:
        if candidate == "reference":
            from chatkv.attention.reference import ReferenceBackend

            return ReferenceBackend()
        if candidate == "triton":
            if kind != "cuda":
                reasons.append(f"triton: the pages are on {device}, not on a CUDA device")
                continue
            try:
                from chatkv.attention.triton_tree import TritonBackend
            except ImportError as error:
                reasons.append(f"triton: {error}")
                continue
            return TritonBackend()
        if candidate != "cpu":
            reasons.append(f"{candidate}: no such backend")
        elif kind != "cpu":
            reasons.append(f"cpu: the pages are on {device}")
        else:
            from chatkv.attention.cpu import CpuBackend

            return CpuBackend()
    raise BackendUnavailable(
        f"No attention backend {name!r} for {device}: {'; '.join(reasons)}.",
        hint=f"Backends: {', '.join(NAMES)}.",
    )
