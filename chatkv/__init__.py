"""chatkv: exact, resumable, draft-verified generation over a paged KV cache."""

from __future__ import annotations

import os

__version__ = "0.1.0"

# OpenMP threads that spin for long between kernels bring a step from 5 to 100 ms as soon as another
# program wants the same cores. Read when torch loads its OpenMP runtime; a value of yours stays.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
