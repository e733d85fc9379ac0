"""chatkv: exact, resumable, draft-verified generation over a paged KV cache."""

from __future__ import annotations

import os

__version__ = "0.1.0"

# OpenMP threads that spin for long between kernels slow every step down many times as soon as
# another program wants the same cores. Read when torch loads its OpenMP; a value of yours stays.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
