"""chatkv: exact, resumable, draft-verified generation over a paged KV cache."""

from __future__ import annotations

__version__ = "0.1.0"
